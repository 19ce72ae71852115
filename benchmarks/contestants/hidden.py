"""Three things that are measured in turn: a step of layers, its computing alone, and its communication alone."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.watch import pin
from network.networks import Network
from network.rate import Link
from network.serving import Contestant

# Registers the backend whose collectives return at once.
from torch.testing._internal.distributed import fake_pg  # noqa: F401
from transformers import LlamaForCausalLM

from contestants.layer import AGREEMENT, LayerWorkload, Reference, ShardedLayers
from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import all_gather, all_reduce, reduce_scatter
from cuboid.distributed.comm_counter import Operation
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis
from cuboid.errors import CuboidError

#: What is measured of a mesh.
STEP, COMPUTING, COMMUNICATION = KINDS = ("step", "computing", "communication")
_ELEMENT_BYTES = 4
_COLLECTIVES: dict[Operation, Callable[..., torch.Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


@dataclass(frozen=True)
class Call:
    """One collective of a step; ``whole_bytes`` is of the tensor that isn't split."""

    operation: Operation
    axes: tuple[Axis, ...]
    whole_bytes: int

    def given(self, mesh: Mesh) -> torch.Tensor:
        """Zeros of the size that a rank gives to the collective."""
        elements, ranks = self.whole_bytes // _ELEMENT_BYTES, mesh.size(*self.axes)
        if self.operation == "reduce_scatter":
            return torch.zeros(ranks, elements // ranks)
        return torch.zeros(elements // ranks if self.operation == "all_gather" else elements)


class _Recorded(Counter[tuple[Operation, int]]):
    """Stands for what an :class:`AxisGroup` counts with, and notes each collective in the order of all groups."""

    def __init__(self, axes: tuple[Axis, ...], calls: list[Call]) -> None:
        super().__init__()
        self._axes, self._calls = axes, calls

    def __setitem__(self, key: tuple[Operation, int], count: int) -> None:
        super().__setitem__(key, count)
        self._calls.append(Call(key[0], self._axes, key[1]))


class Replay(Contestant):
    """The collectives of a step, one after another, and nothing of what it computes."""

    def __init__(self, mesh: Mesh, calls: Sequence[Call]) -> None:
        self.mesh, self._calls = mesh, calls
        self._buffers = {call: call.given(mesh) for call in calls}

    def begin(self) -> None:
        self.mesh.comm_counter.reset()

    def step(self) -> None:
        for call in self._calls:
            _COLLECTIVES[call.operation](self._buffers[call], self.mesh.along(*call.axes))

    def figures(self) -> dict[str, Any]:
        return {"sent_bytes": sum(self.mesh.comm_counter.snapshot().values()), "calls": self.mesh.comm_counter.calls()}


class HiddenRank(Link):
    """What a rank keeps: for each mesh the layers, the layers without communication, and communication without them;
    each by the pair of mesh and kind."""

    def __init__(
        self, network: Network, workload: LayerWorkload, model: LlamaForCausalLM, reference: Reference
    ) -> None:
        super().__init__(network, lambda mesh: ShardedLayers(workload, model, reference, mesh))
        if network.ranks <= (os.cpu_count() or 1):
            pin(dist.get_rank())
        # What a collective that does nothing leaves in a buffer may be numbers that take many times as long.
        torch.set_flush_denormal(True)
        self._waited_s = 0.0
        _time_waiting(self._add)

    def _add(self, seconds: float) -> None:
        self._waited_s += seconds

    def prepare(self, mesh: Hashable) -> tuple[str, float]:
        """Shard the model twice, and record what a step of it communicates. Collective.

        Returns:
            The mesh that it is, and how far it is from float64 here.

        Raises:
            CuboidError: the layers that should not communicate do, or what is repeated isn't what was recorded.
        """
        whole, alone = self._build(mesh), self._build(mesh)
        whole.step()
        # The first step may do things once.
        whole.begin()
        calls = _record(whole.mesh, whole.step)
        error = whole.error()
        _silence(alone.mesh)
        alone.step()
        if alone.error() <= AGREEMENT:
            raise CuboidError(f"mesh {mesh}: without communication everything is as with it, so nothing was left out")
        whole.begin()
        whole.step()
        sent = whole.mesh.comm_counter.snapshot()
        replay = Replay(whole.mesh, calls)
        replay.begin()
        replay.step()
        if whole.mesh.comm_counter.snapshot() != sent:
            raise CuboidError(f"mesh {mesh}: a step's collectives were recorded, but repeating them sends other bytes")
        self.kept.update({(mesh, kind): own for kind, own in zip(KINDS, (whole, alone, replay), strict=True)})
        return str(whole.mesh.shape), error

    def step(self, entry: Hashable, start_s: float) -> Any:
        """As every rank's, with how long it waited for messages among the figures."""
        self._waited_s = 0.0
        step = super().step(entry, start_s)
        step.figures["waited_s"] = self._waited_s
        return step


def _record(mesh: Mesh, step: Callable[[], None]) -> list[Call]:
    """The collectives of a step, in their order."""
    calls: list[Call] = []
    counted = {along: along.counted for along in mesh._along.values()}
    for along in counted:
        along.counted = _Recorded(along.axes, calls)
    step()
    for along, before in counted.items():
        along.counted = before
    return calls


def _time_waiting(add: Callable[[float], None]) -> None:
    """From now on, call ``add`` with the seconds of each wait of this process for a message."""
    wait = AsyncResult.wait

    def timed(pending: AsyncResult[object]) -> object:
        start_s = time.perf_counter()
        for work in pending._works:
            if work is not None:
                work.wait()
        # What is left to do on this side is computing.
        add(time.perf_counter() - start_s)
        pending._works = ()
        return wait(pending)

    AsyncResult.wait = timed  # type: ignore[method-assign, assignment]


def _silence(mesh: Mesh) -> None:
    """From now on let the mesh's collectives return at once, with anything in their outputs. Collective."""
    silent: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for group in mesh._groups.values():
        if group not in silent:
            ranks = dist.get_process_group_ranks(group)
            silent[group] = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    mesh._groups = {names: silent[group] for names, group in mesh._groups.items()}
    for along in mesh._along.values():
        along.connect(mesh._groups)
