"""Write and read safetensors files piece by piece.

The safetensors library memory-maps files for reading, so that their pages count as the process's memory, and writes a
file from a dict that holds all of its tensors. Here only the piece that is being read or written is in memory, and the
checksum is computed while writing. The format is the library's: eight bytes of header length, a JSON header, the
tensors' bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import open_regular, parse_json
from cuboid.checkpoint.format.manifest import FileRecord
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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
#: The safetensors library rejects longer headers.
_LONGEST_HEADER_BYTES = 100_000_000
#: Limits that torch and numpy share: the number of dims, and sizes that fit a signed 64-bit integer.
_MOST_DIMS, _LARGEST = 64, 2**63 - 1
#: Memory for reading a box that isn't made of full rows: rows are read in blocks of this size, then sliced.
_BLOCK_BYTES = 32 << 20


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


class TensorFileWriter(contextlib.AbstractContextManager["TensorFileWriter"]):
    """Writes a new file, one tensor after the other. Use it as a context manager: an exception removes the file.

    Args:
        path: the new file, which must not exist.
        specs: the tensors to write. They are sorted by descending width of their dtypes, so that each is aligned.
        metadata: texts for the header; ``format`` is ``pt`` unless given.

    Attributes:
        specs: the tensors, in the order in which they have to be written.

    Raises:
        CheckpointError: a dtype that the format doesn't support.
        OSError: from the file system, as from the other methods.
    """

    def __init__(
        self, path: str | Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        for name, spec in specs.items():
            if spec.dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name} is of {spec.dtype}, which safetensors files can't hold")
        self.specs = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
        self._pending = iter(self.specs.items())
        self._name: str | None = None
        self._missing_bytes = 0  # of the tensor that is being written
        self._bytes = 0
        self._hash = hashlib.sha256()
        self._file = open(self.path, "xb")  # noqa: SIM115 (it lives as long as this object)
        self._put(make_header(self.specs, {"format": "pt", **(metadata or {})}))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor as a whole, from any device."""
        assert tuple(tensor.shape) == self.specs[name].shape, f"{name} has another shape than announced"
        self.write_rows(name, tensor)

    def write_rows(self, name: str, rows: torch.Tensor) -> None:
        """Append rows to the current tensor, or begin the next one."""
        if self._missing_bytes == 0:
            self._name, spec = next(self._pending)
            self._missing_bytes = spec.nbytes
        assert name == self._name, f"{name} is not the next tensor, but {self._name}"
        assert rows.dtype == self.specs[name].dtype, f"{name} is of {rows.dtype}, not as announced"
        data = bytes_of(rows)
        assert len(data) <= self._missing_bytes, f"{name} has more rows than announced"
        self._put(data)
        self._missing_bytes -= len(data)

    def close(self) -> FileRecord:
        """Finish the file, with ``fsync``.

        Returns:
            Its size and checksum.
        """
        unwritten = [spec for _, spec in self._pending if spec.nbytes]
        assert self._missing_bytes == 0, "a tensor is missing rows"
        assert not unwritten, "a tensor was never written"
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())

    def discard(self) -> None:
        """Remove the file."""
        # Closing flushes, which fails on a full disk.
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


class TensorFile(contextlib.AbstractContextManager["TensorFile"]):
    """Reads a file's tensors or parts of them. Use it as a context manager, or call :meth:`close`.

    Attributes:
        specs: dtypes and shapes of the tensors, in the order of the file.
        metadata: the header's metadata.

    Raises:
        CheckpointError: there is no such file, or it isn't a complete safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._descriptor = open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: can't be opened: {error.strerror}") from error
        try:
            self.specs, self.metadata, self._starts = read_header(self._descriptor, self.path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def read(self, name: str, box: Sequence[slice] | None = None) -> torch.Tensor:
        """Read a tensor, or a box of it, to the CPU.

        Args:
            name: the tensor's name.
            box: a slice without step for each of the first dims; other dims are read in full.

        Raises:
            CheckpointError: the file has no such tensor, or was truncated since it was opened.
        """
        if name not in self.specs:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        spec = self.specs[name]
        if not spec.shape:
            return self._rows(name, 0, 1).reshape(())
        slices = list(box or ())
        slices += [slice(None)] * (len(spec.shape) - len(slices))
        ranges = [of_dim.indices(size) for of_dim, size in zip(slices, spec.shape, strict=True)]
        assert all(step == 1 for _, _, step in ranges), "boxes have no steps"
        (first, stop, _), *inner = ranges
        if all((low, high) == (0, size) for (low, high, _), size in zip(inner, spec.shape[1:], strict=True)):
            return self._rows(name, first, stop)
        # The box is strided in the file. Reading its rows in full and slicing them takes fewer reads than one for each
        # contiguous piece.
        cut = tuple(slice(low, high) for low, high, _ in inner)
        values = torch.empty([max(high - low, 0) for low, high, _ in ranges], dtype=spec.dtype)
        for rows in row_blocks(TensorSpec(spec.dtype, (max(stop - first, 0), *spec.shape[1:])), _BLOCK_BYTES):
            values[rows] = self._rows(name, first + rows.start, first + rows.stop)[(slice(None), *cut)]
        return values

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        spec = self.specs[name]
        row = TensorSpec(spec.dtype, spec.shape[1:])
        rows = torch.empty((max(stop - first, 0), *row.shape), dtype=spec.dtype)
        data, position = bytes_of(rows), self._starts[name] + first * row.nbytes
        # A single read returns at most 2 GiB on Linux.
        while data:
            count = os.preadv(self._descriptor, [data], position)
            if count == 0:
                raise CheckpointError(f"{self.path}: ends in the middle of {name}")
            data, position = data[count:], position + count
        return rows

    def __exit__(self, *_: object) -> None:
        self.close()


def file_identity(path: str | Path) -> tuple[int, ...]:
    """What a file and a copy of it differ in, and what all hosts that share it see: inode, size, times of changes."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; for a contiguous one on the CPU a writable view of its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


# --- the header: names, dtypes, shapes and offsets of the tensors --------------------------------------------------


def make_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that has the tensors of ``specs`` in that order."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        span = [offset, offset + spec.nbytes]
        entries[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded as the library does it, so that the first tensor is aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_specs(path: str | Path) -> dict[str, TensorSpec]:
    """Dtypes and shapes of a file's tensors, in the order of the file; raises as :class:`TensorFile`."""
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as file:
            return read_header(file.fileno(), path)[0]
    except OSError as error:
        raise CheckpointError(f"{path}: can't be opened: {error.strerror}") from error


def read_header(descriptor: int, path: Path) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, int]]:
    """Read and validate an open file's header; ``path`` is for messages.

    Returns:
        The tensors in the order of the file, the header's metadata, and each tensor's offset in the file.

    Raises:
        CheckpointError: it isn't a complete safetensors file.
    """
    size = os.fstat(descriptor).st_size
    # Eight bytes with the header's length, the header, the tensors.
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(_LONGEST_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path}: is not a whole safetensors file: its header doesn't fit in {size} bytes")
    try:
        header = parse_json(os.pread(descriptor, length, 8), path)
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} holds something else than texts")
        entries: dict[str, tuple[TensorSpec, int, int]] = {}
        for name, entry in header.items():
            name.encode()  # a lone surrogate in a name would fail later, when the name is printed
            if set(entry) != {"dtype", "shape", "data_offsets"}:
                raise ValueError(f"{name} has {', '.join(entry)}")
            low, high = entry["data_offsets"]
            if type(low) is not int or type(high) is not int:
                raise ValueError(f"{name} lies at {low} to {high}")
            entries[name] = TensorSpec(_DTYPES[entry["dtype"]], check_sizes(entry["shape"])), low, high
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
