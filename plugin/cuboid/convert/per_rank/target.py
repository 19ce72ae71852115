"""Write per-rank files from full tensors, with one block of rows in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.manifest import FileRecord, record_of
from cuboid.checkpoint.format.tensor_file import TensorFileWriter
from cuboid.config.schema import MeshConfig
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.convert.per_rank.plan import RankPlan
from cuboid.distributed.topology import Coordinate, MeshShape, Topology
from cuboid.tensor3d.sharding.sharding_spec import Interval
from cuboid.weights.rank_folder import RankFolder, RankTensor, file_name, pipeline_ranks, shard_spec


def write_rank_files(folder: Path, tensors: BlockTensors, plan: RankPlan, advance: Callable[[int], Any]) -> RankFolder:
    """Write one file for each rank of one replica: each coordinate in the pipeline and its mesh.

    ``advance`` is called with the size of each block after it was written, once for each stage that has it. Returns the
    contents of ``shards.json``, without the auxiliary files.
    """
    pipe = pipeline_ranks(plan.layers, plan.placement)
    places = Topology(plan.mesh, plan.mesh.size * pipe, pipe)
    files: dict[str, FileRecord] = {}
    for stage in range(pipe):
        of_stage = {name: tensor for name, tensor in plan.tensors.items() if stage in tensor.stages}
        at = {place: places.coordinate(place) for place in range(places.world_size)}
        names = {file_name(places, place): where for place, where in at.items() if where.pipe == stage}
        files.update(_write_stage(folder, tensors, of_stage, plan.mesh, names, advance))
    mesh = MeshConfig(batch=plan.mesh.batch, sequence=plan.mesh.sequence, hidden=plan.mesh.hidden)
    return RankFolder(mesh=mesh, layers=plan.layers, placement=plan.placement, tensors=plan.tensors, files=files)


def write_document(folder: Path, document: RankFolder) -> None:
    """Write ``shards.json``, with checksums of all other files, into a folder that is complete except for it."""
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    beside = {name: record_of(folder / name) for name in names if name not in document.files}
    document.model_copy(update={"beside": beside}).write(folder)


def _write_stage(
    folder: Path,
    tensors: BlockTensors,
    of_stage: dict[str, RankTensor],
    mesh: MeshShape,
    names: dict[str, Coordinate],
    advance: Callable[[int], Any],
) -> dict[str, FileRecord]:
    """Write the files of one stage's ranks, all at the same time, so that each tensor is read once."""
    with ExitStack() as stack:
        writers = [
            _RankFileWriter(
                stack.enter_context(
                    TensorFileWriter(
                        folder / name, {key: shard_spec(tensor, mesh, at) for key, tensor in of_stage.items()}
                    )
                ),
                mesh,
                at,
            )
            for name, at in names.items()
        ]
        # All ranks' files have the same tensors, some of them empty, in the same order.
        for name in writers[0].names:
            first = 0
            for block in tensors.blocks(name):
                for writer in writers:
                    writer.write(name, of_stage[name], block, first)
                first += block.shape[0] if block.shape else 1
                advance(block.nbytes)
        return {name: writer.close() for name, writer in zip(names, writers, strict=True)}


class _RankFileWriter:
    """Writes one rank's part of full rows."""

    def __init__(self, file: TensorFileWriter, mesh: MeshShape, at: Coordinate) -> None:
        self._file, self._mesh, self._at = file, mesh, at
        self.names = list(file.specs)
        self.close = file.close

    def write(self, name: str, tensor: RankTensor, block: torch.Tensor, first: int) -> None:
        """Write the rank's part of the rows from ``first`` on."""
        sharding = tensor.sharding
        if sharding is None:
            self._file.write_rows(name, block)
            return
        spec = self._file.specs[name]
        if spec.nbytes == 0:
            # The rank has no elements of it; the file has an empty tensor of that name.
            if first == 0:
                self._file.write_rows(name, torch.empty(spec.shape, dtype=spec.dtype))
            return
        for rows in _own_rows(block, first, sharding.shard_intervals(self._mesh, self._at)):
            self._file.write_rows(name, rows)


def _own_rows(block: torch.Tensor, first: int, intervals: Sequence[Sequence[Interval]]) -> Iterator[torch.Tensor]:
    """The parts of a block, which begins at row ``first`` of the full tensor, that lie in a shard's intervals."""
    for low, high in intervals[0]:
        start, stop = max(low, first), min(high, first + block.shape[0])
        if start < stop:
            rows = block[start - first : stop - first]
            # Along the other dims, the shard's intervals lie side by side.
            for dim, spans in enumerate(intervals[1:], 1):
                rows = torch.cat([rows.narrow(dim, begin, end - begin) for begin, end in spans], dim)
            yield rows
