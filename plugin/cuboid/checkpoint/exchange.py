"""Gather the shards of each tensor on the rank that writes it.

The exchange runs in rounds; in each, every writer receives the tensors of one bundle. A writer holds the received
shards and, while it assembles them, the full tensors: at most twice the bundle, regardless of the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from cuboid.checkpoint.host_copies import HostCopies
from cuboid.checkpoint.save_planner import Holdings, Part, find_parts
from cuboid.checkpoint.shards import Bundle, SplitTensor
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharding_spec import put_shard


@dataclass(frozen=True)
class Task:
    """A bundle, the folder that it is written to, and the rank that writes it."""

    folder: str
    bundle: Bundle
    writer: int
    #: Index of the bundle's first tensor in the holdings.
    first_item: int


class Exchange:
    """Runs the rounds of one pipeline stage.

    Args:
        mesh: this rank's mesh, with its host (gloo) groups connected.
        holdings: which elements each rank of the stage has.
    """

    def __init__(self, mesh: Mesh, holdings: Holdings) -> None:
        self._mesh = mesh
        self._holdings = holdings
        self._group = mesh.stage_host_group
        self._places = {rank: cell for cell, ranks in enumerate(mesh.stage_ranks) for rank in ranks}

    def rounds(self, tasks: Sequence[Task]) -> Iterator[tuple[list[Task], Task | None, dict[str, torch.Tensor]]]:
        """Run all tasks of the stage, one per writer in each round. Collective over the stage.

        Args:
            tasks: the same on all ranks, in the order in which each writer writes its own.

        Yields:
            The tasks of the round, this rank's own task if it has one, and that task's full tensors on the CPU, by
            name. The caller must free them before it asks for the next round.
        """
        by_writer: dict[int, list[Task]] = {}
        for task in tasks:
            by_writer.setdefault(task.writer, []).append(task)
        for number, row in enumerate(zip_longest(*by_writer.values())):
            current = [task for task in row if task is not None]
            own = next((task for task in current if task.writer == self._mesh.rank), None)
            wholes = self._round(current, number)
            yield current, own, wholes
            # Otherwise this frame keeps the last round's tensors alive while the next ones are received.
            del wholes

    def _round(self, tasks: list[Task], number: int) -> dict[str, torch.Tensor]:
        transfers: list[dist.Work | None] = []
        # Keeps the send buffers alive until their transfers are complete.
        sent: list[tuple[torch.Tensor, int]] = []
        host = HostCopies()
        received: list[tuple[SplitTensor, list[Part], list[torch.Tensor]]] = []
        for task in tasks:
            for offset, tensor in enumerate(task.bundle.tensors):
                parts = self._parts(task, offset, tensor)
                if task.writer == self._mesh.rank:
                    runs = [self._receive(part, tensor, number, transfers, host) for part in parts]
                    received.append((tensor, parts, runs))
                else:
                    own = [part for part in parts if part.source == self._mesh.rank]
                    sent += [(host.copy(_own_part(tensor, part), shared=True), task.writer) for part in own]
        # One synchronization for all device-to-host copies of the round, instead of one per part.
        host.wait()
        transfers += [dist.isend(values.view(torch.uint8), writer, self._group, tag=number) for values, writer in sent]
        for transfer in transfers:
            assert transfer is not None, "the host group has all ranks of the stage"
            transfer.wait()
        sent.clear()
        return {tensor.name: self._assemble(tensor, parts, runs) for tensor, parts, runs in received}

    def _parts(self, task: Task, offset: int, tensor: SplitTensor) -> list[Part]:
        cells = self._mesh.stage_ranks
        shape = tensor.spec.shape
        if tensor.layout is None:
            # Not sharded by the mesh, so the ranks at the writer's position in it, one per replica, have every
            # element: each has all of them or, under ZeRO-1, a range.
            cells = [cells[self._places[task.writer]]]
        else:
            shape = tensor.layout.shard_shape(self._mesh.shape)
        item, numel = task.first_item + offset, torch.Size(shape).numel()
        return find_parts(tensor.name, item, numel, cells, self._holdings, task.writer)

    def _receive(
        self, part: Part, tensor: SplitTensor, number: int, transfers: list[dist.Work | None], host: HostCopies
    ) -> torch.Tensor:
        if part.source == self._mesh.rank:
            return host.copy(_own_part(tensor, part), shared=True)
        buffer = torch.empty(part.stop - part.start, dtype=tensor.spec.dtype)
        transfers.append(dist.irecv(buffer.view(torch.uint8), part.source, self._group, tag=number))
        return buffer

    def _assemble(self, tensor: SplitTensor, parts: list[Part], received: list[torch.Tensor]) -> torch.Tensor:
        if tensor.layout is None and len(received) == 1:
            return received[0].view(tensor.spec.shape)
        by_cell: dict[int, list[torch.Tensor]] = {}
        for part, values in zip(parts, received, strict=True):
            by_cell.setdefault(part.cell, []).append(values)
        # From here on ``by_cell`` has the only references, so that each shard is freed as soon as it is copied.
        received.clear()
        if tensor.layout is None:
            return torch.cat(by_cell[0]).view(tensor.spec.shape)
        whole = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype)
        for cell in sorted(by_cell):
            runs = by_cell.pop(cell)
            shard = (runs[0] if len(runs) == 1 else torch.cat(runs)).view(tensor.layout.shard_shape(self._mesh.shape))
            at = self._mesh.topology.coordinate(self._mesh.stage_ranks[cell][0])
            put_shard(whole, shard, tensor.layout, self._mesh.shape, at)
        return whole


def _own_part(tensor: SplitTensor, part: Part) -> torch.Tensor:
    assert tensor.run is not None, "a rank without elements is never a source"
    return tensor.run.values[part.start - tensor.run.start : part.stop - tensor.run.start]
