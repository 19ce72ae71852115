"""What a rank keeps: every contestant, made from one model that all ranks share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from network.layer_rank import Step
from network.networks import Network
from network.rate import Link, sleep_until
from transformers import LlamaForCausalLM

from whole_step.contestant import Contestant
from whole_step.engines import AutoTpStep, MeshStep
from whole_step.entries import Entry
from whole_step.loops import FullyShardedStep, TpPlanStep
from whole_step.workload import StepWorkload


@dataclass(frozen=True)
class FirstSteps:
    """What a contestant computed at first on one rank.

    Args:
        losses: of the rank's rows, before and after a step.
        gradient_norm: of the first step.
    """

    losses: tuple[float, float]
    gradient_norm: float


class StepRank(Link):
    """One rank of all contestants.

    Args:
        network: where it is.
        workload: what is trained.
        model: whole, in float32; stays as it is.
        folder: a checkpoint of the model.
    """

    def __init__(self, network: Network, workload: StepWorkload, model: LlamaForCausalLM, folder: Path) -> None:
        super().__init__(network)
        self._workload, self._model, self._folder = workload, model, folder
        self._contestants: dict[str, Contestant] = {}

    def prepare(self, entry: Entry) -> FirstSteps:
        """Build a contestant and have it take two steps, which also connects its process groups. Collective."""
        contestant = self._contestants[entry.key] = self._build(entry)
        first, second = (contestant.step(tell_norm=True) for _ in range(2))
        assert first.gradient_norm is not None
        return FirstSteps((first.loss.item(), second.loss.item()), float(first.gradient_norm))

    def _build(self, entry: Entry) -> Contestant:
        if entry.family == "cuboid":
            return MeshStep(entry, self._workload, self._model)
        if entry.family == "autotp":
            return AutoTpStep(entry, self._workload, self._model)
        if entry.family == "tp_plan":
            return TpPlanStep(self._workload, self._folder)
        return FullyShardedStep(entry, self._workload, self._model)

    def step(self, key: str, start_s: float) -> Step:
        """One training step, beginning at a time that all ranks are told. Collective."""
        contestant = self._contestants[key]
        before, computing_s = self.network.sent_bytes(), time.process_time()
        sleep_until(start_s)
        contestant.step()
        duration_s = time.perf_counter() - start_s
        computing_s = time.process_time() - computing_s
        after = self.network.sent_bytes()
        carried = None if before is None or after is None else after - before
        return Step(duration_s, computing_s, *contestant.sent(), carried)
