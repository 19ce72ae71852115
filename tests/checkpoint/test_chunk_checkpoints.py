"""Checkpoints of ranks with several chunks are those of any layout: saving, resuming, and files for each rank."""

import functools

import pytest
import torch
from test_checkpoints import BEFORE, resume, train_and_save

import cuboid
from comparing import stored
from converting import layout_section, run, same
from cuboid.cli import commands
from cuboid.config.schema import parse_config
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.verify import SmallModel
from training import ranks_of, settings

V = {"chunks": 2, "schedule": "zero_bubble-v", "stage_balance": "layers"}
ROUND = {"chunks": 2, "schedule": "seq1f1b-interleaved", "stage_balance": "layers"}
AUTO = {"chunks": "auto", "schedule": "auto"}
LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=5)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=5)
KINDS = {"v": (TIED, V), "interleaved": (LLAMA, ROUND)}
PLACES = {"v": "0, 1, 1, 0", "interleaved": "0, 1, 0, 1"}


@pytest.fixture(scope="module")
def saved(pool, checkpoint, tmp_path_factory):
    """A checkpoint of two ranks with two chunks each, written once for each placement."""

    @functools.cache
    def of(kind):
        small, chunked = KINDS[kind]
        out, config = tmp_path_factory.mktemp(kind), settings(stages=2, pipeline=chunked)
        losses, weights = pool.run(2, train_and_save, checkpoint(small), config, str(out), {})[0]
        return checkpoint(small), config, out, losses, weights

    return of


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_whole_and_the_same_layout_resumes_bit_for_bit(pool, saved, capsys, kind):
    path, config, out, losses, weights = saved(kind)
    folder = out / f"global_step{BEFORE}"
    written = stored(folder)
    assert all(torch.equal(written[name], weights[name]) for name in written)
    assert stored(path).keys() == written.keys() == stored(folder / "optimizer" / "exp_avg").keys()
    assert f"4 stage(s) of 2, 1, 1, 1 layers on the pipeline's ranks {PLACES[kind]}" in inspected(folder, capsys)
    assert pool.run(2, resume, path, config, str(out), {})[0] == losses


OTHERS = {
    "whole stages": settings(stages=2),
    "stages wherever the step is shortest": settings(stages=2, pipeline=AUTO),
    "one process": settings(),
    "meshes in a V": settings("1x1x2", stages=2, pipeline=V),
    "meshes, interleaved": settings("2x1x1", stages=2, pipeline=ROUND, zero=0),
    "three chunks on one rank": settings(stages=1, pipeline={"chunks": 3, "schedule": "zero_bubble-interleaved"}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("v", "whole stages"), ("v", "one process"), ("interleaved", "stages wherever the step is shortest")]
    + [
        pytest.param(kind, layout, marks=pytest.mark.slow)
        for kind in KINDS
        for layout in OTHERS
        if (kind == "v") is not (layout in ("whole stages", "one process"))
    ],
)
def test_training_goes_on_with_other_stages(pool, alone, saved, kind, layout):
    path, _, out, losses, _ = saved(kind)
    config = OTHERS[layout]
    ranks = ranks_of(config)
    resumed_losses = (alone if ranks == 1 else pool).run(ranks, resume, path, config, str(out), {})[0]
    assert resumed_losses == pytest.approx(losses, rel=1e-6)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def inspected(folder, capsys):
    commands(["inspect", str(folder)], standalone_mode=False)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("chunked", [V, ROUND, AUTO], ids=["v", "interleaved", "auto"])
def test_files_for_each_rank_and_back(checkpoint, tmp_path, monkeypatch, capsys, chunked):
    path, section = checkpoint(TIED), layout_section("1x1x2", 2, **chunked)
    run(path, tmp_path / "ranks", config=parse_config(section))
    assert len(list((tmp_path / "ranks").glob("*.safetensors"))) == 4
    assert "on the pipeline's ranks 0, 1" in inspected(tmp_path / "ranks", capsys)
    run(tmp_path / "ranks", tmp_path / "back")
    assert same(tmp_path / "back", path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        read, from_rank_files = (
            local_state(cuboid.from_pretrained(folder, section)) for folder in (path, tmp_path / "ranks")
        )
        assert read.keys() == from_rank_files.keys()
        assert all(torch.equal(read[name], from_rank_files[name]) for name in read)


def test_files_for_ranks_of_other_chunks_are_rejected(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=parse_config(layout_section(stages=2, **V)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for pipeline in (ROUND, {}, {**V, "chunks": 1, "schedule": "zero_bubble"}):
        with pytest.raises(CheckpointError, match=r"on the pipeline's ranks 0, 1, 1, 0, but the config asks for"):
            cuboid.from_pretrained(tmp_path / "ranks", layout_section(stages=2, **pipeline))
