"""The manifest: a checkpoint's files with their sizes and checksums. A folder without one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from cuboid.checkpoint.format.bounded_files import open_regular, parse_json, read_bytes
from cuboid.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
#: Suffixes of files that must be in the manifest, because loaders would read a foreign one. Users may add other files.
_OWN_KINDS = (".safetensors", ".safetensors.index.json")
#: Key under which a document stores a checksum of itself.
_OWN = "sha256"
_SHOWN_FAULTS = 4
_CHUNK_BYTES = 4 << 20


class FileRecord(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """All files of a complete checkpoint.

    Attributes:
        format: version of the checkpoint format.
        step: optimizer steps at the time it was written.
        files: records by path relative to the checkpoint, with slashes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int = FORMAT
    step: int
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _check_names(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        check_names(files)
        return dict(sorted(files.items()))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest.

        Raises:
            CheckpointError: there is none, or it is malformed, damaged or edited.
        """
        path = folder / MANIFEST
        try:
            data = read_bytes(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the checkpoint isn't complete") from None
        content = parse_json(data, path)
        version = content.get("format") if isinstance(content, dict) else None
        # Checked before the keys are validated, since another format may have other keys.
        if isinstance(version, int) and version != FORMAT:
            raise CheckpointError(f"{path}: is of format {version}, but this version knows format {FORMAT}")
        content = without_checksum(data, path)
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            raise not_understood(path, error) from None

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, with ``fsync``."""
        with open(folder / MANIFEST, "wb") as file:
            file.write(with_checksum(self.model_dump()))
            file.flush()
            os.fsync(file.fileno())


def check_names(files: Iterable[str]) -> None:
    """Check that names are normalized relative paths inside a folder, so that reading them can't escape from it.

    Raises:
        ValueError: names the first that isn't.
    """
    for name in files:
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts and path.parts
        if not inside or path.as_posix() != name or not name.isprintable():
            raise ValueError(f"{name!r} isn't the path of a file inside of the checkpoint")


def with_checksum(content: dict[str, Any]) -> bytes:
    """A JSON document with a checksum of itself, so that damage to the list of checksums is found too."""
    text = json.dumps(content, indent=1)
    return (json.dumps({**content, _OWN: hashlib.sha256(text.encode()).hexdigest()}, indent=1) + "\n").encode()


def without_checksum(data: bytes, path: Path) -> Any:
    """The content of a document from :func:`with_checksum`. Documents of older versions have no checksum.

    Raises:
        CheckpointError: the document doesn't match its checksum.
    """
    content = parse_json(data, path)
    if isinstance(content, dict) and _OWN in content:
        del content[_OWN]
        # Compared as bytes, so that a change that leaves the values equal, such as in whitespace, is found as well.
        if with_checksum(content) != data:
            raise CheckpointError(f"{path}: its own sha256 isn't the one in it: the file was damaged or edited")
    return content


def not_understood(path: Path, error: ValidationError) -> CheckpointError:
    """The first validation error of a document as a checkpoint error."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the whole"
    return CheckpointError(f"{path}: can't be understood: {where}: {problem['msg']}")


def record_of(path: Path, *, from_disk: bool = False) -> FileRecord:
    """Size and checksum of a file.

    Args:
        path: the file.
        from_disk: whether to drop the file from the page cache first (where the system supports it), so that the
            disk's contents are read.

    Raises:
        CheckpointError: it is something other than a file.
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
    """Check that all files exist with the right size, and that there are no other weights or indices.

    Raises:
        CheckpointError: names what is missing, truncated or foreign.
    """
    faults = [fault for name, record in manifest.files.items() if (fault := size_fault(folder / name, record))]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name.endswith(_OWN_KINDS) and name not in manifest.files:
            faults.append(f"{path}: is foreign: {MANIFEST} doesn't name it")
    _raise_faults(faults)


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with their checksums.

    Raises:
        CheckpointError: names those that differ or can't be read.
    """
    faults = [content_fault(folder / name, manifest.files[name], MANIFEST) for name in names]
    _raise_faults([fault for fault in faults if fault is not None])


def size_fault(path: Path, record: FileRecord) -> str | None:
    """A message if a file is missing or has another size than recorded; None if it is as expected."""
    if not path.is_file():
        return f"{path}: {'is something else than a file' if path.exists() else 'is missing'}"
    size = path.stat().st_size
    if size != record.bytes:
        return f"{path}: is {size} bytes long instead of {record.bytes}; truncated or replaced"
    return None


def content_fault(path: Path, record: FileRecord, where: str) -> str | None:
    """A message if a file can't be read or differs from the record in the document ``where``; None if it is intact."""
    try:
        is_intact = record_of(path) == record
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path}: can't be read: {error.strerror}"
    return None if is_intact else f"{path}: its sha256 isn't the one in {where}: the file was damaged or edited"


def _raise_faults(faults: list[str]) -> None:
    if faults:
        more = f" (and {len(faults) - _SHOWN_FAULTS} more)" if len(faults) > _SHOWN_FAULTS else ""
        raise CheckpointError("; ".join(faults[:_SHOWN_FAULTS]) + more)
