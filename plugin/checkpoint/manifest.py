"""The list of a checkpoint's files, with size and checksum of each; what has none is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from cuboid.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
#: Files whose like may be added to a folder by hand without harm are not of these kinds.
_OWN_KINDS = (".safetensors", ".safetensors.index.json")
_SHOWN_FAULTS = 4
_CHUNK_BYTES = 4 << 20


class FileRecord(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Everything that a complete checkpoint consists of.

    Attributes:
        format: version of the checkpoint's format.
        step: optimizer steps that it was written after.
        files: by path relative to the checkpoint, with slashes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    step: int
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _lie_inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"{name!r} isn't the path of a file inside of the checkpoint")
        return dict(sorted(files.items()))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's.

        Raises:
            CheckpointError: there is none, or it can't be understood.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror}; the checkpoint isn't complete") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: isn't JSON: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        # Before everything else: another format may well have other keys.
        if isinstance(found, int) and found != FORMAT:
            raise CheckpointError(f"{path}: is of format {found}, but this version knows format {FORMAT}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the whole"
            raise CheckpointError(f"{path}: can't be understood: {where}: {problem['msg']}") from None

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint, and to the disk."""
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.model_dump(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())


def record_of(path: Path, *, from_disk: bool = False) -> FileRecord:
    """Size and checksum of a file.

    Args:
        path: of the file.
        from_disk: whether to read what the disk has, not what the system remembers, where it can be told so.

    Raises:
        OSError: from the file system.
    """
    with open(path, "rb") as file:
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
        if not path.is_file():
            yield f"{path}: is missing"
        elif path.stat().st_size != record.bytes:
            yield f"{path}: is {path.stat().st_size} bytes long instead of {record.bytes}; truncated or replaced"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name.endswith(_OWN_KINDS) and name not in manifest.files:
            yield f"{path}: is foreign: {MANIFEST} doesn't name it"


def _content_faults(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            record = record_of(folder / name)
        except OSError as error:
            yield f"{folder / name}: can't be read: {error.strerror}"
            continue
        if record != manifest.files[name]:
            yield f"{folder / name}: its sha256 isn't the one in {MANIFEST}: the file was damaged or edited"


def _raise_first(faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        rest = f" (and {len(found) - _SHOWN_FAULTS} more)" if len(found) > _SHOWN_FAULTS else ""
        raise CheckpointError("; ".join(found[:_SHOWN_FAULTS]) + rest)
