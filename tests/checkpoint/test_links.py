"""Symbolic links in checkpoints: those that lead out of one are named and not followed."""

import os
import re

import pytest

from cuboid import CheckpointError
from cuboid.convert.inspection import inspect_checkpoint
from cuboid.convert.run import ConvertOptions, convert
from cuboid.convert.sources import find_checkpoint
from cuboid.verify import SmallModel
from cuboid.weights.auxiliary_files import copy_tokenizer
from cuboid.weights.model_folder import check_model_folder


def _links(kind, folder, secret):
    """Put a link that leads to ``secret``, or to the folder that it is in, into a checkpoint."""
    if kind == "absolute":
        (folder / "vocab.txt").symlink_to(secret)
    elif kind == "relative":
        (folder / "vocab.txt").symlink_to(os.path.relpath(secret, folder))
    elif kind == "link to link":
        (folder / "README.md").symlink_to("vocab.txt")
        (folder / "vocab.txt").symlink_to(secret)
    elif kind == "dots":
        (folder / "sub").mkdir()
        (folder / "vocab.txt").symlink_to(f"sub/../../{secret.parent.name}/{secret.name}")
    elif kind == "folder":
        (folder / "templates").symlink_to(secret.parent)
    elif kind == "in a folder":
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").symlink_to(secret)
    elif kind == "weights":
        (folder / "model.safetensors").rename(secret)
        (folder / "model.safetensors").symlink_to(secret)
    elif kind == "config":
        (folder / "config.json").rename(secret)
        (folder / "config.json").symlink_to(secret)
    elif kind == "dangling":
        (folder / "vocab.txt").symlink_to(secret.parent / "not there")


@pytest.mark.parametrize(
    "kind",
    ["absolute", "relative", "link to link", "dots", "folder", "in a folder", "weights", "config", "dangling"],
)
def test_a_link_out_of_a_checkpoint_is_named_and_not_followed(tmp_path, kind):
    folder, secret = tmp_path / "model", tmp_path / "elsewhere" / "secret"
    SmallModel("gpt2", heads=2, layers=1).write(folder)
    secret.parent.mkdir()
    secret.write_text("the user's own")
    _links(kind, folder, secret)
    named = (
        r"(vocab\.txt|README\.md|templates|chat\.jinja|model\.safetensors|config\.json): is a link that leads out of"
    )
    with pytest.raises(CheckpointError, match=named) as caught:
        convert(ConvertOptions(folder, tmp_path / "out"), lambda _: None)
    assert str(tmp_path / "elsewhere") in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=named):
        check_model_folder(folder)
    assert any(re.search(named, fault) for fault in inspect_checkpoint(find_checkpoint(folder), verify=True).faults)


def test_links_inside_of_a_checkpoint_and_of_the_hubs_cache_are_followed(tmp_path):
    plain, cached = tmp_path / "plain", tmp_path / "hub" / "models--a--b"
    SmallModel("gpt2", heads=2, layers=1).write(plain)
    (plain / "vocab.txt").write_text("words")
    snapshot = cached / "snapshots" / "0123"
    (snapshot / "templates").mkdir(parents=True)
    (cached / "blobs").mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        file.rename(cached / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (cached / "blobs" / "t").write_text("{{ messages }}")
    (snapshot / "templates" / "chat.jinja").symlink_to("../../../blobs/t")
    (snapshot / "README.md").symlink_to("vocab.txt")
    (tmp_path / "link").symlink_to(snapshot)
    for name, source in (("one", snapshot), ("two", tmp_path / "link")):
        convert(ConvertOptions(source, tmp_path / name), lambda _: None)
        for copied in ("vocab.txt", "README.md"):
            assert (tmp_path / name / copied).read_text() == "words"
            assert not (tmp_path / name / copied).is_symlink()
        assert (tmp_path / name / "templates" / "chat.jinja").read_text() == "{{ messages }}"
        check_model_folder(source)
    # The blobs' own folder is where it ends.
    (cached / "blobs" / "u").symlink_to(tmp_path / "one" / "config.json")
    (snapshot / "special_tokens_map.json").symlink_to("../../blobs/u")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        convert(ConvertOptions(snapshot, tmp_path / "three"), lambda _: None)


def test_a_tokenizers_file_that_is_a_link_elsewhere_is_not_copied_beside_a_result(tmp_path, caplog):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (tmp_path / "secret").write_text("the user's own")
    (source / "vocab.txt").symlink_to("../secret")
    (source / "config.json").write_text("{}")
    (source / "merges.txt").write_text("a b")
    copy_tokenizer(source, target)
    assert [path.name for path in target.iterdir()] == ["merges.txt"]
    assert "vocab.txt: is a link that leads out of its folder" in caplog.text
