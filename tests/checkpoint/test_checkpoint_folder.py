"""The folder of a checkpoint: crashes at every point of its life, recovery, and what is rejected."""

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time

import pytest
import torch

from cuboid import CheckpointError, ConfigError, Mesh, MeshShape
from cuboid.checkpoint import saver as saver_module
from cuboid.checkpoint.format.folder import (
    INCOMPLETE,
    LATEST,
    REPLACED,
    abandon,
    begin,
    commit,
    complete,
    point_latest,
    prune,
    resolve,
    sweep,
)
from cuboid.checkpoint.format.manifest import MANIFEST, FileRecord, Manifest, check_contents, check_sizes, record_of
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorFileWriter, TensorSpec
from cuboid.checkpoint.metadata import ShardedTensor, ShardRange
from cuboid.checkpoint.save_plan import SavePlan, WriteItem
from cuboid.checkpoint.saver import Saver
from cuboid.config.schema import CheckpointConfig
from cuboid.errors import PeerLostError

KEPT, TAGS = 2, 4
#: Exit status of a child that crashes on purpose.
CRASHED = 77
#: Python's audit events for changes of a folder, which are raised before the change.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def write(folder, step):
    """Write the files of a checkpoint; returns its manifest."""
    specs = {"x": TensorSpec(torch.float32, (4, 3))}
    with TensorFileWriter(folder / "model.safetensors", specs) as file:
        file.write("x", torch.full((4, 3), float(step)))
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "numbers.json").write_text(json.dumps(step))
    names = ["model.safetensors", "optimizer/numbers.json"]
    return Manifest(step=step, files={name: record_of(folder / name) for name in names})


def save(root, step, tag=None):
    """Write one checkpoint, as a saver does. Tags are reused, so that old checkpoints are replaced too."""
    tag = tag or f"turn{step % TAGS}"
    sweep(root)
    path = commit(root, tag, write(begin(root, tag), step))
    point_latest(root, tag)
    return path


def check(root):
    """The step of the checkpoint that is found, after checking that it is intact."""
    path = resolve(root)
    manifest = Manifest.read(path)
    check_sizes(path, manifest)
    check_contents(path, manifest, manifest.files)
    with TensorFile(path / "model.safetensors") as file:
        assert file.read("x").unique().tolist() == [manifest.step]
    assert json.loads((path / "optimizer" / "numbers.json").read_text()) == manifest.step
    return manifest.step


def check_swept(root):
    """Check that after a sweep there are only complete checkpoints, of the tags that are used."""
    sweep(root)
    assert not list(root.glob(f"*{INCOMPLETE}"))
    names = {path.name for path in root.iterdir()} - {LATEST}
    assert names == {path.name for path in complete(root)}
    # A writer may be killed several times before it prunes.
    assert len(names) <= TAGS


def save_forever(root, saved):
    for step in itertools.count(saved.value + 1):
        newest = save(root, step)
        saved.value = step
        prune(root, KEPT, newest.name)


def crash_at(root, step, change):
    """Save, and die before the change with that number."""
    seen = itertools.count(1)

    def hook(event, arguments):
        if event in CHANGES and next(seen) == change:
            os._exit(CRASHED)

    sys.addaudithook(hook)
    newest = save(root, step)
    prune(root, KEPT, newest.name)
    os._exit(0)


@pytest.fixture
def forked():
    """Forks children, which saves their imports, and ends those that are left after the test."""
    context, children = multiprocessing.get_context("fork"), []

    def start(target, *arguments):
        children.append(context.Process(target=target, args=arguments))
        children[-1].start()
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.join(10)


def test_a_crash_before_any_change_of_the_folder_keeps_the_last_checkpoint(forked, tmp_path):
    for step in range(1, TAGS + 1):
        prune(tmp_path, KEPT, save(tmp_path, step).name)
    step, steps_left, crashes = TAGS + 1, [], 0
    for change in itertools.count(1):
        child = forked(crash_at, tmp_path, step, change)
        child.join(20)
        assert child.exitcode in (0, CRASHED)
        steps_left.append(check(tmp_path))
        assert steps_left[-1] in (step - 1, step)
        if child.exitcode == 0:
            break
        crashes += 1
        if steps_left[-1] == step:
            # The next child crashes at a later change of its save.
            check_swept(tmp_path)
            step += 1
    assert crashes > 20
    assert steps_left[-1] == step
    check_swept(tmp_path)


@pytest.mark.ci
def test_a_writer_killed_at_any_moment_keeps_the_last_checkpoint(forked, tmp_path):
    moments = random.Random(0)
    saved = multiprocessing.RawValue("i", 0)
    for _ in range(60):
        before = saved.value
        child = forked(save_forever, tmp_path, saved)
        deadline = time.monotonic() + 20
        while saved.value == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        child.kill()
        child.join(10)
        assert saved.value > before
        assert check(tmp_path) in (saved.value, saved.value + 1)
        check_swept(tmp_path)
        saved.value = check(tmp_path)


def test_between_two_renames_the_replaced_checkpoint_is_found(tmp_path, caplog):
    save(tmp_path, 1, "a").rename(tmp_path / f"a{REPLACED}")
    write(begin(tmp_path, "a"), 2).write(tmp_path / f"a{INCOMPLETE}")
    assert resolve(tmp_path) == resolve(tmp_path, "a") == tmp_path / f"a{REPLACED}"
    assert "resuming from the one before" in caplog.text
    sweep(tmp_path)
    prune(tmp_path, 1, "a")
    assert [path.name for path in complete(tmp_path)] == [f"a{REPLACED}"]
    save(tmp_path, 3, "a")
    assert [path.name for path in complete(tmp_path)] == ["a"]
    assert not (tmp_path / f"a{REPLACED}").exists()


def test_what_users_add_to_a_checkpoint_moves_to_the_one_that_replaces_it(tmp_path):
    folder, added = save(tmp_path, 1, "a"), {"README.md": "mine", "notes/first.txt": "mine too"}

    def texts():
        return {name: (folder / name).read_text() for name in added if (folder / name).exists()}

    (folder / "notes").mkdir()
    for name, text in added.items():
        (folder / name).write_text(text)
    save(tmp_path, 2, "a")
    assert texts() == added
    assert check(tmp_path) == 2
    # A crash between the rename and the removal of what was replaced.
    shutil.copytree(folder, tmp_path / f"a{REPLACED}")
    shutil.rmtree(folder / "notes")
    (folder / "README.md").write_text("newer")
    sweep(tmp_path)
    assert texts() == {**added, "README.md": "newer"}
    assert not (tmp_path / f"a{REPLACED}").exists()


def test_the_newest_is_found_if_latest_names_no_checkpoint(tmp_path, caplog):
    for step, tag in ((3, "three"), (12, "twelve"), (4, "four")):
        save(tmp_path, step, tag)
    assert resolve(tmp_path) == tmp_path / "four"
    assert resolve(tmp_path, "three") == resolve(tmp_path / "three") == tmp_path / "three"
    assert not caplog.records
    (tmp_path / LATEST).write_text("gone")
    assert resolve(tmp_path) == tmp_path / "twelve"
    assert "names no complete checkpoint" in caplog.text
    (tmp_path / LATEST).unlink()
    assert resolve(tmp_path) == tmp_path / "twelve"


def test_pruning_keeps_the_newest_and_the_latest(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, f"step{step}")
    point_latest(tmp_path, "step2")
    prune(tmp_path, 2, "step5")
    assert [path.name for path in complete(tmp_path)] == ["step2", "step4", "step5"]


def test_pruning_after_a_rollback_keeps_what_was_written_last(tmp_path):
    for step, tag in ((90, "old"), (100, "older_branch"), (50, "again"), (60, "again_later")):
        save(tmp_path, step, tag)
    prune(tmp_path, 2, "again_later")
    assert {path.name for path in complete(tmp_path)} == {"again", "again_later"}
    # Even if no `latest` protects it, and the file system's times say otherwise.
    (tmp_path / LATEST).unlink()
    os.utime(tmp_path / "again_later" / MANIFEST, ns=(0, 0))
    prune(tmp_path, 1, "again_later")
    assert [path.name for path in complete(tmp_path)] == ["again_later"]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, step, f"step{step}")
    remove = shutil.rmtree

    def busy(path, *args, ignore_errors=False, **kwargs):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path, *args, ignore_errors=ignore_errors, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", busy)
    prune(tmp_path, 1, "step2")
    assert "step1: can't be removed (checkpoint.keep_last): Device or resource busy" in caplog.text
    monkeypatch.undo()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step2", LATEST}


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced_or_removed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    (tmp_path / f"a{REPLACED}").mkdir()
    with pytest.raises(CheckpointError, match="isn't a checkpoint of Cuboid's"):
        begin(tmp_path, "mine")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", f"a{REPLACED}"}


def test_abandoning_a_checkpoint_removes_it_and_can_be_repeated(tmp_path):
    write(begin(tmp_path / "new", "a"), 1)
    abandon(tmp_path / "new", "a")
    abandon(tmp_path / "new", "a")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "../a", LATEST, "a.incomplete", "a.replaced", " a", "a\0"])
def test_a_tag_that_is_not_a_plain_name_is_rejected(tmp_path, tag):
    with pytest.raises(ConfigError, match="can't be the name of a checkpoint"):
        begin(tmp_path / "root", tag)
    assert not (tmp_path / "root").exists()


def test_the_error_for_a_missing_checkpoint_lists_what_the_folder_has(tmp_path):
    def error_of(*arguments):
        with pytest.raises(CheckpointError) as caught:
            resolve(*arguments)
        return str(caught.value)

    assert "is not a folder" in error_of(tmp_path / "nowhere")
    assert "the folder has none" in error_of(tmp_path)
    begin(tmp_path, "b")
    assert f"begun but never finished: b{INCOMPLETE}" in error_of(tmp_path)
    assert "is not a checkpoint" in error_of(tmp_path / f"b{INCOMPLETE}")
    save(tmp_path, 1, "a")
    assert "complete ones there: a" in error_of(tmp_path, "c")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").touch()
    assert "load_module_only=True" in error_of(tmp_path, "hub")
    pickled = tmp_path / "theirs" / "global_step3"
    pickled.mkdir(parents=True)
    (pickled / "mp_rank_00_model_states.pt").touch()
    assert "cuboid convert" in error_of(tmp_path / "theirs")
    (tmp_path / "theirs" / LATEST).write_text("global_step3")
    assert "cuboid convert" in error_of(tmp_path / "theirs")


def test_a_damaged_manifest_is_an_error_and_not_skipped_for_an_older_checkpoint(tmp_path):
    save(tmp_path, 1, "a")
    (save(tmp_path, 2, "b") / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="isn't JSON"):
        Manifest.read(resolve(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "isn't JSON"),
        ("[]", "can't be understood"),
        ('{"format": 2, "new": 1}', "is of format 2, but this version knows format 1"),
        ('{"format": 1, "step": 1, "files": {}, "more": 1}', "more: Extra inputs"),
        ('{"format": 1, "step": 1, "files": {"a": {"bytes": 1}}}', r"files\.a\.sha256: Field required"),
        ('{"format": 1, "step": 1, "files": {"../a": {"bytes": 1, "sha256": ""}}}', "inside of the checkpoint"),
    ],
)
def test_a_malformed_manifest_is_rejected(tmp_path, content, message):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Manifest.read(tmp_path)


def test_a_folder_without_manifest_is_incomplete(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: can't be read: No such file"):
        Manifest.read(tmp_path)


def test_missing_truncated_foreign_and_edited_files_are_named(tmp_path):
    path = save(tmp_path, 7, "a")
    manifest = Manifest.read(path)
    assert list(manifest.files) == ["model.safetensors", "optimizer/numbers.json"]
    check_sizes(path, manifest)
    check_contents(path, manifest, manifest.files)
    (path / "notes.txt").touch()  # files of other kinds are allowed
    (path / "optimizer" / "numbers.json").write_text("8")
    check_sizes(path, manifest)
    with pytest.raises(CheckpointError, match=r"optimizer/numbers\.json: its sha256 isn't the one"):
        check_contents(path, manifest, manifest.files)
    (path / "optimizer" / "numbers.json").unlink()
    (path / "model-00001-of-00002.safetensors").touch()
    os.truncate(path / "model.safetensors", 50)
    with pytest.raises(CheckpointError) as caught:
        check_sizes(path, manifest)
    message = str(caught.value)
    assert "model.safetensors: is 50 bytes long instead of" in message
    assert "optimizer/numbers.json: is missing" in message
    assert "model-00001-of-00002.safetensors: is foreign" in message
    with pytest.raises(CheckpointError, match=r"numbers\.json: can't be read: No such file"):
        check_contents(path, manifest, ["optimizer/numbers.json"])


def test_only_the_first_of_many_faults_are_shown(tmp_path):
    files = {f"{number}.bin": FileRecord(bytes=1, sha256="") for number in range(9)}
    with pytest.raises(CheckpointError, match=r"^\S*0\.bin: is missing; .*3\.bin: is missing \(and 5 more\)$"):
        check_sizes(tmp_path, Manifest(step=0, files=files))


def test_a_file_read_from_the_disk_has_the_same_record(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 10_000)
    assert record_of(tmp_path / "a", from_disk=True) == record_of(tmp_path / "a")


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of 4 MiB at the folder."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("file systems can't be mounted here")
    try:
        yield
    finally:
        subprocess.run(("umount", folder), check=True)


@contextlib.contextmanager
def short_files(folder):
    """Limit files to 3 MiB. Python ignores the signal for longer ones, so that writing raises an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def plan(step, rows):
    """A tensor of that many KiB."""
    values = torch.full((rows, 256), float(step))
    tensor = ShardedTensor("x", TensorSpec(values.dtype, tuple(values.shape)), None, ShardRange.of_shard(values))
    return SavePlan(step, (WriteItem.plain("", tensor),), None, {}, {"client": {"step": step}}, lambda folder: None)


def test_a_saver_removes_nothing_of_other_runs_in_a_folder_that_they_share(tmp_path):
    save(tmp_path, 100, "of another run")
    begin(tmp_path, "being written by another run")
    (tmp_path / "model.converting").mkdir()
    others = {"of another run", f"being written by another run{INCOMPLETE}", "model.converting", LATEST}
    saver = Saver(Mesh(MeshShape(1, 1, 1), rank=0, world_size=1), CheckpointConfig(keep_last=1))
    for step in (1, 2):
        assert saver.save(tmp_path, f"own{step}", plan(step, rows=1), latest=False)
        assert {path.name for path in tmp_path.iterdir()} == {*others, f"own{step}"}


def test_a_save_in_which_a_rank_is_lost_says_nothing_of_the_disk(tmp_path, monkeypatch):
    def lose(*_, **__):
        raise PeerLostError("rank 1 ended")

    monkeypatch.setattr(saver_module, "write_items", lose)
    saver = Saver(Mesh(MeshShape(1, 1, 1), rank=0, world_size=1), CheckpointConfig())
    with pytest.raises(CheckpointError, match="first wasn't written: rank 1 ended"):
        saver.save(tmp_path, "first", plan(1, rows=1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("narrow", "reason"), [(small_disk, "No space left on device"), (short_files, "File too large")]
)
def test_a_full_disk_is_reported_and_keeps_older_checkpoints(tmp_path, narrow, reason):
    saver = Saver(Mesh(MeshShape(1, 1, 1), rank=0, world_size=1), CheckpointConfig())
    with narrow(tmp_path):
        assert saver.save(tmp_path, "first", plan(1, rows=1024))
        with pytest.raises(CheckpointError, match=rf"second\.incomplete/model\.safetensors can't be written: {reason}"):
            saver.save(tmp_path, "second", plan(2, rows=3500))
        assert {path.name for path in tmp_path.iterdir()} == {"first", LATEST}
        path = resolve(tmp_path)
        manifest = Manifest.read(path)
        assert manifest.step == 1
        check_sizes(path, manifest)
        check_contents(path, manifest, manifest.files)
        # A smaller checkpoint can be written afterwards.
        assert saver.save(tmp_path, "third", plan(3, rows=1024))
        assert Manifest.read(resolve(tmp_path)).step == 3
