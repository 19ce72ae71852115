"""Tensors in the pickles that ``torch.save`` writes: what there is, without loading it, and then piece by piece.

A pickle can run code when it is loaded. So none is, unless the user says so, and then by ``weights_only=True``, which
knows tensors and plain containers. DeepSpeed pickles objects of a few classes of its own beside them; inert
placeholders take their places, and nothing else is let in.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.serialization import safe_globals

from cuboid.checkpoint.format.bounded_files import open_regular
from cuboid.checkpoint.format.tensor_file import bytes_of
from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.convert.formats.block_tensors import BLOCK_BYTES, row_ranges
from cuboid.errors import CheckpointError


class _Number(int):
    """Stands for an enumeration of numbers."""


class _Attributes:
    """Stands for an object that holds nothing but attributes."""


_PLACEHOLDERS: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Number,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": _Attributes,
}


#: How files of torch.save began before they were archives: a pickle of this number.
_OLD_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
#: Open at a time; systems commonly allow a process four times as many.
_MOST_FILES = 256


@dataclass(frozen=True)
class Extent:
    """A run of elements in a file.

    Attributes:
        path: of the file.
        position: of the first byte.
        count: elements.
        dtype: of the elements.
    """

    path: Path
    position: int
    count: int
    dtype: torch.dtype

    def part(self, start: int, stop: int) -> Extent:
        """The elements [start, stop) of it."""
        return Extent(self.path, self.position + start * self.dtype.itemsize, stop - start, self.dtype)


@dataclass(frozen=True)
class Scattered:
    """A tensor whose elements, flattened, lie in extents one behind the other."""

    spec: TensorSpec
    extents: tuple[Extent, ...]


def load_pickle(path: Path, *, trusted: bool) -> Any:
    """What a file of ``torch.save`` holds, with tensors on the meta device; :func:`extent_of` finds their bytes.

    Args:
        path: of the file, which is a zip archive with a checksum for each of its parts. All are compared first.
        trusted: whether pickles may be loaded.

    Raises:
        CheckpointError: pickles aren't trusted; or this one can't be read, or is damaged, or holds objects that aren't
            let in.
    """
    if not trusted:
        raise CheckpointError(
            f"{path}: is a pickle, which could run code of its author's when it is loaded. If you know where it comes "
            "from, add --trust-pickle; even then only tensors and plain values are let in"
        )
    parts = _check_archive(path)
    try:
        with safe_globals([(placeholder, name) for name, placeholder in _PLACEHOLDERS.items()]):
            loaded = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors and plain values: {_reason(error)}") from None
    except Exception as error:
        # A forged pickle has the unpickler fail in whatever way it likes.
        raise CheckpointError(f"{path}: is no whole file of torch.save: {_reason(error)}") from None
    for tensor in _tensors_in(loaded):
        _check_place(path, tensor, parts)
    return loaded


def _check_archive(path: Path) -> dict[int, int]:
    """Compare all parts of an archive with their checksums.

    Returns:
        For each place in the file where a part begins, its bytes.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if file.read(4) != b"PK\3\4":
                if _OLD_MAGIC in file.read(32):
                    raise CheckpointError(_old_format(path))
                raise CheckpointError(f"{path}: is no whole file of torch.save: it isn't a zip archive")
            with zipfile.ZipFile(file) as archive:
                return _check_parts(path, archive, file.fileno())
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is no whole file of torch.save: {_reason(error)}") from None


def _check_parts(path: Path, archive: zipfile.ZipFile, descriptor: int) -> dict[int, int]:
    size, parts = os.fstat(descriptor).st_size, archive.infolist()
    # As torch writes them. Compressed, a short file could fill the memory.
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(x.file_size for x in parts) > size:
        raise CheckpointError(f"{path}: is no whole file of torch.save: it has parts that are compressed, or overlap")
    if len({part.filename for part in parts}) < len(parts):
        raise CheckpointError(f"{path}: is no whole file of torch.save: it has two parts of one name")
    places = {}
    for part in parts:
        # The name and the extra bytes of a part's own header, which may be longer than in the list of all parts.
        lengths = os.pread(descriptor, 4, part.header_offset + 26)
        behind = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        places[part.header_offset + 30 + behind] = part.file_size
        with archive.open(part) as content:
            while content.read(BLOCK_BYTES):
                """Its end compares the checksum."""
    return places


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in dicts, lists and attributes, each object looked at once."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        each = rest.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            rest += each.values()
        elif isinstance(each, list | tuple | set):
            rest += each
        elif isinstance(each, _Attributes):
            rest += vars(each).values()


def _check_place(path: Path, tensor: torch.Tensor, parts: Mapping[int, int]) -> None:
    """Make sure that a tensor lies within the part of the file that its storage is."""
    place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if tensor.numel() == 0 or place is None:
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if place not in parts or (int(tensor.storage_offset()) + last + 1) * tensor.dtype.itemsize > parts[place]:
        raise CheckpointError(f"{path}: has a tensor of shape {list(tensor.shape)} that is longer than its bytes")


def _reason(error: Exception) -> str:
    """The line of torch's advice that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line.startswith("WeightsUnpickler error")]
    return (told or lines or [type(error).__name__])[0].removeprefix("WeightsUnpickler error: ")


def extent_of(path: Path, name: str, tensor: torch.Tensor) -> Extent:
    """Where the bytes of a tensor from :func:`load_pickle` are.

    Raises:
        CheckpointError: they don't lie in one piece, or the file is of the format before torch 1.6.
    """
    position = tensor.untyped_storage()._checkpoint_offset
    if tensor.numel() and position is None:
        raise CheckpointError(_old_format(path))
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{path}: {name} is stored as a view of another tensor; save it again after calling contiguous()"
        )
    start = (position or 0) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return Extent(path, start, tensor.numel(), tensor.dtype)


def _old_format(path: Path) -> str:
    return f"{path}: is of the format before torch 1.6; load it with torch and save it again"


def whole(path: Path, name: str, tensor: torch.Tensor) -> Scattered:
    """A tensor that a file has in one piece."""
    return Scattered(TensorSpec(tensor.dtype, tuple(tensor.shape)), (extent_of(path, name, tensor),))


def cut(chain: Sequence[Extent], start: int, count: int) -> tuple[Extent, ...]:
    """``count`` elements of a chain of extents, from ``start`` on; fewer if it ends before."""
    parts, position = [], 0
    for extent in chain:
        low, high = max(start - position, 0), min(start + count - position, extent.count)
        if low < high:
            parts.append(extent.part(low, high))
        position += extent.count
    return tuple(parts)


class ExtentReader:
    """Reads extents, and keeps their files open. Use it as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def blocks(self, tensor: Scattered) -> Iterator[torch.Tensor]:
        """Consecutive rows of a tensor; see :class:`~cuboid.convert.formats.block_tensors.Tensors`."""
        spec = tensor.spec
        row = spec.nbytes // spec.dtype.itemsize // max(spec.shape[0] if spec.shape else 1, 1)
        for rows in row_ranges(spec):
            flat = self.read(tensor.extents, rows.start * row, (rows.stop - rows.start) * row, spec.dtype)
            yield flat.view(rows.stop - rows.start, *spec.shape[1:]) if spec.shape else flat.view(())

    def read(self, chain: Sequence[Extent], start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements of a chain, which has them all, flat."""
        flat, filled = torch.empty(count, dtype=dtype), 0
        for extent in cut(chain, start, count):
            assert extent.dtype == dtype, "parts of one tensor have one dtype"
            self._fill(bytes_of(flat[filled : filled + extent.count]), extent)
            filled += extent.count
        assert filled == count, "the chain is too short"
        return flat

    def _fill(self, data: memoryview, extent: Extent) -> None:
        descriptor, position = self._descriptor(extent.path), extent.position
        while data:
            count = os.preadv(descriptor, [data], position)
            if count == 0:
                raise CheckpointError(f"{extent.path}: ends in the middle of a tensor")
            data, position = data[count:], position + count

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) == _MOST_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = open_regular(path)
        return self._descriptors[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
