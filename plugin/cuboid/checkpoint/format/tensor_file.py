"""Write and read safetensors files piece by piece.

The safetensors library memory-maps files for reading, so that their pages count as the process's memory, and writes a
file from a dict that holds all of its tensors. Here only the piece that is being read or written is in memory, and the
checksum is computed while writing. The format is the library's: eight bytes of header length, a JSON header, the
tensors' bytes.
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

#: Memory for reading a box that isn't made of full rows: rows are read in blocks of this size, then sliced.
_BLOCK_BYTES = 32 << 20


class TensorFileWriter:
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
            if spec.dtype not in DTYPE_NAMES:
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
        # Closing flushes, which fails on a full disk.
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
        path: a safetensors file.

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
        given = list(box or ())
        given += [slice(None)] * (len(spec.shape) - len(given))
        ranges = [part.indices(size) for part, size in zip(given, spec.shape, strict=True)]
        assert all(step == 1 for _, _, step in ranges), "boxes have no steps"
        (first, stop, _), *inner = ranges
        if all((low, high) == (0, size) for (low, high, _), size in zip(inner, spec.shape[1:], strict=True)):
            return self._rows(name, first, stop)
        # Reading the rows in full and slicing them takes fewer reads than one for each contiguous piece.
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
        # A single read returns at most 2 GiB on Linux.
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
    """The bytes of a tensor; for a contiguous one on the CPU a writable view of its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
