"""Checkpoints of ranks with several chunks are those of any layout: saving, resuming, and files for each rank."""

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
from cuboid.verify import SmallModel, WorkerPool
from training import settings

V = {"chunks": 2, "schedule": "zero_bubble-v"}
ROUND = {"chunks": 2, "schedule": "seq1f1b-interleaved"}
LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=5)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=5)


@pytest.mark.parametrize(
    ("small", "chunked"), [(TIED, V), pytest.param(LLAMA, ROUND, marks=pytest.mark.slow)], ids=["v", "interleaved"]
)
def test_training_goes_on_with_whole_stages_one_process_and_other_chunks(
    pool, checkpoint, tmp_path, capsys, small, chunked
):
    path, saved = checkpoint(small), str(tmp_path)
    config = settings(stages=2, pipeline=chunked)
    losses, weights = pool.run(2, train_and_save, path, config, saved, {})[0]
    folder = tmp_path / f"global_step{BEFORE}"
    written = stored(folder)
    assert all(torch.equal(written[name], weights[name]) for name in written)
    assert stored(path).keys() == written.keys() == stored(folder / "optimizer" / "exp_avg").keys()
    assert "4 stage(s) of " in inspected(folder, capsys)
    assert pool.run(2, resume, path, config, saved, {})[0] == losses
    other = ROUND if chunked is V else V
    for layout, ranks in (
        (settings(stages=2), 2),
        (settings("1x1x2", stages=2, pipeline={**other, "chunks": 2}), 4),
        (settings(stages=1, pipeline={"chunks": 3, "schedule": "zero_bubble-interleaved"}, zero=0), 1),
    ):
        with WorkerPool(ranks) as fresh:
            assert fresh.run(ranks, resume, path, layout, saved, {})[0] == pytest.approx(losses, rel=1e-6)
    with WorkerPool(1) as alone:
        assert alone.run(1, resume, path, settings(), saved, {})[0] == pytest.approx(losses, rel=1e-6)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def inspected(folder, capsys):
    commands(["inspect", str(folder)], standalone_mode=False)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("chunked", [V, ROUND], ids=["v", "interleaved"])
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
        read, own = (local_state(cuboid.from_pretrained(each, section)) for each in (path, tmp_path / "ranks"))
        assert read.keys() == own.keys()
        assert all(torch.equal(read[name], own[name]) for name in read)


def test_files_for_ranks_of_other_chunks_are_rejected(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=parse_config(layout_section(stages=2, **V)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for pipeline in (ROUND, {}, {**V, "chunks": 1, "schedule": "zero_bubble"}):
        with pytest.raises(CheckpointError, match=r"on the pipeline's ranks 0, 1, 1, 0, but the config asks for"):
            cuboid.from_pretrained(tmp_path / "ranks", layout_section(stages=2, **pipeline))
