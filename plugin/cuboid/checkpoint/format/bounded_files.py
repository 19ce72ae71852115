"""Files that anybody may have written or damaged, read within bounds.

Only regular files are opened, so that nobody waits for a pipe's other end. JSON is parsed up to a size and a depth
that checkpoints and models have. A key that comes twice is an error, for nobody knows which value was meant.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from cuboid.errors import CheckpointError

#: Tokenizers of half a million words take a tenth of it.
_MOST_BYTES = 256 << 20
#: Objects, lists and their items; some hundred bytes of memory each.
_MOST_VALUES = 8_000_000
#: Of lists and objects in one another.
DEEPEST = 200


def is_plain_name(name: object) -> bool:
    """Whether something is the name of a file in a folder, and no path."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and is_printable(name)


def is_printable(name: str) -> bool:
    """Whether a name has nothing in it that file systems don't take or that terminals don't show."""
    return name.isprintable()


def open_regular(path: Path) -> int:
    """A descriptor of a file, to read.

    Raises:
        CheckpointError: it is something else than a file: a folder, a pipe, a device; or no system has such names.
        OSError: from the file system.
    """
    try:
        # Before it is opened, which does something to some devices; and then what was opened.
        _check_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r}: can't be the path of a file: {error}") from None
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise CheckpointError(f"{path}: is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


def check_output(folder: Path, needed_bytes: int = 0) -> None:
    """Make sure, before any work is done for it, that results can be written into a folder; it is made if need be.

    Args:
        folder: for the results.
        needed_bytes: that they take at least.

    Raises:
        CheckpointError: it isn't a folder, can't be written, or its disk has no room for them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except (FileExistsError, NotADirectoryError):
        place = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise CheckpointError(f"{folder}: can't be written: {place} is a file, not a folder") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be written: {error.strerror}") from None
    if free < needed_bytes:
        raise CheckpointError(
            f"{folder}: has room for {free / 1e9:.1f} GB, but what is going to be written there takes at least "
            f"{needed_bytes / 1e9:.1f} GB"
        )


def read_bytes(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """All of a small file.

    Raises:
        CheckpointError: it can't be read, or is longer.
    """
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    if len(data) > most_bytes:
        raise CheckpointError(f"{path}: is longer than {most_bytes:,} bytes, which no such file is")
    return data


def read_json(path: Path, *, numbers_only: bool = True, unique: bool = True) -> Any:
    """What a JSON file holds; see :func:`parse_json`."""
    return parse_json(read_bytes(path), path, numbers_only=numbers_only, unique=unique)


def read_object(path: Path, *, numbers_only: bool = True, unique: bool = True) -> dict[str, Any]:
    """A file's JSON object; see :func:`parse_json`."""
    value = read_json(path, numbers_only=numbers_only, unique=unique)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def parse_json(data: bytes, path: Path, *, numbers_only: bool = True, unique: bool = True) -> Any:
    """What a JSON document holds.

    Args:
        data: the document.
        path: for messages.
        numbers_only: whether to refuse ``NaN`` and ``Infinity``, which JSON doesn't have, but Python writes.
        unique: whether to refuse objects that have a key twice.

    Raises:
        CheckpointError: it isn't JSON, or more of it, or deeper, than any checkpoint or model has.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: isn't JSON: its byte {error.start} is no UTF-8") from None
    if len(data) > _MOST_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CheckpointError(f"{path}: is JSON of more than {_MOST_VALUES:,} values, which no such file has")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique if unique else None,
            parse_constant=_refuse_constant if numbers_only else None,
        )
    except RecursionError:
        raise CheckpointError(f"{path}: is JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: isn't JSON: {error}") from None
    if is_too_deep(value):
        raise CheckpointError(f"{path}: is JSON nested too deeply: more than {DEEPEST} levels")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects lie deeper in one another than is read."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
