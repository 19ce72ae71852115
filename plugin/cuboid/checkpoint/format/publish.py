"""Put weights into a folder that may hold others, so that transformers finds the old ones whole until it finds the new.

transformers opens ``model.safetensors`` where there is one, else the files that ``model.safetensors.index.json`` names.
So one rename or removal of one of the two is the moment at which the new weights are there, and everything else happens
before or after it. New files whose names are taken have others meanwhile, with a token in them that nobody else gives.
Of what lay there before, only what the folder's own index named goes; whatever else lies there is the user's.
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

#: Where a save lies until it is whole, in the folder that it goes to.
SCRATCH = ".cuboid-incomplete"
#: In it: which files of the folder are of the save or of the weights before it, and so go unless they are what counts.
_NOTED = "noted.json"
_WEIGHTS = ".safetensors"
#: What transformers calls files of weights, of a variant too; and what a shard is called whose name is taken.
_SINGLE = re.compile(r"model(?P<variant>\.\w+)?\.safetensors")
_INDEX = re.compile(r"model\.safetensors\.index(?P<variant>\.\w+)?\.json")
_SHARD = re.compile(r"model(\.\w+)?-\d{5}-of-\d{5}(\.cuboid-[0-9a-f]{32})?\.safetensors")


def begin_export(folder: Path) -> Path:
    """An empty folder in a folder, for a save to be written into.

    What a save that was ended by a crash has left is removed, so far as it is surely its own.

    Raises:
        CheckpointError: something else lies at its place.
        OSError: from the file system.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / SCRATCH
    if scratch.is_symlink() or (scratch.exists() and not scratch.is_dir()):
        raise CheckpointError(f"{scratch}: is where a save is written until it is whole; move it away")
    if scratch.exists():
        _remove_noted(folder)
        shutil.rmtree(scratch)
    scratch.mkdir()
    return scratch


def abandon_export(folder: Path) -> None:
    """Remove what a save has left that failed, so far as that works."""
    with contextlib.suppress(OSError):
        _remove_noted(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def publish(folder: Path) -> None:
    """Put what was written into the folder of :func:`begin_export` in its place.

    A crash at any moment leaves the weights before or the new ones; what it leaves beside them, the next save removes.

    Raises:
        CheckpointError: there is a folder where a file is to be.
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
    for name in new:
        if name not in (single, index, *shards):
            _place(scratch / name, folder / name)
    if single is not None:
        _publish_single(folder, single, _partner(_SINGLE, single, "model.safetensors.index{}.json"))
    elif index is not None:
        _publish_shards(folder, index, shards)
    shutil.rmtree(scratch)
    sync(folder)


def _publish_single(folder: Path, single: str, index: str) -> None:
    own = [_known(folder / name) for name in (index, *_shards_of(folder / index))]
    _note(folder, single, index, own)
    _place(folder / SCRATCH / single, folder / single)
    # From here on transformers looks no further than at this file.
    sync(folder)
    _remove_noted(folder)


def _publish_shards(folder: Path, index: str, shards: list[str]) -> None:
    scratch, single = folder / SCRATCH, _partner(_INDEX, index, "model{}.safetensors")
    content = read_object(scratch / index)
    token = f".cuboid-{uuid.uuid4().hex}"
    taken = any(os.path.lexists(folder / name) for name in shards)
    names = {name: f"{name.removesuffix(_WEIGHTS)}{token}{_WEIGHTS}" if taken else name for name in shards}
    coming = [(here, known) for name in shards for here in (name, names[name]) for _, known in [_known(scratch / name)]]
    _note(folder, single, index, [*(_known(folder / name) for name in _shards_of(folder / index)), *coming])
    for name in shards:
        (scratch / name).rename(folder / names[name])
    sync(folder)
    _place_index(folder, index, content, names)
    (folder / single).unlink(missing_ok=True)
    # From here on the new files are what transformers opens.
    sync(folder)
    _remove_noted(folder)
    if taken and _link(folder, names):
        _place_index(folder, index, content, {name: name for name in shards})
        _remove_noted(folder)


def _link(folder: Path, names: Mapping[str, str]) -> bool:
    """Give files the names that they should have as well; whether that went."""
    try:
        for name, source in names.items():
            os.link(folder / source, folder / name)
    except OSError:
        # One is the user's, or the file system has no links: they keep the names under which they are whole.
        _remove_noted(folder)
        return False
    sync(folder)
    return True


def _place(source: Path, target: Path) -> None:
    if not source.is_dir():
        sync(source)
        source.replace(target)
        return
    # A model's own code and the like: file by file, for others may lie there too.
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        _place(path, target / path.name)


def _place_index(folder: Path, index: str, content: dict[str, Any], names: Mapping[str, str]) -> None:
    weight_map = {tensor: names[file] for tensor, file in content["weight_map"].items()}
    _write_json(folder / SCRATCH / index, {**content, "weight_map": weight_map})
    (folder / SCRATCH / index).replace(folder / index)
    sync(folder)


_Known = tuple[str, list[int] | None]


def _note(folder: Path, single: str, index: str, files: Iterable[_Known]) -> None:
    """Write down which files the save may remove, so that the next one can where this one is ended."""
    noted = [[name, identity] for name, identity in files if identity is not None]
    _write_json(folder / SCRATCH / _NOTED, {"single": single, "index": index, "files": noted})
    sync(folder / SCRATCH)


def _remove_noted(folder: Path) -> None:
    """Remove what was noted and is the same still, except for what transformers opens."""
    try:
        content = read_object(folder / SCRATCH / _NOTED)
        single, index = str(content["single"]), str(content["index"])
        files = [(name, identity) for name, identity in content["files"] if is_plain_name(name)]
    except (CheckpointError, KeyError, TypeError, ValueError):
        # Nothing had been moved yet.
        return
    kept = {single} if (folder / single).exists() else {index, *_named_by(folder / index)}
    for name, identity in files:
        if name not in kept and _known(folder / name)[1] == identity:
            (folder / name).unlink()
    sync(folder)


def _known(path: Path) -> _Known:
    """A file's name, and what tells it from another of that name; None where there is none."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not path.is_dir():
            return path.name, [status.st_ino, status.st_size, status.st_mtime_ns]
    return path.name, None


def _named_by(index: Path) -> set[str]:
    """The files that an index names; none where there is none, or one that can't be understood."""
    with contextlib.suppress(CheckpointError):
        return set(read_index(index).values())
    return set()


def _shards_of(index: Path) -> list[str]:
    """Those of the files that an index names that have names of shards, as savers give them."""
    return sorted(name for name in _named_by(index) if _SHARD.fullmatch(name))


def _partner(pattern: re.Pattern[str], name: str, form: str) -> str:
    """The index of a single file, or the reverse, of the same variant."""
    match = pattern.fullmatch(name)
    assert match is not None, f"{name} is no file of weights"
    return form.format(match["variant"] or "")


def _write_json(path: Path, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
