"""One rank: builds the model on a mesh, and sees what its forward keeps and how much lives at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from three_d.instruments import Meter
from transformers import PreTrainedModel

import cuboid
from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.planner.model_memory import model_kept_bytes
from cuboid.seq1f1b.runtime.memory import LiveActivations
from memory_parts.workload import MemoryWorkload

#: Of float32, in which everything is.
_ELEMENT_BYTES = 4
_ORIGIN = Coordinate(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Kept:
    """What one rank found.

    Args:
        loss, gradient_norm: of the whole model.
        parameter_bytes: of the rank's own parameters, of which its gradients have as many.
        kept_bytes: that autograd kept between forward and backward; parameters not counted.
        peak_bytes: the most that lived at a time in forward and backward, of what was made there; gradients of
            parameters are there before, and only those that are still to be added to them count.
        formula_bytes: what it keeps by the closed count, by what keeps it; None for plain transformers.
    """

    loss: float
    gradient_norm: float
    parameter_bytes: int
    kept_bytes: int
    peak_bytes: int
    formula_bytes: dict[str, int] | None


class MemoryRank:
    """Takes one mesh after the other."""

    def __init__(self, workload: MemoryWorkload) -> None:
        self._workload = workload
        self._ids = workload.tokens()

    def examine(self, mesh: str, repeats: int) -> Kept:
        """A model on a mesh of all ranks."""
        whole = self._workload.model()
        shape = self._workload.shape(mesh, dist.get_world_size(), whole)
        sharded = cuboid.shard(self._workload.model(), self._workload.config(mesh, dist.get_world_size()))
        at = cuboid.mesh_of(sharded).coordinate
        return self._examine(sharded, self._formula(whole, shape, at), repeats)

    def examine_plain(self, repeats: int) -> Kept:
        """The model as transformers has it, in one process."""
        return self._examine(self._workload.model(), None, repeats)

    def _formula(self, whole: PreTrainedModel, shape: MeshShape, at: Coordinate) -> dict[str, int]:
        sizes = self._workload.batch, self._workload.length
        return model_kept_bytes(whole, shape, at, *sizes, element_bytes=_ELEMENT_BYTES)

    def _examine(self, model: PreTrainedModel, formula_bytes: dict[str, int] | None, repeats: int) -> Kept:
        loss = self._step(model)
        norm = _gradient_norm(model)
        kept_bytes = self._kept_bytes(model)
        peak_bytes = 0
        for _ in range(repeats):
            with Meter(_existing(model, self._ids)) as meter:
                self._step(model)
            peak_bytes = max(peak_bytes, meter.peak_bytes)
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return Kept(loss, norm, parameter_bytes, kept_bytes, peak_bytes, formula_bytes)

    def _step(self, model: PreTrainedModel) -> float:
        loss = model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        return loss.item()

    def _kept_bytes(self, model: PreTrainedModel) -> int:
        with LiveActivations((*model.parameters(), *model.buffers())) as live:
            loss = model(input_ids=self._ids, labels=self._ids).loss
            kept_bytes = live.live_bytes
            loss.backward()
        return kept_bytes


def _gradient_norm(model: PreTrainedModel) -> float:
    """Over all ranks, of which each element has one owner. Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return squares.sqrt().item()


def _existing(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients, ids]
