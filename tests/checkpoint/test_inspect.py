"""``cuboid inspect``: it shows what a checkpoint contains, and names what is wrong with it."""

import errno
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from comparing import stored
from converting import layout, run
from cuboid.checkpoint.format.bounded_files import open_regular
from cuboid.cli import commands
from cuboid.verify import SmallModel
from training import make_engine, settings, train

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=2)


def inspect(*arguments):
    """Exit status and output, with tables at full width."""
    words = ["inspect", *(str(argument) for argument in arguments)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(commands, words)
    if result.exit_code > 1 or (result.exception and not isinstance(result.exception, SystemExit)):
        raise result.exception
    return result.exit_code, result.stdout


def as_json(*arguments):
    status, output = inspect(*arguments, "--json")
    return status, json.loads(output)


def save_twice(path, config, out):
    """Save a checkpoint, resume from it in the same run, and save another one."""
    engine = make_engine(path, config)
    train(engine, 1)
    engine.save_checkpoint(out, client_state={"data_fingerprint": "abc"})
    engine.load_checkpoint(out)
    train(engine, 1, skip=1)
    engine.save_checkpoint(out)


@pytest.fixture(scope="module")
def trained(pool, checkpoint, tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, from two stages of two ranks, in bfloat16."""
    out = tmp_path_factory.mktemp("trained")
    pool.run(4, save_twice, checkpoint(LLAMA), settings("1x2x1", stages=2, bf16=True), str(out))
    return out


def test_step_layout_versions_and_lineage_of_a_checkpoint_are_shown(trained, checkpoint):
    status, shown = as_json(trained)
    assert status == 0
    assert shown["kind"] == "checkpoint of cuboid"
    assert shown["path"] == str(trained / "global_step2")
    assert shown["step"] == 2
    assert shown["layout"]["mesh"] == {"batch": 1, "sequence": 2, "hidden": 1}
    assert shown["layout"]["stages"] == 2
    assert shown["layout"]["world_size"] == 4
    assert shown["versions"]["torch"] == version("torch")
    assert shown["optimizer"]["quantities"] == ["exp_avg", "exp_avg_sq", "master"]
    assert [(ancestor["path"], ancestor["step"]) for ancestor in shown["lineage"]] == [
        (str(checkpoint(LLAMA)), None),
        (str(trained / "global_step1"), 1),
    ]
    assert shown["lineage"][1]["data_fingerprint"] == "abc"
    status, text = inspect(trained)
    assert status == 0
    for part in ("mesh 1×2×1, 2 stage(s) of 1, 1 layers", "lineage", str(trained / "global_step1"), "exp_avg_sq"):
        assert part in text


def test_every_tensor_and_file_of_a_checkpoint_is_listed(trained):
    folder = trained / "global_step2"
    _, shown = as_json(folder)
    assert {file["name"]: file["bytes"] for file in shown["files"]} == {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    assert [file["name"] for file in shown["files"] if file["sha256"] is None] == ["manifest.json"]
    for where in ("", "optimizer/exp_avg", "optimizer/master"):
        tensors = stored(folder / where)
        listed = {x["name"]: x for x in shown["tensors"] if x["file"].rpartition("/")[0] == where}
        assert {name: tuple(x["shape"]) for name, x in listed.items()} == {
            name: tuple(x.shape) for name, x in tensors.items()
        }
        assert all(f"torch.{listed[name]['dtype']}" == str(x.dtype) for name, x in tensors.items())
        assert all(listed[name]["bytes"] == x.nbytes for name, x in tensors.items())
    _, text = inspect(folder, "--parameters")
    assert "model.layers.1.mlp.down_proj.weight" in text
    _, text = inspect(folder)
    assert "model.layers.1.mlp.down_proj.weight" not in text
    assert f"{sum(x.numel() for x in stored(folder).values()):,}" in text


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_verify_finds_a_single_flipped_bit_and_names_the_file(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    status, text = inspect(tmp_path / "copy", "--verify")
    assert status == 0
    assert "checksums compared, none differs" in text
    file = max((tmp_path / "copy" / "global_step2" / "optimizer" / "exp_avg").glob("*.safetensors"))
    flip(file)
    assert inspect(tmp_path / "copy")[0] == 0
    status, text = inspect(tmp_path / "copy", "--verify")
    assert status == 1
    assert f"wrong: {file}" in text
    status, shown = as_json(tmp_path / "copy", "--verify")
    assert status == 1
    assert len(shown["faults"]) == 1
    assert inspect(tmp_path / "copy" / "global_step1", "--verify")[0] == 0


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: next((folder / "optimizer" / "master").glob("*.safetensors")).unlink(), "is missing"),
        (lambda folder: os.truncate(next(folder.glob("*.safetensors")), 3000), "3000 bytes"),
        (lambda folder: (folder / "model-00009-of-00009.safetensors").write_bytes(b"x"), "foreign"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json: can't be understood"),
        (lambda folder: (folder / "state.json").write_text("["), "state.json: is 1 bytes long"),
    ],
)
def test_missing_truncated_and_foreign_files_are_reported_without_verify(trained, tmp_path, damage, expected):
    shutil.copytree(trained / "global_step2", tmp_path / "copy")
    damage(tmp_path / "copy")
    status, text = inspect(tmp_path / "copy")
    assert status == 1
    assert expected in text


def test_a_hugging_face_folder_is_recognized_and_its_index_is_checked(checkpoint, tmp_path):
    status, shown = as_json(checkpoint(LLAMA))
    assert (status, shown["kind"], shown["step"]) == (0, "Hugging Face checkpoint", None)
    assert {x["name"] for x in shown["tensors"]} == set(stored(checkpoint(LLAMA)))
    status, text = inspect(checkpoint(LLAMA), "--verify")
    assert status == 0
    assert "no checksums are recorded" in text
    run(checkpoint(LLAMA), tmp_path / "several", max_shard_bytes=100_000)
    assert inspect(tmp_path / "several")[0] == 0
    file = max((tmp_path / "several").glob("*.safetensors"))
    file.unlink()
    status, text = inspect(tmp_path / "several")
    assert status == 1
    assert f"{file.name}: can't be opened" in text


def test_per_rank_files_show_their_layout_and_are_verified(checkpoint, tmp_path):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x1", 2))
    status, shown = as_json(tmp_path / "ranks", "--verify")
    assert (status, shown["kind"]) == (0, "per-rank files")
    assert shown["layout"]["layers"] == [1, 1]
    assert [file["name"] for file in shown["files"] if file["sha256"] is None] == ["shards.json"]
    flip(tmp_path / "ranks" / "rank-00002-of-00004.safetensors")
    status, text = inspect(tmp_path / "ranks", "--verify")
    assert status == 1
    assert "rank-00002-of-00004.safetensors: its sha256" in text
    (tmp_path / "ranks" / "rank-00001-of-00004.safetensors").unlink()
    assert "rank-00001-of-00004.safetensors: is missing" in inspect(tmp_path / "ranks")[1]


def test_a_per_rank_file_that_cannot_be_read_is_a_fault(checkpoint, tmp_path, monkeypatch):
    run(checkpoint(LLAMA), tmp_path / "ranks", config=layout("1x2x1", 2))
    name = "rank-00001-of-00004.safetensors"

    def bad_sector(path):
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_regular(path)

    monkeypatch.setattr("cuboid.checkpoint.format.manifest.open_regular", bad_sector)
    status, text = inspect(tmp_path / "ranks", "--verify")
    assert (status, f"{name}: can't be read: Input/output error" in text) == (1, True)


class Harm:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_of_deepspeed_are_listed_and_never_opened(tmp_path):
    (tmp_path / "run" / "global_step7").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step7")
    torch.save({"module": Harm(tmp_path / "harm")}, tmp_path / "run" / "global_step7" / "mp_rank_00_model_states.pt")
    status, shown = as_json(tmp_path / "run", "--verify")
    assert (status, shown["kind"]) == (0, "DeepSpeed checkpoint")
    assert [file["name"] for file in shown["files"]] == ["mp_rank_00_model_states.pt"]
    assert not (tmp_path / "harm").exists()
