"""Read untrusted or damaged files within bounds.

Only regular files are opened, because opening a pipe would block until its other end is opened. Symbolic links may not
lead out of a checkpoint: other files of the user's would be read, and copied. JSON is parsed up to a size and a depth
that real checkpoints and models stay below. Duplicate keys are an error, because it is unclear which of the values was
meant.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from cuboid.errors import CheckpointError

#: Limit on the size of a JSON file; the tokenizer of a vocabulary of 500,000 takes a tenth of it.
_MOST_BYTES = 256 << 20
#: Limit on objects, lists and their items, which take about a hundred bytes of memory each when parsed.
_MOST_VALUES = 8_000_000
#: Limit on the nesting of lists and objects.
DEEPEST = 200


def is_plain_name(name: object) -> bool:
    """Whether something is a plain file name, not a path.

    Control characters are excluded, since some file systems reject them and terminals don't show them.
    """
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def open_regular(path: Path) -> int:
    """Open a file for reading; returns its descriptor.

    Raises:
        CheckpointError: it is something other than a file (a folder, pipe or device), or not a valid path.
        OSError: from the file system.
    """
    try:
        # Checked before it is opened, because merely opening some devices has effects, and again on the descriptor,
        # because the path may have been replaced in between.
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


def reject_outward_links(folder: Path, *, within: Path | None = None) -> None:
    """Check that no symbolic link below a checkpoint's folder leads out of it. The folder itself may be a link.

    Files of the Hugging Face Hub's cache may lead to its ``blobs``: ``snapshots/REVISION/NAME`` to ``blobs/HASH``.

    Args:
        folder: the checkpoint.
        within: a folder around it that links may lead into as well, such as that of all checkpoints of a run.

    Raises:
        CheckpointError: names the first link that does, and where it leads.
    """
    waiting = [os.fspath(folder)] if folder.is_dir() else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.is_symlink() and not _stays_inside(entry.path, folder, within):
                    raise CheckpointError(
                        f"{entry.path}: is a link that leads out of the checkpoint, to "
                        f"{os.path.realpath(entry.path)}, and isn't followed; if that file belongs to the checkpoint, "
                        "put it there in place of the link"
                    )
                if entry.is_dir(follow_symlinks=False) and os.access(entry.path, os.R_OK | os.X_OK):
                    waiting.append(entry.path)


def leads_outward(path: Path) -> bool:
    """Whether a file of a checkpoint's folder is a link that leads out of that folder, as above."""
    return not _stays_inside(path, path.parent)


def _stays_inside(link: str | Path, folder: Path, within: Path | None = None) -> bool:
    """Whether a link leads into its folder, into ``within``, or into the ``blobs`` of a cache around the folder."""
    root = Path(os.path.realpath(folder))
    roots = [root, *([] if within is None else [Path(os.path.realpath(within))])]
    roots += [place.parent.parent / "blobs" for place in (root, *root.parents) if place.parent.name == "snapshots"]
    # All at once: links to links, and targets with ``..``.
    target = Path(os.path.realpath(link))
    return any(target.is_relative_to(root) for root in roots)


def write_json(path: Path, content: object) -> None:
    """Write results as indented JSON.

    Raises:
        CheckpointError: it can't be written.
    """
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write results; into a pipe too, if somebody reads from it.

    Raises:
        CheckpointError: it can't be written.
    """
    try:
        # Opening a pipe without a reader would block.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.set_blocking(descriptor, True)
            file.write(text)
    except OSError as error:
        raise _not_written(path, error) from None


def check_output_file(path: Path) -> None:
    """Check that a file of results can be written before they are computed; its folder is created if missing.

    Args:
        path: the file; one that exists will be replaced.

    Raises:
        CheckpointError: it is a folder or a socket, or it or its folder isn't writable.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: can't be written: it is a folder; name a file")
    if path.is_socket():
        raise CheckpointError(f"{path}: can't be written: it is a socket; name a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise _not_written(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    # A file in a folder that others write, and a device, may be written nevertheless.
    if not path.exists() or (path.is_file() and os.access(path.parent, os.W_OK)):
        check_output(_end_of_links(path).parent, named=path)


def _end_of_links(path: Path) -> Path:
    """What a link will create if it points to nothing; links that lead to each other are an error."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError):
        raise CheckpointError(f"{path}: can't be written: it is a link to itself") from None


def _not_written(path: Path, error: OSError) -> CheckpointError:
    # File systems that hold no ordinary files, such as /proc, report ENOENT although the folder exists.
    reasons = {errno.ENOENT: "files can't be created there", errno.ENXIO: "nobody reads from this pipe"}
    return CheckpointError(f"{path}: can't be written: {reasons.get(error.errno or 0, error.strerror)}")


def check_output(folder: Path, needed_bytes: int = 0, *, named: Path | None = None) -> None:
    """Check that results can be written into a folder before they are computed; the folder is created if missing.

    Args:
        folder: the folder for the results.
        needed_bytes: minimum size of the results.
        named: what will be written, for messages; None for the folder itself.

    Raises:
        CheckpointError: it isn't a folder, isn't writable, or its disk has too little free space.
    """
    named = named or folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions alone aren't enough: quotas and full disks only show when something is written.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except (FileExistsError, NotADirectoryError):
        above = (folder, *folder.parents)
        place = next((path for path in above if os.path.lexists(path) and not path.is_dir()), folder)
        kind = "a file" if place.exists() else "a link to nothing"
        raise CheckpointError(f"{named}: can't be written: {place} is {kind}, not a folder") from None
    except OSError as error:
        raise _not_written(named, error) from None
    if free < needed_bytes:
        raise CheckpointError(
            f"{named}: has room for {free / 1e9:.1f} GB, but what is going to be written there takes at least "
            f"{needed_bytes / 1e9:.1f} GB"
        )


def read_bytes(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """The contents of a small file.

    Raises:
        CheckpointError: it can't be read, or is larger than ``most_bytes``.
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
    """The value in a JSON file; see :func:`parse_json`."""
    return parse_json(read_bytes(path), path, numbers_only=numbers_only, unique=unique)


def read_object(path: Path, *, numbers_only: bool = True, unique: bool = True) -> dict[str, Any]:
    """The object in a JSON file; see :func:`parse_json`."""
    value = parse_json(read_bytes(path), path, numbers_only=numbers_only, unique=unique)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def parse_json(data: bytes, path: Path, *, numbers_only: bool = True, unique: bool = True) -> Any:
    """Parse a JSON document.

    Args:
        data: the document.
        path: the file's path, for messages.
        numbers_only: whether to reject ``NaN`` and ``Infinity``, which aren't JSON, although Python writes them.
        unique: whether to reject objects with duplicate keys.

    Raises:
        CheckpointError: it isn't JSON, or exceeds the limits on size and nesting.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: isn't JSON: its byte {error.start} is no UTF-8") from None
    # Counted before parsing, which takes far more memory than the text. Commas and brackets in strings count too; the
    # limit is ample.
    if len(data) > _MOST_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CheckpointError(f"{path}: is JSON of more than {_MOST_VALUES:,} values, which no such file has")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_reject_duplicates if unique else None,
            parse_constant=_reject_constant if numbers_only else None,
        )
    except RecursionError:
        raise CheckpointError(f"{path}: is JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: isn't JSON: {error}") from None
    if is_too_deep(value):
        raise CheckpointError(f"{path}: is JSON nested too deeply: more than {DEEPEST} levels")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested too deeply. Iterative, since recursion would hit Python's own limit."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
