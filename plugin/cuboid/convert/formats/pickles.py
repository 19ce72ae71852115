"""Read tensors from the files of ``torch.save``: first their offsets without their data, then the data in blocks.

A pickle can run code when it is loaded. So none is loaded unless the user trusts it, and then only with
``weights_only=True``, which allows tensors and plain containers only. DeepSpeed also pickles objects of a few classes
of its own; they are replaced by inert placeholders, and no other class is allowed.
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
from cuboid.checkpoint.format.tensor_file import TensorSpec, bytes_of
from cuboid.convert.formats.block_tensors import BLOCK_BYTES, row_ranges
from cuboid.errors import CheckpointError


class _Number(int):
    """Placeholder for an ``IntEnum``."""


class _Attributes:
    """Placeholder for an object with attributes."""


_PLACEHOLDERS: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Number,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": _Attributes,
}


#: Files of torch.save from before version 1.6, which aren't zip archives, begin with a pickle of this number.
_OLD_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
#: Maximum number of open files. The common limit of a process is 1024.
_MOST_FILES = 256


@dataclass(frozen=True)
class Extent:
    """``count`` consecutive elements in a file, from the byte at ``position`` on."""

    path: Path
    position: int
    count: int
    dtype: torch.dtype

    def part(self, start: int, stop: int) -> Extent:
        """The extent of its elements [start, stop)."""
        return Extent(self.path, self.position + start * self.dtype.itemsize, stop - start, self.dtype)


@dataclass(frozen=True)
class PickledTensor:
    """A tensor whose flattened elements are the concatenation of extents."""

    spec: TensorSpec
    extents: tuple[Extent, ...]


def load_pickle(path: Path, *, trusted: bool) -> Any:
    """The contents of a file of ``torch.save``, with tensors on the meta device; :func:`extent_of` finds their bytes.

    Args:
        path: the file, a zip archive with a checksum for each of its members; all of them are compared first.
        trusted: whether pickles may be loaded.

    Raises:
        CheckpointError: pickles aren't trusted; or this one is unreadable, damaged, or has objects of other classes.
    """
    if not trusted:
        raise CheckpointError(
            f"{path}: is a pickle, which could run code of its author's when it is loaded. If you know where it comes "
            "from, add --trust-pickle; even then only tensors and plain values are let in"
        )
    members = _check_archive(path)
    try:
        with safe_globals([(placeholder, name) for name, placeholder in _PLACEHOLDERS.items()]):
            loaded = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors and plain values: {_reason(error)}") from None
    except Exception as error:
        # The instructions of a forged pickle can make the unpickler raise anything.
        raise CheckpointError(f"{path}: is not a complete file of torch.save: {_reason(error)}") from None
    for tensor in _tensors_in(loaded):
        _check_place(path, tensor, members)
    return loaded


def _check_archive(path: Path) -> dict[int, int]:
    """Compare all members of an archive with their checksums.

    Returns:
        Size of each member's data by its offset in the file.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if file.read(4) != b"PK\3\4":
                if _OLD_MAGIC in file.read(32):
                    raise CheckpointError(_old_format(path))
                raise CheckpointError(f"{path}: is not a complete file of torch.save: it isn't a zip archive")
            with zipfile.ZipFile(file) as archive:
                return _check_members(path, archive, file.fileno())
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is not a complete file of torch.save: {_reason(error)}") from None


def _check_members(path: Path, archive: zipfile.ZipFile, descriptor: int) -> dict[int, int]:
    size, members = os.fstat(descriptor).st_size, archive.infolist()
    # torch stores members uncompressed. A compressed one could expand to fill the memory (a zip bomb).
    if (
        any(member.compress_type != zipfile.ZIP_STORED for member in members)
        or sum(x.file_size for x in members) > size
    ):
        raise CheckpointError(
            f"{path}: is not a complete file of torch.save: it has members that are compressed, or overlap"
        )
    if len({member.filename for member in members}) < len(members):
        raise CheckpointError(f"{path}: is not a complete file of torch.save: it has two members of the same name")
    sizes = {}
    for member in members:
        # The data follows the member's local header: 30 bytes, then a name and an extra field, whose lengths at byte 26
        # may differ from those in the central directory, because torch pads the extra field for alignment.
        lengths = os.pread(descriptor, 4, member.header_offset + 26)
        behind = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        sizes[member.header_offset + 30 + behind] = member.file_size
        with archive.open(member) as content:
            # zipfile compares the checksum when it reaches the end.
            while content.read(BLOCK_BYTES):
                pass
    return sizes


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and attributes, which may contain reference cycles."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple | set):
            pending += item
        elif isinstance(item, _Attributes):
            pending += vars(item).values()


def _check_place(path: Path, tensor: torch.Tensor, members: Mapping[int, int]) -> None:
    """Check that a tensor lies within the archive member that holds its storage."""
    place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if tensor.numel() == 0 or place is None:
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if place not in members or (int(tensor.storage_offset()) + last + 1) * tensor.dtype.itemsize > members[place]:
        raise CheckpointError(f"{path}: has a tensor of shape {list(tensor.shape)} that is longer than its bytes")


def _reason(error: Exception) -> str:
    """The line of torch's long message that names the cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line.startswith("WeightsUnpickler error")]
    return (causes or lines or [type(error).__name__])[0].removeprefix("WeightsUnpickler error: ")


def extent_of(path: Path, name: str, tensor: torch.Tensor) -> Extent:
    """Where the bytes of a tensor from :func:`load_pickle` are.

    Raises:
        CheckpointError: they aren't contiguous, or the file is of the format before torch 1.6.
    """
    # Set by ``torch.load`` with ``map_location="meta"``, for this purpose.
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


def pickled_tensor(path: Path, name: str, tensor: torch.Tensor) -> PickledTensor:
    """A tensor that is contiguous in its file."""
    return PickledTensor(TensorSpec(tensor.dtype, tuple(tensor.shape)), (extent_of(path, name, tensor),))


def cut(chain: Sequence[Extent], start: int, count: int) -> tuple[Extent, ...]:
    """The elements [start, start + count) of a chain of extents; fewer if the chain is shorter."""
    parts, position = [], 0
    for extent in chain:
        low, high = max(start - position, 0), min(start + count - position, extent.count)
        if low < high:
            parts.append(extent.part(low, high))
        position += extent.count
    return tuple(parts)


class ExtentReader:
    """Reads extents and keeps their files open. Use it as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def blocks(self, tensor: PickledTensor) -> Iterator[torch.Tensor]:
        """Consecutive rows of a tensor; see :class:`~cuboid.convert.formats.block_tensors.BlockTensors`."""
        spec = tensor.spec
        row = spec.nbytes // spec.dtype.itemsize // max(spec.shape[0] if spec.shape else 1, 1)
        for rows in row_ranges(spec):
            flat = self.read(tensor.extents, rows.start * row, (rows.stop - rows.start) * row, spec.dtype)
            yield flat.view(rows.stop - rows.start, *spec.shape[1:]) if spec.shape else flat.view(())

    def read(self, chain: Sequence[Extent], start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Read elements [start, start + count) of a chain, as ``[count]``; the chain must contain all of them."""
        flat, filled = torch.empty(count, dtype=dtype), 0
        for extent in cut(chain, start, count):
            assert extent.dtype == dtype, "parts of one tensor have one dtype"
            self._fill(bytes_of(flat[filled : filled + extent.count]), extent)
            filled += extent.count
        assert filled == count, "the chain is too short"
        return flat

    def _fill(self, data: memoryview, extent: Extent) -> None:
        descriptor, position = self._descriptor(extent.path), extent.position
        # A single read returns at most 2 GiB on Linux.
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
