"""The list of a checkpoint's files, with size and checksum of each; what has none is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from cuboid.checkpoint.format.bounded_files import is_printable, open_regular, parse_json, read_bytes
from cuboid.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
#: Files whose like may be added to a folder by hand without harm are not of these kinds.
_OWN_KINDS = (".safetensors", ".safetensors.index.json")
#: The key of the checksum that a list of checksums has of itself.
_OWN = "sha256"
_SHOWN_FAULTS = 4
_CHUNK_BYTES = 4 << 20


class FileRecord(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Everything that a complete checkpoint consists of.

    Attributes:
        format: version of the checkpoint's format.
        step: optimizer steps that it was written after.
        files: by path relative to the checkpoint, with slashes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int = FORMAT
    step: int
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _lie_inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        check_names(files)
        return dict(sorted(files.items()))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's.

        Raises:
            CheckpointError: there is none, or it can't be understood, or it was damaged or edited.
        """
        path = folder / MANIFEST
        try:
            data = read_bytes(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the checkpoint isn't complete") from None
        content = parse_json(data, path)
        found = content.get("format") if isinstance(content, dict) else None
        # Before everything else: another format may well have other keys.
        if isinstance(found, int) and found != FORMAT:
            raise CheckpointError(f"{path}: is of format {found}, but this version knows format {FORMAT}")
        content = unsigned(data, path)
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            raise not_understood(path, error) from None

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint, and to the disk."""
        with open(folder / MANIFEST, "wb") as file:
            file.write(signed(self.model_dump()))
            file.flush()
            os.fsync(file.fileno())


def check_names(files: Iterable[str]) -> None:
    """Make sure that all are paths of files inside of a folder, in the form in which they are written.

    Raises:
        ValueError: names one that isn't.
    """
    for name in files:
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts and path.parts
        if not inside or path.as_posix() != name or not is_printable(name):
            raise ValueError(f"{name!r} isn't the path of a file inside of the checkpoint")


def signed(content: dict[str, Any]) -> bytes:
    """A JSON document with a checksum of itself, so that a list of checksums can't be damaged unnoticed either."""
    text = json.dumps(content, indent=1)
    return (json.dumps({**content, _OWN: hashlib.sha256(text.encode()).hexdigest()}, indent=1) + "\n").encode()


def unsigned(data: bytes, path: Path) -> Any:
    """The content of a document of :func:`signed`; what was written before there were checksums in them has none.

    Raises:
        CheckpointError: it isn't what was written.
    """
    content = parse_json(data, path)
    if isinstance(content, dict) and _OWN in content:
        del content[_OWN]
        if signed(content) != data:
            raise CheckpointError(f"{path}: its own sha256 isn't the one in it: the file was damaged or edited")
    return content


def not_understood(path: Path, error: ValidationError) -> CheckpointError:
    """What is wrong first with a document that isn't as it should be."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the whole"
    return CheckpointError(f"{path}: can't be understood: {where}: {problem['msg']}")


def record_of(path: Path, *, from_disk: bool = False) -> FileRecord:
    """Size and checksum of a file.

    Args:
        path: of the file.
        from_disk: whether to read what the disk has, not what the system remembers, where it can be told so.

    Raises:
        CheckpointError: it is something else than a file.
        OSError: from the file system.
    """
    with open(open_regular(path), "rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Make sure that all files are there and as long as they were, and that there are no others of their kinds.

    Raises:
        CheckpointError: names what is missing, truncated or foreign.
    """
    _raise_first(_size_faults(folder, manifest))


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Make sure that files hold what was written.

    Raises:
        CheckpointError: names those that don't.
    """
    _raise_first(_content_faults(folder, manifest, names))


def _size_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, record in manifest.files.items():
        path = folder / name
        fault = size_fault(path, record)
        if fault is not None:
            yield fault
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name.endswith(_OWN_KINDS) and name not in manifest.files:
            yield f"{path}: is foreign: {MANIFEST} doesn't name it"


def size_fault(path: Path, record: FileRecord) -> str | None:
    """What can be told to be wrong with a file without reading it, in words."""
    if not path.is_file():
        return f"{path}: {'is something else than a file' if path.exists() else 'is missing'}"
    size = path.stat().st_size
    if size != record.bytes:
        return f"{path}: is {size} bytes long instead of {record.bytes}; truncated or replaced"
    return None


def _content_faults(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            record = record_of(folder / name)
        except CheckpointError as error:
            yield str(error)
            continue
        except OSError as error:
            yield f"{folder / name}: can't be read: {error.strerror}"
            continue
        if record != manifest.files[name]:
            yield differing(folder / name, MANIFEST)


def differing(path: Path, where: str) -> str:
    """That a file isn't what was written, in words."""
    return f"{path}: its sha256 isn't the one in {where}: the file was damaged or edited"


def _raise_first(faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        rest = f" (and {len(found) - _SHOWN_FAULTS} more)" if len(found) > _SHOWN_FAULTS else ""
        raise CheckpointError("; ".join(found[:_SHOWN_FAULTS]) + rest)
