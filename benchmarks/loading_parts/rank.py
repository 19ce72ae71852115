"""One process of a load: loads once, says what that took, and whether the model is right."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from loading_parts.checkpoint import LoadingWorkload
from loading_parts.footprint import Footprint, Watched
from loading_parts.loaders import Way, loss_and_norm, touch, ways


@dataclass(frozen=True)
class Load:
    """What one rank saw of a load.

    Args:
        duration_s: until its model was there, and each weight had been read once.
        computing_s: processor time meanwhile.
        all_computing_s: with that of meeting the others before and of looking at the memory afterwards, which can take
            as long as a load.
        footprint: its memory.
    """

    duration_s: float
    computing_s: float
    all_computing_s: float
    footprint: Footprint


class LoadingRank:
    """Loads a checkpoint in one way; lives for one load.

    Args:
        workload: for the batch of the check.
        checkpoint: its folder.
        name: of the way.
    """

    def __init__(self, workload: LoadingWorkload, checkpoint: Path, name: str) -> None:
        self._workload, self._checkpoint = workload, checkpoint
        self._way = ways(dist.get_world_size())[name]
        self._model: PreTrainedModel | None = None

    def load(self) -> Load:
        """Once."""
        begin_s = time.process_time()
        dist.barrier()
        computing_s, start_s = time.process_time(), time.perf_counter()
        with Watched() as watched:
            self._model = self._way.load(self._checkpoint)
            touch(self._model)
            duration_s, computing_s = time.perf_counter() - start_s, time.process_time() - computing_s
            # Until then, what the last one broadcasts isn't done.
            dist.barrier()
        return Load(duration_s, computing_s, time.process_time() - begin_s, watched.footprint)

    def check(self) -> tuple[float, float]:
        """Loss and gradient norm of the loaded model."""
        assert self._model is not None
        return loss_and_norm(self._model.train(), self._workload.tokens(), self._way)


class PlainRank:
    """What the loaded models must compute: plain transformers in one process."""

    def __init__(self, workload: LoadingWorkload, checkpoint: Path) -> None:
        self._workload, self._checkpoint = workload, checkpoint

    def check(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        model = AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype=torch.float32)
        way = Way("plain", AutoModelForCausalLM.from_pretrained)
        return loss_and_norm(model.train(), self._workload.tokens(), way)
