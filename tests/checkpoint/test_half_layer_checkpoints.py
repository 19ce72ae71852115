"""Checkpoints of stages that begin inside a layer are those of any layout: saving, resuming, files for each rank."""

import json

import pytest
import torch
from test_checkpoints import BEFORE, resume, train_and_save

import cuboid
from comparing import stored
from converting import layout_section, run, same
from cuboid.config.schema import parse_config
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.verify import SmallModel
from cuboid.weights.rank_folder import RankFolder
from training import settings

TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=5)
HALVES = {"stage_balance": [2.5, 2.5]}


@pytest.mark.ci
def test_training_goes_on_with_whole_layers_and_with_other_halves(pool, checkpoint, tmp_path):
    path, out = checkpoint(TIED), tmp_path / "out"
    losses, weights = pool.run(2, train_and_save, path, settings(stages=2, pipeline=HALVES), str(out), {})[0]
    folder = out / f"global_step{BEFORE}"
    written = stored(folder)
    assert stored(path).keys() == written.keys() == stored(folder / "optimizer" / "exp_avg").keys()
    assert all(torch.equal(written[name], weights[name]) for name in written)
    assert json.loads((folder / "state.json").read_text())["layout"]["layers"] == [2.5, 2.5]
    others = [
        (2, settings(stages=2, pipeline=HALVES)),
        (3, settings(stages=3, pipeline={"stage_balance": [1.5, 1, 2.5]})),
        (4, settings("1x1x2", stages=2)),
    ]
    for ranks, config in others:
        resumed = pool.run(ranks, resume, path, config, str(out), {})[0]
        assert resumed == (losses if config is others[0][1] else pytest.approx(losses, rel=1e-6))


def test_files_for_each_rank_and_back(checkpoint, tmp_path, monkeypatch):
    path, section = checkpoint(TIED), layout_section("1x1x2", 2, **HALVES)
    run(path, tmp_path / "ranks", config=parse_config(section))
    assert RankFolder.read(tmp_path / "ranks").layers == (2.5, 2.5)
    run(tmp_path / "ranks", tmp_path / "back")
    assert same(tmp_path / "back", path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    names = set()
    for rank in range(0, 4, 2):
        monkeypatch.setenv("RANK", str(rank))
        read = local_state(cuboid.from_pretrained(path, section))
        from_files = local_state(cuboid.from_pretrained(tmp_path / "ranks", section))
        assert all(torch.equal(x, from_files.pop(name)) for name, x in read.items())
        assert not from_files
        assert not names & {name for name in read if ".layers." in name}
        names |= read.keys()
    assert names - {"lm_head.weight"} == stored(path).keys()  # the head is tied
    with pytest.raises(CheckpointError, match=r"in 2 stages of 2\.5, 2\.5 layers, but the config asks for .* of 3, 2"):
        cuboid.from_pretrained(tmp_path / "ranks", layout_section("1x1x2", 2, stage_balance=[3, 2]))
