"""Gather the shards of each tensor on the rank that writes it.

The exchange runs in rounds; in each, every writer receives the tensors of one item. A writer holds the received shards
and, while it assembles them, the full tensors: at most twice the item, regardless of the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from cuboid.checkpoint.metadata import ShardedTensor
from cuboid.checkpoint.save_planner import PlannedItem, RangesByRank, SourceRange, find_sources
from cuboid.checkpoint.snapshot import HostCopies
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharding_spec import put_shard


class Exchange:
    """Runs the rounds of one pipeline stage, over the mesh's host (gloo) groups, which must be connected."""

    def __init__(self, mesh: Mesh, ranges: RangesByRank) -> None:
        self._mesh = mesh
        self._ranges = ranges
        self._group = mesh.stage_host_group

    def rounds(
        self, planned: Sequence[PlannedItem]
    ) -> Iterator[tuple[list[PlannedItem], PlannedItem | None, dict[str, torch.Tensor]]]:
        """Run all items of the stage, one per writer in each round. Collective over the stage.

        Args:
            planned: the same on all ranks, in the order in which each writer writes its own.

        Yields:
            The items of the round, the one that this rank writes if it has one, and that one's full tensors on the CPU,
            by name. The caller must free them before it asks for the next round.
        """
        by_writer: dict[int, list[PlannedItem]] = {}
        for entry in planned:
            by_writer.setdefault(entry.writer, []).append(entry)
        for number, row in enumerate(zip_longest(*by_writer.values())):
            in_round = [entry for entry in row if entry is not None]
            own_item = next((entry for entry in in_round if entry.writer == self._mesh.rank), None)
            full_tensors = self._round(in_round, number)
            yield in_round, own_item, full_tensors
            # Otherwise this frame keeps the last round's tensors alive while the next ones are received.
            del full_tensors

    def _round(self, in_round: list[PlannedItem], number: int) -> dict[str, torch.Tensor]:
        transfers: list[dist.Work | None] = []
        # Values and their writer: keeps the send buffers alive until their transfers are complete.
        outgoing: list[tuple[torch.Tensor, int]] = []
        host = HostCopies()
        incoming: list[tuple[ShardedTensor, list[SourceRange], list[torch.Tensor]]] = []
        for entry in in_round:
            for offset, tensor in enumerate(entry.item.tensors):
                sources = self._sources(entry, offset, tensor)
                if entry.writer == self._mesh.rank:
                    values = [self._receive(source, tensor, number, transfers, host) for source in sources]
                    incoming.append((tensor, sources, values))
                else:
                    own_sources = [source for source in sources if source.source == self._mesh.rank]
                    outgoing += [
                        (host.copy(_local(tensor, source), shared=True), entry.writer) for source in own_sources
                    ]
        # One synchronization for all device-to-host copies of the round, instead of one per range.
        host.wait()
        transfers += [
            dist.isend(values.view(torch.uint8), writer, self._group, tag=number) for values, writer in outgoing
        ]
        for transfer in transfers:
            assert transfer is not None, "the host group has all ranks of the stage"
            transfer.wait()
        outgoing.clear()
        return {tensor.name: self._assemble(tensor, sources, values) for tensor, sources, values in incoming}

    def _sources(self, entry: PlannedItem, offset: int, tensor: ShardedTensor) -> list[SourceRange]:
        cells = self._mesh.stage_ranks
        shape = tensor.spec.shape
        if tensor.sharding is None:
            # Not sharded by the mesh: some ranks have all elements or, under ZeRO-1, a range.
            cells = [[rank for ranks in cells for rank in ranks]]
        else:
            shape = tensor.sharding.shard_shape(self._mesh.shape)
        numel = torch.Size(shape).numel()
        return find_sources(tensor.name, entry.first_tensor + offset, numel, cells, self._ranges, entry.writer)

    def _receive(
        self,
        source: SourceRange,
        tensor: ShardedTensor,
        number: int,
        transfers: list[dist.Work | None],
        host: HostCopies,
    ) -> torch.Tensor:
        if source.source == self._mesh.rank:
            return host.copy(_local(tensor, source), shared=True)
        buffer = torch.empty(source.stop - source.start, dtype=tensor.spec.dtype)
        transfers.append(dist.irecv(buffer.view(torch.uint8), source.source, self._group, tag=number))
        return buffer

    def _assemble(self, tensor: ShardedTensor, sources: list[SourceRange], pieces: list[torch.Tensor]) -> torch.Tensor:
        if tensor.sharding is None and len(pieces) == 1:
            return pieces[0].view(tensor.spec.shape)
        by_cell: dict[int, list[torch.Tensor]] = {}
        for source, values in zip(sources, pieces, strict=True):
            by_cell.setdefault(source.cell, []).append(values)
        # From here on ``by_cell`` has the only references, so that each shard is freed as soon as it is copied.
        pieces.clear()
        if tensor.sharding is None:
            return torch.cat(by_cell[0]).view(tensor.spec.shape)
        full_tensor = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype)
        for cell in sorted(by_cell):
            ranges = by_cell.pop(cell)
            flat = ranges[0] if len(ranges) == 1 else torch.cat(ranges)
            shard = flat.view(tensor.sharding.shard_shape(self._mesh.shape))
            at = self._mesh.topology.coordinate(self._mesh.stage_ranks[cell][0])
            put_shard(full_tensor, shard, tensor.sharding, self._mesh.shape, at)
        return full_tensor


def _local(tensor: ShardedTensor, source: SourceRange) -> torch.Tensor:
    """This rank's elements of a range that it sends."""
    assert tensor.local is not None, "a rank without elements is never a source"
    return tensor.local.values[source.start - tensor.local.start : source.stop - tensor.local.start]
