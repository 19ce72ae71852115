"""Safetensors files, written and read piece by piece.

The safetensors library maps files into memory, where their pages count as the process's own, and writes a file from a
dict that holds all of its tensors. Here neither side ever holds more than the piece at hand, and the checksum comes
along with the writing. The format is the library's: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from cuboid.checkpoint.format.bounded_files import open_regular
from cuboid.checkpoint.format.manifest import FileRecord
from cuboid.checkpoint.format.tensor_header import DTYPE_NAMES, TensorSpec, make_header, read_header, row_blocks
from cuboid.errors import CheckpointError

#: Rows that are cut along other dims are read in blocks of about so much.
_BLOCK_BYTES = 32 << 20


class TensorFileWriter:
    """Writes a new file, one tensor after the other. Use it as a context manager: an exception removes the file.

    Args:
        path: of the file, which must not exist.
        specs: the tensors to come. Wider dtypes go first, so that each tensor is aligned; else the order is kept.
        metadata: texts for the header; ``format`` is ``pt`` unless given.

    Attributes:
        specs: in the order in which the tensors are to be written.

    Raises:
        CheckpointError: a dtype that the format doesn't know.
        OSError: from the file system, as from the other methods.
    """

    def __init__(
        self, path: str | Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        for name, spec in specs.items():
            if spec.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name} is of {spec.dtype}, which safetensors files can't hold")
        self.specs = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
        self._pending = iter(self.specs.items())
        self._name: str | None = None
        self._missing_bytes = 0
        self._bytes = 0
        self._hash = hashlib.sha256()
        self._file = open(self.path, "xb")  # noqa: SIM115 (it lives as long as this object)
        self._put(make_header(self.specs, {"format": "pt", **(metadata or {})}))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, whole, from whatever device."""
        assert tuple(tensor.shape) == self.specs[name].shape, f"{name} has another shape than announced"
        self.write_rows(name, tensor)

    def write_rows(self, name: str, rows: torch.Tensor) -> None:
        """Write the next rows of a tensor, which follow those that were written before."""
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
        """Bring the file to the disk.

        Returns:
            Its size and checksum, as they were written.
        """
        rest = [spec for _, spec in self._pending if spec.nbytes]
        assert self._missing_bytes == 0, "a tensor is missing rows"
        assert not rest, "a tensor was never written"
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())

    def discard(self) -> None:
        """Remove the file."""
        # A disk that is full can fail the last flush too.
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def __enter__(self) -> Self:
        return self

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


class TensorFile:
    """Reads a file's tensors or parts of them. Use it as a context manager, or call :meth:`close`.

    Args:
        path: of a safetensors file.

    Attributes:
        specs: of the tensors, in the order of the file.
        metadata: texts of the header.

    Raises:
        CheckpointError: no such file, or not a whole safetensors file; says what is wrong with it.
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
        """A tensor, or a box of it, on the CPU.

        Args:
            name: of the tensor.
            box: slices without step of the first dims; by default, and of the others, all.

        Raises:
            CheckpointError: the file has no such tensor, or ends early.
        """
        if name not in self.specs:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        spec = self.specs[name]
        if not spec.shape:
            return self._rows(name, 0, 1).reshape(())
        given = list(box or ())
        given += [slice(None)] * (len(spec.shape) - len(given))
        ranges = [part.indices(size) for part, size in zip(given, spec.shape, strict=True)]
        assert all(step == 1 for _, _, step in ranges), "boxes have no steps"
        (first, stop, _), *inner = ranges
        if all((low, high) == (0, size) for (low, high, _), size in zip(inner, spec.shape[1:], strict=True)):
            return self._rows(name, first, stop)
        cut = tuple(slice(low, high) for low, high, _ in inner)
        part = torch.empty([max(high - low, 0) for low, high, _ in ranges], dtype=spec.dtype)
        for rows in row_blocks(TensorSpec(spec.dtype, (max(stop - first, 0), *spec.shape[1:])), _BLOCK_BYTES):
            part[rows] = self._rows(name, first + rows.start, first + rows.stop)[(slice(None), *cut)]
        return part

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        spec = self.specs[name]
        row = TensorSpec(spec.dtype, spec.shape[1:])
        rows = torch.empty((max(stop - first, 0), *row.shape), dtype=spec.dtype)
        data, position = bytes_of(rows), self._starts[name] + first * row.nbytes
        while data:
            count = os.preadv(self._descriptor, [data], position)
            if count == 0:
                raise CheckpointError(f"{self.path}: ends in the middle of {name}")
            data, position = data[count:], position + count
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; of one on the CPU that is contiguous they are its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
