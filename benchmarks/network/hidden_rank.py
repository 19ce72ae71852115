"""One rank's part of three things that are measured in turn: a step, its computing alone, its communication alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from quiet import pin

# Registers the backend whose collectives return at once.
from torch.testing._internal.distributed import fake_pg  # noqa: F401
from transformers import LlamaForCausalLM

import cuboid
from cuboid.distributed.axis_collectives import all_gather, all_reduce, reduce_scatter
from cuboid.distributed.comm_counter import CommCounter, Operation
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis
from cuboid.errors import CuboidError
from network.hidden_workload import StackWorkload, run_layers
from network.layer_measuring import AGREEMENT
from network.layer_rank import LayerRank, Sharded, Step
from network.layer_workload import Reference
from network.networks import Network
from network.waiting import Waiting

#: What is measured of a mesh.
WHOLE, COMPUTING, SENDING = KINDS = ("step", "computing", "communication")
_ELEMENT_BYTES = 4


class Collective(Protocol):
    """A function of :mod:`cuboid.distributed.axis_collectives`."""

    def __call__(self, x: torch.Tensor, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor: ...


_COLLECTIVES: dict[Operation, Collective] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


def key_of(mesh: str, kind: str) -> str:
    """Under which name a rank keeps one of the :data:`KINDS`."""
    return f"{mesh} {kind}"


@dataclass(frozen=True)
class Call:
    """One collective of a step.

    Args:
        whole_bytes: of the tensor that isn't split, as :class:`cuboid.distributed.comm_counter.CommCounter` is told.
    """

    operation: Operation
    axes: tuple[Axis, ...]
    whole_bytes: int

    def given(self, mesh: Mesh) -> torch.Tensor:
        """Zeros of the size that a rank gives to the collective."""
        elements = self.whole_bytes // _ELEMENT_BYTES
        ranks = mesh.size(*self.axes)
        if self.operation == "reduce_scatter":
            return torch.zeros(ranks, elements // ranks)
        return torch.zeros(elements // ranks if self.operation == "all_gather" else elements)


class _Recording(CommCounter):
    """Remembers each collective besides counting it."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Call] = []

    def record(self, operation: Operation, axes: Sequence[Axis], whole_bytes: int, ranks: int) -> None:
        super().record(operation, axes, whole_bytes, ranks)
        self.collectives.append(Call(operation, tuple(axes), whole_bytes))


class _Layers(Sharded):
    """All layers on one mesh."""

    def run(self) -> None:
        """Forward and backward."""
        output = run_layers(self.model, self._given, self._tables)
        output.backward(self._gradient)
        self.output = output.detach()


class _Replay:
    """The collectives of a step, one after another."""

    def __init__(self, mesh: Mesh, calls: Sequence[Call]) -> None:
        self.mesh = mesh
        self._calls = calls
        self._buffers = {call: call.given(mesh) for call in calls}

    def run(self) -> None:
        """Communicate as much as a step does, and compute nothing of what it computes."""
        for call in self._calls:
            _COLLECTIVES[call.operation](self._buffers[call], self.mesh, call.axes)

    def clear(self) -> None:
        """Nothing is kept."""


class HiddenRank(LayerRank):
    """What a rank keeps: for each mesh the layers, the layers without communication, and communication without them."""

    def __init__(
        self, network: Network, workload: StackWorkload, model: LlamaForCausalLM, reference: Reference
    ) -> None:
        super().__init__(network, workload, model, reference)
        if network.ranks <= (os.cpu_count() or 1):
            pin(dist.get_rank())
        # What a collective that does nothing leaves in a buffer may be numbers that take many times as long.
        torch.set_flush_denormal(True)
        self._waiting = Waiting()

    def prepare(self, mesh: str) -> tuple[str, float]:
        """Shard the model twice, and record what a step of it communicates. Collective.

        Returns:
            The mesh that it is on, and how far it is from float64 here.

        Raises:
            CuboidError: the layers that should not communicate do, or what is repeated isn't what was recorded.
        """
        whole, alone = self._shard(mesh), self._shard(mesh)
        recording = _recorded(whole)
        error = whole.error()
        _silence(alone.mesh)
        alone.run()
        if alone.error() <= AGREEMENT:
            raise CuboidError(f"mesh {mesh}: without communication everything is as with it, so nothing was left out")
        replay = _Replay(whole.mesh, recording.collectives)
        replay.run()
        if whole.mesh.traffic.snapshot() != recording.snapshot():
            raise CuboidError(
                f"mesh {mesh}: the collectives of a step were recorded, but repeating them sends other bytes"
            )
        made: dict[str, Any] = {WHOLE: whole, COMPUTING: alone, SENDING: replay}
        self._layers.update({key_of(mesh, kind): each for kind, each in made.items()})
        return str(whole.mesh.shape), error

    def step(self, mesh: str, start_s: float) -> Step:
        """As without the clock."""
        self._waiting.take()
        return replace(super().step(mesh, start_s), waited_s=self._waiting.take())

    def _shard(self, mesh: str) -> _Layers:
        model = cuboid.shard(copy.deepcopy(self._model), self._workload.config(mesh, self.network.ranks))
        return _Layers(model, self._workload, self._reference)


def _recorded(layers: _Layers) -> _Recording:
    """Run twice, for the first step may do things once, and tell what the second one communicated."""
    layers.run()
    layers.clear()
    layers.mesh.traffic = recording = _Recording()
    layers.run()
    layers.mesh.traffic = CommCounter()
    return recording


def _silence(mesh: Mesh) -> None:
    """From now on let the mesh's collectives return at once, with anything in their outputs. Collective."""
    silent: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for group in mesh._groups.values():
        if group not in silent:
            ranks = dist.get_process_group_ranks(group)
            silent[group] = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    mesh._groups = {names: silent[group] for names, group in mesh._groups.items()}
