"""The header of a safetensors file: names, dtypes, shapes and offsets of its tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import parse_json
from cuboid.errors import CheckpointError

#: Dtypes by their names in the header.
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
#: The reverse; other dtypes can't be stored.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
#: The safetensors library rejects longer headers.
_LONGEST_HEADER_BYTES = 100_000_000
#: Limits that torch and numpy share: the number of dims, and sizes that fit a signed 64-bit integer.
_MOST_DIMS, _LARGEST = 64, 2**63 - 1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def row_blocks(spec: TensorSpec, block_bytes: int) -> Iterator[slice]:
    """Split a tensor into consecutive ranges of rows of at most ``block_bytes`` each, unless one row is larger.

    There is at least one range. A tensor without dims counts as one row.
    """
    rows = spec.shape[0] if spec.shape else 1
    height = max(1, block_bytes * rows // max(spec.nbytes, 1))
    for first in range(0, max(rows, 1), height):
        yield slice(first, min(first + height, rows))


def make_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that has the tensors of ``specs`` in that order."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        span = [offset, offset + spec.nbytes]
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded as the library does it, so that the first tensor is aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(descriptor: int, path: Path) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, int]]:
    """Read and validate a file's header.

    Args:
        descriptor: the open file's descriptor.
        path: the file's path, for messages.

    Returns:
        The tensors in the order of the file, the header's metadata, and each tensor's offset in the file.

    Raises:
        CheckpointError: it isn't a complete safetensors file.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(_LONGEST_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path}: is not a whole safetensors file: its header doesn't fit in {size} bytes")
    try:
        header = parse_json(os.pread(descriptor, length, 8), path)
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} holds something else than texts")
        entries = {name: _entry(name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).removeprefix(f"{path}: ") if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(f"{path}: its safetensors header can't be understood: {reason}") from None
    specs: dict[str, TensorSpec] = {}
    starts: dict[str, int] = {}
    end = 0
    # Tensors must follow one another without gaps or overlaps, up to the end of the file.
    for name, (spec, low, high) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if low != end or high - low != spec.nbytes:
            raise CheckpointError(f"{path}: its header gives {name} bytes {low} to {high}, which doesn't fit its shape")
        specs[name], starts[name], end = spec, 8 + length + low, high
    if 8 + length + end != size:
        raise CheckpointError(f"{path}: is {size} bytes long, but its header describes {8 + length + end}; truncated?")
    return specs, metadata, starts


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """Validate a tensor's entry; returns its spec and the range of its bytes."""
    name.encode()  # a lone surrogate in a name would fail later, when the name is printed
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has {', '.join(entry)}")
    low, high = entry["data_offsets"]
    if type(low) is not int or type(high) is not int:
        raise ValueError(f"{name} lies at {low} to {high}")
    return TensorSpec(_DTYPES[entry["dtype"]], check_sizes(entry["shape"])), low, high


def check_sizes(sizes: Any) -> tuple[int, ...]:
    """Validate a shape, or a list of other numbers of elements, from an untrusted file.

    Raises:
        ValueError: no tensor could have it.
    """
    if not isinstance(sizes, list | tuple) or len(sizes) > _MOST_DIMS:
        raise ValueError(f"{str(sizes)[:80]} is no shape")
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{str(sizes)[:80]} has what is no size")
    # Zeros are left out, since they would hide a huge other size. 16 bytes is the widest element.
    if math.prod(size for size in sizes if size) > _LARGEST // 16:
        raise ValueError(f"{str(sizes)[:80]} is larger than any tensor")
    return tuple(sizes)
