"""Replace the weights in a Hugging Face folder atomically: transformers loads either the old ones or the new ones.

transformers opens ``model.safetensors`` if it exists, else the files that ``model.safetensors.index.json`` names. So
renaming or removing one of these two is the moment of the switch, and everything else happens before or after it. New
shards whose names are taken by old ones first get names with a unique token. Only old files that the folder's index
named are removed; all others are the user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cuboid.checkpoint.format.bounded_files import is_plain_name, read_object
from cuboid.checkpoint.format.folder import sync
from cuboid.checkpoint.format.weight_index import read_index
from cuboid.errors import CheckpointError

#: Subfolder of the target in which a save is written until it is complete.
SCRATCH = ".cuboid-incomplete"
#: File in it that lists which of the target's files belong to this save or to the previous weights. Those of them that
#: transformers doesn't open in the end are removed, by this save or, after a crash, by the next one.
_NOTED = "noted.json"
_WEIGHTS = ".safetensors"
#: How transformers names files of weights, with an optional variant; and shards, with our token if the name was taken.
_SINGLE = re.compile(r"model(?P<variant>\.\w+)?\.safetensors")
_INDEX = re.compile(r"model\.safetensors\.index(?P<variant>\.\w+)?\.json")
_SHARD = re.compile(r"model(\.\w+)?-\d{5}-of-\d{5}(\.cuboid-[0-9a-f]{32})?\.safetensors")


def begin_export(folder: Path) -> Path:
    """Create the scratch folder for a save in a folder, and clean up after a save that crashed.

    Raises:
        CheckpointError: something other than a scratch folder has its name.
        OSError: from the file system.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / SCRATCH
    if scratch.is_symlink() or (scratch.exists() and not scratch.is_dir()):
        raise CheckpointError(f"{scratch}: is where saves are written until they are complete; move it away")
    if scratch.exists():
        _remove_noted(folder)
        shutil.rmtree(scratch)
    scratch.mkdir()
    return scratch


def abandon_export(folder: Path) -> None:
    """Clean up after a save that failed; errors are ignored."""
    with contextlib.suppress(OSError):
        _remove_noted(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def publish(folder: Path) -> None:
    """Move the files from the folder of :func:`begin_export` to their final places.

    A crash at any moment leaves the old weights or the new ones loadable; other files that it leaves are removed by
    the next save. Config and tokenizer can't be switched together with the weights: a crash just before the switch
    leaves the new ones beside the old weights, which matters only if the save replaces another model.

    Raises:
        CheckpointError: a folder has the name of a file to be saved.
        OSError: from the file system.
    """
    scratch = folder / SCRATCH
    new = sorted(path.name for path in scratch.iterdir())
    for name in new:
        if (folder / name).is_dir() and not (scratch / name).is_dir():
            raise CheckpointError(f"{folder / name}: is a folder, where a file of that name is to be saved")
    single = next((name for name in new if _SINGLE.fullmatch(name)), None)
    index = next((name for name in new if _INDEX.fullmatch(name)), None)
    shards = [name for name in new if _SHARD.fullmatch(name)]
    # Config and tokenizer first: the switch of the weights is the last change.
    for name in new:
        if name not in (single, index, *shards):
            _place(scratch / name, folder / name)
    if single is not None:
        _publish_single(folder, single)
    elif index is not None:
        _publish_shards(folder, index, shards)
    shutil.rmtree(scratch)
    sync(folder)


def _publish_single(folder: Path, single: str) -> None:
    index = f"model.safetensors.index{_variant(_SINGLE, single)}.json"
    _note(folder, single, index, [_known(folder / name) for name in (index, *_old_shards(folder / index))])
    _place(folder / SCRATCH / single, folder / single)
    # The switch: with a single file there, transformers doesn't look at the index.
    sync(folder)
    _remove_noted(folder)


def _publish_shards(folder: Path, index: str, shards: list[str]) -> None:
    scratch, single = folder / SCRATCH, f"model{_variant(_INDEX, index)}.safetensors"
    content = read_object(scratch / index)
    token = f".cuboid-{uuid.uuid4().hex}"
    is_taken = any(os.path.lexists(folder / name) for name in shards)
    names = {name: f"{name.removesuffix(_WEIGHTS)}{token}{_WEIGHTS}" if is_taken else name for name in shards}
    removable = [_known(folder / name) for name in _old_shards(folder / index)]
    for name in shards:
        # A crash may leave a new shard under either name; an old one of that name has another identity.
        _, identity = _known(scratch / name)
        removable += [(name, identity), (names[name], identity)]
    _note(folder, single, index, removable)
    for name in shards:
        (scratch / name).rename(folder / names[name])
    sync(folder)
    _place_index(folder, index, content, names)
    (folder / single).unlink(missing_ok=True)
    # The switch: without a single file, transformers opens what the index names.
    sync(folder)
    _remove_noted(folder)
    if is_taken and _link(folder, names):
        # The old shards are gone, so that the new ones can have their proper names.
        _place_index(folder, index, content, {name: name for name in shards})
        _remove_noted(folder)


def _link(folder: Path, names: Mapping[str, str]) -> bool:
    """Hard-link files to their proper names; returns whether that succeeded."""
    try:
        for name, source in names.items():
            os.link(folder / source, folder / name)
    except OSError:
        # One of the names is taken by a file of the user's, or the file system has no links: the shards keep the names
        # with the token, to which the index refers.
        _remove_noted(folder)
        return False
    sync(folder)
    return True


def _place(source: Path, target: Path) -> None:
    if not source.is_dir():
        sync(source)
        source.replace(target)
        return
    # A folder, such as a model's own code, is merged file by file, since the user may have others in it.
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        _place(path, target / path.name)


def _place_index(folder: Path, index: str, content: dict[str, Any], names: Mapping[str, str]) -> None:
    weight_map = {tensor: names[file] for tensor, file in content["weight_map"].items()}
    _write_json(folder / SCRATCH / index, {**content, "weight_map": weight_map})
    (folder / SCRATCH / index).replace(folder / index)
    sync(folder)


#: A file's name and identity; None for the identity if there is no such file.
_Known = tuple[str, list[int] | None]


def _note(folder: Path, single: str, index: str, files: Iterable[_Known]) -> None:
    """Record which files may be removed, so that the next save can do it if this one crashes."""
    noted = [[name, identity] for name, identity in files if identity is not None]
    _write_json(folder / SCRATCH / _NOTED, {"single": single, "index": index, "files": noted})
    sync(folder / SCRATCH)


def _remove_noted(folder: Path) -> None:
    """Remove the noted files that haven't changed since, except for those that transformers opens."""
    try:
        content = read_object(folder / SCRATCH / _NOTED)
        single, index = str(content["single"]), str(content["index"])
        files = [(name, identity) for name, identity in content["files"] if is_plain_name(name)]
    except (CheckpointError, KeyError, TypeError, ValueError):
        # The save crashed before it moved anything.
        return
    in_use = {single} if (folder / single).exists() else {index, *_named_by(folder / index)}
    for name, identity in files:
        if name not in in_use and _known(folder / name)[1] == identity:
            (folder / name).unlink()
    sync(folder)


def _known(path: Path) -> _Known:
    # Inode, size and time show whether a file of that name is still the same one.
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not path.is_dir():
            return path.name, [status.st_ino, status.st_size, status.st_mtime_ns]
    return path.name, None


def _named_by(index: Path) -> set[str]:
    """The files that an index names; empty if there is none or it is malformed."""
    with contextlib.suppress(CheckpointError):
        return set(read_index(index).values())
    return set()


def _old_shards(index: Path) -> list[str]:
    # Only names that savers give to shards: an index could name a file of the user's.
    return sorted(name for name in _named_by(index) if _SHARD.fullmatch(name))


def _variant(pattern: re.Pattern[str], name: str) -> str:
    """The variant in a file's name, such as ``.fp16``; empty if it has none."""
    match = pattern.fullmatch(name)
    assert match is not None, f"{name} is no file of weights"
    return match["variant"] or ""


def _write_json(path: Path, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
