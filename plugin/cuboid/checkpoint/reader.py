"""Read from a folder of safetensors files the elements that each rank owns, as plans list them, each byte once."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec, file_identity
from cuboid.checkpoint.format.weight_index import INDEX, SINGLE, read_index
from cuboid.checkpoint.metadata import ShardRange, TensorMetadata
from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Coordinate
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharding_spec import placed_boxes

#: For each rank, the range [start, stop) of its flattened shard of each tensor that it reads, by name.
RangesByName = Mapping[int, Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class LoadPlan:
    """What a rank reads from one folder of safetensors files.

    Attributes:
        folder: of the files.
        targets: by the tensor's name, the range of this rank's shard to read, and where its values go.
        tensors: shapes and shardings of all tensors of this rank's stage, the same on all its ranks.
        required: tensors that the checkpoint must have; targets of others that it lacks keep their values.
    """

    folder: Path
    targets: Mapping[str, ShardRange]
    tensors: Mapping[str, TensorMetadata]
    required: Collection[str]

    def read(self, mesh: Mesh) -> None:
        """Fill the targets. Collective over the stage, over the mesh's host groups.

        What several ranks need, and tensors of whose rows they need columns, are read by one rank, which sends the
        others their parts; so each byte is read once by all ranks that see the same files.

        Raises:
            CheckpointError: a required tensor is missing, one has another shape, or a file can't be read.
        """
        with TensorFolder(self.folder) as files:
            failure, needed = None, dict[str, tuple[int, int]]()
            try:
                needed = self._needed(files)
            except CheckpointError as error:
                failure = str(error)
            by_rank, failures, identities = _gather((needed, failure, files.identity), mesh)
            failure = next((text for text in failures if text is not None), None)
            if failure is not None:
                raise CheckpointError(failure)
            shared = self._shared(by_rank, mesh) if len(set(identities)) == 1 else []
            for name in needed.keys() - set(shared):
                start, stop = needed[name]
                values = part_of(functools.partial(files.read, name), self.tensors[name], mesh, mesh.rank, start, stop)
                self.targets[name].values.copy_(values)
            readers = assign([files.spec(name).nbytes for name in shared], list(by_rank))
            tensors = {rank: [name for name, to in zip(shared, readers, strict=True) if to == rank] for rank in by_rank}
            unread = [
                self._round(files, dict(zip(by_rank, row, strict=True)), by_rank, number, mesh)
                for number, row in enumerate(zip_longest(*tensors.values()))
            ]
        for failed_read in unread:
            if failed_read is not None:
                raise failed_read

    def _needed(self, files: TensorFolder) -> dict[str, tuple[int, int]]:
        """The ranges to read, after checking that they are there."""
        available = set(files.names)
        lacking = next((name for name in self.targets if name in self.required and name not in available), None)
        if lacking is not None:
            raise CheckpointError(f"{self.folder}: lacks {lacking}")
        needed = {name: target for name, target in self.targets.items() if name in available}
        for name in needed:
            stored, shape = files.spec(name).shape, self.tensors[name].shape
            if stored != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} is of shape {list(stored)}, but the model's is {list(shape)}"
                )
        return {name: (target.start, target.stop) for name, target in needed.items() if target.values.numel()}

    def _shared(self, by_rank: RangesByName, mesh: Mesh) -> list[str]:
        """The tensors of which the ranks would read some bytes more than once, if each read for itself."""
        read = Counter[str]()
        for ranges in by_rank.values():
            read.update({name: stop - start for name, (start, stop) in ranges.items()})
        shared = []
        for name, elements in sorted(read.items()):
            tensor = self.tensors[name]
            sharding = tensor.sharding
            stored = math.prod(tensor.shape)
            if sharding is not None:
                stored = math.prod(sharding.shard_shape(mesh.shape)) * mesh.shape.size
                # Files have rows one after the other, so a rank reads whole rows of which it takes some columns.
                if any(mesh.size(*axes) > 1 for axes in sharding.tp_axes[1:]):
                    stored = 0
            if elements > stored:
                shared.append(name)
        return shared

    def _round(
        self, files: TensorFolder, names: Mapping[int, str | None], by_rank: RangesByName, number: int, mesh: Mesh
    ) -> CheckpointError | None:
        """Each rank reads one whole tensor and sends its parts; returns what was wrong, so that nobody waits for it."""
        transfers: list[dist.Work | None] = []
        # Keeps what is sent, and where it arrives, until the transfers are complete.
        outgoing: dict[tuple[Coordinate, int, int], torch.Tensor] = {}
        incoming: list[tuple[str, torch.Tensor]] = []
        failure = None
        for reader, name in names.items():
            if name is None:
                continue
            spec, tensor = files.spec(name), self.tensors[name]
            if reader != mesh.rank:
                if name in by_rank[mesh.rank]:
                    start, stop = by_rank[mesh.rank][name]
                    incoming.append((name, torch.empty(stop - start, dtype=spec.dtype)))
                    transfers.append(dist.irecv(_bytes(incoming[-1][1]), reader, mesh.stage_host_group, tag=number))
                continue
            try:
                full = files.read(name)
            except (CheckpointError, OSError) as error:
                failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{self.folder}: {error}")
                full = torch.zeros(spec.shape, dtype=spec.dtype)
            for rank, ranges in by_rank.items():
                if name not in ranges:
                    continue
                # Replicas get the same part.
                key = (replace(mesh.topology.coordinate(rank), data=0), *ranges[name])
                if key not in outgoing:
                    outgoing[key] = part_of(functools.partial(_box_of, full), tensor, mesh, rank, *ranges[name])
                if rank == mesh.rank:
                    incoming.append((name, outgoing[key]))
                else:
                    transfers.append(dist.isend(_bytes(outgoing[key]), rank, mesh.stage_host_group, tag=number))
        for transfer in transfers:
            assert transfer is not None, "the host group has all ranks of the stage"
            transfer.wait()
        for name, values in incoming:
            self.targets[name].values.copy_(values)
        return failure


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
    def identity(self) -> tuple[int, ...]:
        """Differs between a folder and a copy of it, and is the same on all hosts that share it."""
        return file_identity(self.folder / (INDEX if (self.folder / INDEX).is_file() else SINGLE))

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


def part_of(
    read: Callable[..., torch.Tensor], tensor: TensorMetadata, mesh: Mesh, rank: int, start: int, stop: int
) -> torch.Tensor:
    """Elements [start, stop) of a rank's flattened shard, as ``[stop - start]``; padding is zero.

    ``read`` returns a box of the whole tensor, or all of it.
    """
    sharding = tensor.sharding
    shard_shape = tensor.shape if sharding is None else sharding.shard_shape(mesh.shape)
    if not shard_shape:
        # A 0-dim tensor has no rows to slice.
        return read().view(-1)
    # Full rows of the shard are read, all that the range touches; the surplus elements are trimmed off below.
    row = max(torch.Size(shard_shape[1:]).numel(), 1)
    first, last = start // row, -(-stop // row)
    if sharding is None:
        rows = read([slice(first, last)])
    else:
        at = mesh.topology.coordinate(rank)
        boxes = [
            (in_rows, read(in_file)) for in_rows, in_file in placed_boxes(sharding, mesh.shape, at, slice(first, last))
        ]
        dtype = boxes[0][1].dtype if boxes else read([slice(0, 0)]).dtype
        rows = torch.zeros((last - first, *shard_shape[1:]), dtype=dtype)
        for in_rows, values in boxes:
            rows[in_rows] = values
    return rows.reshape(-1)[start - first * row : stop - first * row].contiguous()


def _box_of(full: torch.Tensor, box: Sequence[slice] = ()) -> torch.Tensor:
    return full[tuple(box)]


def _gather(
    item: tuple[dict[str, tuple[int, int]], str | None, tuple[int, ...]], mesh: Mesh
) -> tuple[RangesByName, list[str | None], list[tuple[int, ...]]]:
    """Ranges, failures and identities of the files, as the ranks of this stage have them."""
    if mesh.stage_host_group is None:
        return {mesh.rank: item[0]}, [item[1]], [item[2]]
    gathered: list[Any] = [None] * dist.get_world_size(mesh.stage_host_group)
    dist.all_gather_object(gathered, item, group=mesh.stage_host_group)
    ranks = dist.get_process_group_ranks(mesh.stage_host_group)
    ranges, failures, identities = zip(*gathered, strict=True)
    return dict(zip(ranks, ranges, strict=True)), list(failures), list(identities)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)
