"""Read from a folder of safetensors files only the elements that a rank owns, as a plan lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec
from cuboid.checkpoint.format.weight_index import INDEX, SINGLE, read_index
from cuboid.checkpoint.metadata import ShardRange, TensorMetadata
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharding_spec import placed_boxes


@dataclass(frozen=True)
class ReadItem:
    """The elements of one tensor that a rank reads.

    Attributes:
        name: the tensor's.
        tensor: the full shape that it must have, and how the mesh shards it.
        target: the range of this rank's shard to read, and where its values go.
        required: whether it is an error if the checkpoint lacks the tensor; if not, the target keeps its values.
    """

    name: str
    tensor: TensorMetadata
    target: ShardRange
    required: bool


@dataclass(frozen=True)
class LoadPlan:
    """What a rank reads from one folder of safetensors files."""

    folder: Path
    items: tuple[ReadItem, ...]

    def read(self, mesh: Mesh) -> None:
        """Fill the items' targets.

        Raises:
            CheckpointError: a required tensor is missing, or one has another shape.
        """
        with TensorFolder(self.folder) as files:
            available = set(files.names)
            for item in self.items:
                if item.name in available:
                    item.target.values.copy_(
                        files.read_range(item.name, item.tensor, mesh, item.target.start, item.target.stop)
                    )
                elif item.required:
                    raise CheckpointError(f"{self.folder}: lacks {item.name}")


class TensorFolder:
    """Reads the tensors of a folder with ``model.safetensors.index.json``, or with one ``model.safetensors``. Use it as
    a context manager, or call :meth:`close`.

    Raises:
        CheckpointError: there is neither, or the index is malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TensorFile] = {}
        index = folder / INDEX
        if index.is_file():
            self._map = read_index(index)
        elif (folder / SINGLE).is_file():
            self._map = dict.fromkeys(self._file(SINGLE).specs, SINGLE)
        else:
            raise CheckpointError(f"{folder}: has neither {INDEX} nor {SINGLE}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._map)

    def spec(self, name: str) -> TensorSpec:
        """A tensor's dtype and shape in the file.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._map:
            raise CheckpointError(f"{self.folder}: has no tensor {name}")
        file = self._file(self._map[name])
        if name not in file.specs:
            raise CheckpointError(f"{file.path}: has no tensor {name}, which {INDEX} says it has")
        return file.specs[name]

    def read(self, name: str, box: Sequence[slice] | None = None) -> torch.Tensor:
        """A tensor, or a box of it; see :meth:`TensorFile.read`."""
        self.spec(name)  # raises if there is no such tensor
        return self._file(self._map[name]).read(name, box)

    def read_range(self, name: str, tensor: TensorMetadata, mesh: Mesh, start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of this rank's flattened shard, as ``[stop - start]``; padding is zero.

        Raises:
            CheckpointError: there is no such tensor, or it has another shape.
        """
        spec, sharding = self.spec(name), tensor.sharding
        if spec.shape != tensor.shape:
            raise CheckpointError(
                f"{self.folder}: {name} is of shape {list(spec.shape)}, but the model's is {list(tensor.shape)}"
            )
        shard_shape = tensor.shape if sharding is None else sharding.shard_shape(mesh.shape)
        if not shard_shape:
            # A 0-dim tensor has no rows to slice.
            return self.read(name).view(-1)
        # Full rows of the shard are read, all that the range touches; the surplus elements are trimmed off below.
        row = max(torch.Size(shard_shape[1:]).numel(), 1)
        first, last = start // row, -(-stop // row)
        if sharding is None:
            rows = self.read(name, [slice(first, last)])
        else:
            rows = torch.zeros((last - first, *shard_shape[1:]), dtype=spec.dtype)
            for in_rows, in_file in placed_boxes(sharding, mesh.shape, mesh.coordinate, slice(first, last)):
                rows[in_rows] = self.read(name, in_file)
        return rows.view(-1)[start - first * row : stop - first * row]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
