"""One rank's part: a stage of every contestant."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from network.networks import Network
from network.rate import Link, sleep_until

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.models.pipeline.pipeline import open_channels
from cuboid.seq1f1b.runtime.profiler import Profiler
from cuboid.seq1f1b.schedule.simulator import Span
from emulated.entries import Contestant, Entry
from emulated.work import Work


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Args:
        duration_s: since the start that all ranks were told.
        computing_s: processor time of all of the rank's threads.
        loss: of the step, on the last stage; 0 elsewhere.
        squares: sum of the squared elements of this stage's gradients.
        spans: what the stage did when, on the machine's clock.
    """

    duration_s: float
    computing_s: float
    loss: float
    squares: float
    spans: tuple[Span, ...]


class StageRank(Link):
    """What a rank keeps: its stage of each contestant that was built."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        mesh = Mesh(MeshShape(), pipe=network.ranks)
        mesh.connect()
        self._stage = mesh.coordinate.pipe
        self._channels = open_channels(mesh, torch.device("cpu"))
        self._built: dict[Entry, Contestant] = {}
        self._squares = 0.0

    def build(self, entry: Entry, work: Work) -> None:
        """Set up a contestant. Collective."""
        contestant = self._built[entry] = entry.build(work, self._stage, self._channels)
        parameters = [p for group in contestant.optimizer.param_groups for p in group["params"]]

        def note(*_: object) -> None:
            self._squares = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)

        contestant.optimizer.register_step_pre_hook(note)

    def step(self, entry: Entry, start_s: float) -> Step:
        """One step, beginning at a time that all ranks are told. Collective."""
        recorder = Profiler(torch.device("cpu"))
        computing_s = time.process_time()
        sleep_until(start_s)
        loss = self._built[entry].step(recorder)
        duration_s = time.perf_counter() - start_s
        computing_s = time.process_time() - computing_s
        spans = (Span(action, *times_s) for action, times_s in zip(*recorder.times_s(), strict=True))
        return Step(duration_s, computing_s, loss, self._squares, tuple(spans))

    def close_all(self) -> None:
        """Let go of every contestant."""
        for contestant in self._built.values():
            contestant.close()
        self._built.clear()
