"""Read from a folder of safetensors files the elements that each rank owns, as plans list them, each byte once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec, file_identity, row_blocks
from cuboid.checkpoint.format.weight_index import INDEX, SINGLE, read_index
from cuboid.checkpoint.metadata import ShardRange, TensorMetadata
from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Coordinate
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharding_spec import placed_boxes

#: Maximum bytes that a rank reads at a time of what it sends to others, unless one row has more.
_BLOCK_BYTES = 64 << 20
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

        What several ranks need, and tensors of whose rows they need columns, are read by one rank, block by block,
        which sends the others their parts; so each byte is read once by all ranks that see the same files.

        Raises:
            CheckpointError: a required tensor is missing, one has another shape, or a file can't be read.
        """
        with ExitStack() as stack:
            needed, identity, failure = dict[str, tuple[int, int]](), tuple[int, ...](), None
            try:
                files = stack.enter_context(TensorFolder(self.folder))
                needed, identity = self._needed(files), files.identity
            except (CheckpointError, OSError) as error:
                failure = str(error)
            by_rank, failures, identities = _gather((needed, failure, identity), mesh)
            failure = next((text for text in failures if text is not None), None)
            if failure is not None:
                raise CheckpointError(failure)
            shared = self._shared(by_rank, mesh) if len(set(identities)) == 1 else []
            exchange = _Exchange(files, self.tensors, by_rank, mesh)
            for name in needed:
                if name not in shared or exchange.is_padding(name):
                    self.targets[name].values.copy_(exchange.read_here(name))
            blocks = [_RowBlock(name, rows) for name in shared for rows in row_blocks(files.spec(name), _BLOCK_BYTES)]
            readers = assign([exchange.bytes_of(block) for block in blocks], list(by_rank))
            of_rank = {
                rank: [block for block, to in zip(blocks, readers, strict=True) if to == rank] for rank in by_rank
            }
            for number, row in enumerate(zip_longest(*of_rank.values())):
                for name, values in exchange.round(dict(zip(by_rank, row, strict=True)), number):
                    self.targets[name].values.copy_(values)
            if exchange.failure is not None:
                raise exchange.failure

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


@dataclass(frozen=True)
class _RowBlock:
    """Rows of a tensor in its file."""

    name: str
    rows: slice


class _Exchange:
    """Blocks of tensors on their way from the ranks that read them to those that need parts of them.

    Attributes:
        failure: why this rank couldn't read a block. It has sent zeros instead, so that nobody waits for it.
    """

    def __init__(
        self, files: TensorFolder, tensors: Mapping[str, TensorMetadata], by_rank: RangesByName, mesh: Mesh
    ) -> None:
        self._files, self._tensors, self._by_rank, self._mesh = files, tensors, by_rank, mesh
        #: Of the tensors that have arrived in part, the rows that this rank needs, and how many elements are missing.
        self._arriving: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self.failure: CheckpointError | None = None

    def is_padding(self, name: str) -> bool:
        """Whether none of the elements that this rank needs of a tensor is in the file."""
        return not any(True for _ in self._boxes(self._whole(name), self._mesh.rank))

    def read_here(self, name: str) -> torch.Tensor:
        """This rank's part ``[stop - start]`` of a tensor, which it reads itself; padding is zero."""
        rows, others = self._rows(name, self._mesh.rank)
        values = torch.zeros((rows.stop - rows.start, *others), dtype=self._files.spec(name).dtype)
        for in_part, in_file in self._boxes(self._whole(name), self._mesh.rank):
            values[in_part] = self._files.read(name, in_file)
        return self._part(name, values)

    def bytes_of(self, block: _RowBlock) -> int:
        """Size of a block."""
        spec = self._files.spec(block.name)
        return TensorSpec(spec.dtype, (block.rows.stop - block.rows.start, *spec.shape[1:])).nbytes

    def round(self, blocks: Mapping[int, _RowBlock | None], number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Each rank reads one block and sends its parts; gives those of this rank's parts that are whole by then.

        Args:
            blocks: by the rank that reads it.
            number: of the round, from 0.
        """
        rank, group = self._mesh.rank, self._mesh.stage_host_group
        transfers: list[dist.Work | None] = []
        # Keeps what is sent, and where it arrives, until the transfers are complete.
        outgoing: dict[tuple[Coordinate, int, int], torch.Tensor] = {}
        incoming: list[tuple[_RowBlock, torch.Tensor]] = []
        for reader, block in blocks.items():
            if block is None:
                continue
            if reader == rank:
                read = self._read(block)
            for to in self._by_rank if reader == rank else (rank,):
                boxes = list(self._boxes(block, to))
                if not boxes:
                    continue
                if reader != rank:
                    values = torch.empty(_elements(boxes), dtype=self._files.spec(block.name).dtype)
                    incoming.append((block, values))
                    transfers.append(dist.irecv(values.view(torch.uint8), reader, group, tag=number))
                    continue
                # Replicas get the same part.
                key = (replace(self._mesh.topology.coordinate(to), data=0), *self._by_rank[to][block.name])
                if key not in outgoing:
                    outgoing[key] = torch.cat([read[in_block].reshape(-1) for _, in_block in boxes])
                if to == rank:
                    incoming.append((block, outgoing[key]))
                else:
                    transfers.append(dist.isend(outgoing[key].view(torch.uint8), to, group, tag=number))
        for transfer in transfers:
            assert transfer is not None, "the host group has all ranks of the stage"
            transfer.wait()
        for block, values in incoming:
            yield from self._arrived(block, values)

    def _read(self, block: _RowBlock) -> torch.Tensor:
        spec = self._files.spec(block.name)
        try:
            read = self._files.read(block.name, [block.rows] if spec.shape else None)
        except (CheckpointError, OSError) as error:
            self.failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{block.name}: {error}")
            read = torch.zeros((block.rows.stop - block.rows.start, *spec.shape[1:]), dtype=spec.dtype)
        return read if spec.shape else read.view(1)

    def _whole(self, name: str) -> _RowBlock:
        shape = self._tensors[name].shape
        return _RowBlock(name, slice(0, shape[0] if shape else 1))

    def _rows(self, name: str, rank: int) -> tuple[slice, tuple[int, ...]]:
        """The rows of its shard of a tensor that a rank needs any element of, and the sizes of the shard's other dims.

        A tensor without dims counts as one row.
        """
        sharding = self._tensors[name].sharding
        shape = self._tensors[name].shape if sharding is None else sharding.shard_shape(self._mesh.shape)
        row = max(math.prod(shape[1:]), 1)
        start, stop = self._by_rank[rank][name]
        return slice(start // row, -(-stop // row)), shape[1:]

    def _boxes(self, block: _RowBlock, rank: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """What a rank needs of a block: pairs of (slices of the rows that it needs, slices of the block)."""
        if block.name not in self._by_rank[rank]:
            return
        rows, others = self._rows(block.name, rank)
        sharding = self._tensors[block.name].sharding
        full_dims = [slice(0, size) for size in others]
        boxes = iter([((slice(0, rows.stop - rows.start), *full_dims), (rows, *full_dims))])
        if sharding is not None:
            boxes = placed_boxes(sharding, self._mesh.shape, self._mesh.topology.coordinate(rank), rows)
        for (in_rows, *in_dims), (in_file, *file_dims) in boxes:
            low, high = max(in_file.start, block.rows.start), min(in_file.stop, block.rows.stop)
            if low < high:
                start = in_rows.start + low - in_file.start
                in_block = slice(low - block.rows.start, high - block.rows.start)
                yield (slice(start, start + high - low), *in_dims), (in_block, *file_dims)

    def _arrived(self, block: _RowBlock, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Put a block's elements into the rows that this rank needs; gives its part ``[stop - start]`` with the last.

        Padding is zero.
        """
        name, (rows, others) = block.name, self._rows(block.name, self._mesh.rank)
        if name not in self._arriving:
            self._arriving[name] = values.new_zeros((rows.stop - rows.start, *others))
            self._missing[name] = _elements(self._boxes(self._whole(name), self._mesh.rank))
        offset = 0
        for in_part, _ in self._boxes(block, self._mesh.rank):
            box = self._arriving[name][in_part]
            box.copy_(values[offset : offset + box.numel()].view(box.shape))
            offset += box.numel()
        self._missing[name] -= offset
        if self._missing[name] == 0:
            yield name, self._part(name, self._arriving.pop(name))

    def _part(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """What this rank needs of the rows that have it, ``[stop - start]``."""
        first = self._rows(name, self._mesh.rank)[0].start * max(math.prod(rows.shape[1:]), 1)
        start, stop = self._by_rank[self._mesh.rank][name]
        return rows.view(-1)[start - first : stop - first]


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


def _elements(boxes: Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]) -> int:
    return sum(math.prod(x.stop - x.start for x in in_part) for in_part, _ in boxes)


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
