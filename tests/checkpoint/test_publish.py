"""Saving weights over others: the user's files are kept, and a crash leaves either the old or the new weights."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cuboid import CheckpointError
from cuboid.checkpoint.format.publish import SCRATCH, abandon_export, begin_export, publish

CRASHED = 77
#: Python's audit events for changes of a folder, which are raised before the change.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Maximum size of a file, by which the small model is saved in several.
FORMS = {"single": "1GB", "two": "18KB", "three": "12KB"}
#: Files of the user's with names like weights, some of them like shards, that no index names.
OWN = [
    "model-best.safetensors",
    "model_backup.safetensors",
    "model-00001-of-00009.safetensors",
    "model.safetensors.bak",
]


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Folders of a model in each form, whose weights all have the same value: 1, 2 or 3."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    root = tmp_path_factory.mktemp("saves")
    model = LlamaForCausalLM(config)
    for value in (1, 2, 3):
        for form, size in FORMS.items():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
            model.save_pretrained(root / f"{form}{value}", max_shard_size=size)
    assert len(list((root / "three1").glob("*.safetensors"))) == 3
    return root


def value_of(folder):
    """The value of all weights that plain transformers loads."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    values = {float(x) for p in model.parameters() for x in (p.min(), p.max())}
    assert len(values) == 1, values
    return values.pop()


def save(source, folder):
    scratch = begin_export(folder)
    for path in source.iterdir():
        shutil.copyfile(path, scratch / path.name)
    publish(folder)


def crash_at(source, folder, change):
    """Save, and die before the change with that number."""
    seen = itertools.count(1)

    def hook(event, arguments):
        if event in CHANGES and next(seen) == change:
            os._exit(CRASHED)

    sys.addaudithook(hook)
    save(source, folder)
    os._exit(0)


def forked(target, *arguments):
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    child.start()
    return child


def weights(folder):
    return sorted(path.name for path in folder.iterdir() if "model" in path.name)


def own_files(folder):
    for name in OWN:
        (folder / name).write_text(f"mine: {name}")


def check_own(folder):
    assert all((folder / name).read_text() == f"mine: {name}" for name in OWN)


def crash_everywhere(saves, folder, before, after, every=1):
    """Crash before every change: the old or the new weights are intact, and the next save removes other files."""
    values = []
    for change in itertools.count(1, every):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saves / f"{before}1", folder)
        own_files(folder)
        child = forked(crash_at, saves / f"{after}2", folder, change)
        child.join(30)
        assert child.exitcode in (0, CRASHED)
        values.append(value_of(folder))
        for form in [list(FORMS)[change % 3]] if every > 1 else [list(FORMS)[change % 3], after]:
            save(saves / f"{form}3", folder)
            assert value_of(folder) == 3.0
            check_own(folder)
            expected = {*weights(saves / f"{form}3"), *OWN}
            assert set(weights(folder)) == expected, (before, after, change)
            assert not (folder / SCRATCH).exists()
        if child.exitcode == 0:
            break
    assert set(values) == {1.0, 2.0}
    assert values == sorted(values)
    return len(values)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("before", "after"), [("single", "two"), ("two", "single"), ("three", "two")])
def test_a_crash_before_any_change_leaves_the_old_or_the_new_weights(saves, tmp_path, before, after):
    assert crash_everywhere(saves, tmp_path / "out", before, after, every=5) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(itertools.product(FORMS, FORMS)))
def test_a_crash_between_any_two_forms_leaves_the_old_or_the_new_weights(saves, tmp_path, before, after):
    assert crash_everywhere(saves, tmp_path / "out", before, after) > 25


def save_forever(saves, folder, turn):
    forms = list(FORMS)
    while True:
        turn.value += 1
        save(saves / f"{forms[turn.value % 5 % 3]}{turn.value % 3 + 1}", folder)


@pytest.mark.parametrize("kills", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_moment_leaves_complete_weights(saves, tmp_path, kills):
    chance, turn, folder = random.Random(kills), multiprocessing.RawValue("i", 0), tmp_path / "out"
    save(saves / "two1", folder)
    own_files(folder)
    for _ in range(kills):
        child, begun = forked(save_forever, saves, folder, turn), turn.value
        while turn.value < begun + 2:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        child.kill()
        child.join(10)
        # The weights of the killed save, or of the previous one.
        assert value_of(folder) in {turn.value % 3 + 1.0, (turn.value - 1) % 3 + 1.0}
        check_own(folder)
    save(saves / "three1", folder)
    assert set(weights(folder)) == {*weights(saves / "three1"), *OWN}


def test_a_users_file_with_the_name_of_a_shard_is_never_overwritten(saves, tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_text("mine")
    for value in (1, 2):
        save(saves / f"two{value}", tmp_path)
        assert (tmp_path / "model-00001-of-00002.safetensors").read_text() == "mine"
        assert value_of(tmp_path) == value
        assert len(list(tmp_path.glob("*.safetensors"))) == 3
    save(saves / "single3", tmp_path)
    assert weights(tmp_path) == ["model-00001-of-00002.safetensors", SINGLE]


def test_files_that_a_foreign_index_names_are_kept(saves, tmp_path):
    shutil.copytree(saves / "two1", tmp_path / "out")
    index = tmp_path / "out" / INDEX
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "model-best.safetensors")
    index.write_text(json.dumps(content))
    own_files(tmp_path / "out")
    save(saves / "single2", tmp_path / "out")
    check_own(tmp_path / "out")
    for text in ("{", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}'):
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(saves / "two1", tmp_path / "out")
        index.write_text(text)
        (tmp_path / "b").write_text("mine")
        save(saves / "three2", tmp_path / "out")
        assert value_of(tmp_path / "out") == 2.0
        assert (tmp_path / "b").exists()


def test_without_hard_links_shards_keep_their_temporary_names(saves, tmp_path, monkeypatch):
    shutil.copytree(saves / "two1", tmp_path / "out")

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save(saves / "two2", tmp_path / "out")
    assert value_of(tmp_path / "out") == 2.0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    monkeypatch.undo()
    save(saves / "two3", tmp_path / "out")
    assert weights(tmp_path / "out") == weights(saves / "two3")


def test_a_failed_save_keeps_the_old_weights(saves, tmp_path, monkeypatch):
    shutil.copytree(saves / "two1", tmp_path / "out")
    own_files(tmp_path / "out")
    before = weights(tmp_path / "out")
    (tmp_path / "out" / "README.md").mkdir()
    scratch = begin_export(tmp_path / "out")
    for path in (saves / "three2").iterdir():
        shutil.copyfile(path, scratch / path.name)
    (scratch / "README.md").touch()
    with pytest.raises(CheckpointError, match=r"README\.md: is a folder"):
        publish(tmp_path / "out")
    abandon_export(tmp_path / "out")
    assert weights(tmp_path / "out") == before
    assert value_of(tmp_path / "out") == 1.0
    (tmp_path / "out" / SCRATCH).write_text("mine")
    with pytest.raises(CheckpointError, match="move it away"):
        begin_export(tmp_path / "out")
    assert (tmp_path / "out" / SCRATCH).read_text() == "mine"
