"""Bring the parts of tensors together, each whole tensor on the rank that writes it.

In each round every writer gets the tensors of one bundle. It holds their parts and, while these are put together, the
whole: two full tensors at most, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from cuboid.checkpoint.save_planner import Holdings, Part, find_parts
from cuboid.checkpoint.shards import Bundle, SplitTensor
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharding_spec import put_shard


@dataclass(frozen=True)
class Task:
    """A bundle, the folder that it goes to, and the rank that writes it."""

    folder: str
    bundle: Bundle
    writer: int
    #: Position of the bundle's first tensor in the holdings.
    first_item: int


class Exchange:
    """Runs the rounds of one stage.

    Args:
        mesh: of this rank, with its host groups.
        holdings: of all ranks of the stage.
    """

    def __init__(self, mesh: Mesh, holdings: Holdings) -> None:
        self._mesh = mesh
        self._holdings = holdings
        self._group = mesh.stage_host_group
        self._places = {rank: cell for cell, ranks in enumerate(mesh.stage_ranks) for rank in ranks}

    def rounds(self, tasks: Sequence[Task]) -> Iterator[tuple[list[Task], Task | None, dict[str, torch.Tensor]]]:
        """All tasks of the stage, a task for each writer at a time. Collective over the stage.

        Args:
            tasks: alike on all ranks, in the order in which each writer is to have its own.

        Yields:
            The tasks of the round, this rank's own if it has one, and the whole tensors for it, on the CPU. They are
            to be let go of before the next round.
        """
        by_writer: dict[int, list[Task]] = {}
        for task in tasks:
            by_writer.setdefault(task.writer, []).append(task)
        for number, row in enumerate(zip_longest(*by_writer.values())):
            current = [task for task in row if task is not None]
            own = next((task for task in current if task.writer == self._mesh.rank), None)
            wholes = self._round(current, number)
            yield current, own, wholes
            del wholes

    def _round(self, tasks: list[Task], number: int) -> dict[str, torch.Tensor]:
        transfers: list[dist.Work | None] = []
        sent: list[torch.Tensor] = []
        received: list[tuple[SplitTensor, list[Part], list[torch.Tensor]]] = []
        for task in tasks:
            for offset, tensor in enumerate(task.bundle.tensors):
                parts = self._parts(task, offset, tensor)
                if task.writer == self._mesh.rank:
                    runs = [self._receive(part, tensor, number, transfers) for part in parts]
                    received.append((tensor, parts, runs))
                else:
                    self._send(parts, tensor, task.writer, number, transfers, sent)
        for transfer in transfers:
            assert transfer is not None, "the host group has all ranks of the stage"
            transfer.wait()
        sent.clear()
        return {tensor.name: self._assemble(tensor, parts, runs) for tensor, parts, runs in received}

    def _parts(self, task: Task, offset: int, tensor: SplitTensor) -> list[Part]:
        item, cells, numel = task.first_item + offset, self._mesh.stage_ranks, _shard_numel(tensor, self._mesh)
        if tensor.layout is None:
            # Every rank of the stage holds the same shard: all of it, or a run that its replica was given.
            own_place = cells[self._places[task.writer]]
            cells = [own_place]
        return find_parts(tensor.name, item, numel, cells, self._holdings, task.writer)

    def _receive(self, part: Part, tensor: SplitTensor, number: int, transfers: list[dist.Work | None]) -> torch.Tensor:
        if part.source == self._mesh.rank:
            return _own_part(tensor, part)
        buffer = torch.empty(part.stop - part.start, dtype=tensor.spec.dtype)
        transfers.append(dist.irecv(buffer.view(torch.uint8), part.source, self._group, tag=number))
        return buffer

    def _send(
        self,
        parts: list[Part],
        tensor: SplitTensor,
        writer: int,
        number: int,
        transfers: list[dist.Work | None],
        sent: list[torch.Tensor],
    ) -> None:
        for part in parts:
            if part.source == self._mesh.rank:
                # Kept until it has gone.
                sent.append(_own_part(tensor, part).cpu())
                transfers.append(dist.isend(sent[-1].view(torch.uint8), writer, self._group, tag=number))

    def _assemble(self, tensor: SplitTensor, parts: list[Part], received: list[torch.Tensor]) -> torch.Tensor:
        if tensor.layout is None and len(received) == 1:
            return received[0].cpu().view(tensor.spec.shape)
        by_cell: dict[int, list[torch.Tensor]] = {}
        for part, values in zip(parts, received, strict=True):
            by_cell.setdefault(part.cell, []).append(values.cpu())
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
    assert tensor.run is not None, "named as a source without having anything"
    return tensor.run.values[part.start - tensor.run.start : part.stop - tensor.run.start]


def _shard_numel(tensor: SplitTensor, mesh: Mesh) -> int:
    shape = tensor.spec.shape if tensor.layout is None else tensor.layout.shard_shape(mesh.shape)
    return torch.Size(shape).numel()
