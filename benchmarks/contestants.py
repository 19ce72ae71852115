"""The pipelines that are compared, behind one door each: build, step, and what has to be known to measure them.

A step is the forward and backward of M micro-batches and one step of plain SGD, in all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workload import PlainStage, Workload, token_loss

import cuboid
from cuboid.seq1f1b.runtime.memory import MeteredPool
from cuboid.seq1f1b.schedule.simulator import Timeline
from cuboid.seq1f1b.schedule.timeline_trace import read_chrome_trace
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_LEARNING_RATE = 1e-4
#: Counted from 1; the first one warms up.
_TRACED_STEP = 2


class Contestant(Protocol):
    """One pipeline on this rank, for one number of micro-batches."""

    optimizer: torch.optim.Optimizer
    #: Of the key/value stores, where there are any.
    pool: MeteredPool | None
    #: Whether there will be a timeline.
    records_itself: bool

    def step(self) -> torch.Tensor | None:
        """Train on the workload's batch; the mean loss on the last stage, anything elsewhere."""

    def timeline(self) -> Timeline | None:
        """What was measured of the second step, where the pipeline measures itself; on the first rank."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass(frozen=True)
class Entry:
    """Which pipeline takes part.

    Args:
        kind: "cuboid", "deepspeed" or "torch".
        segments: k; 1 for all but Cuboid.
        partition: where Cuboid cuts sequences.
    """

    kind: str
    segments: int = 1
    partition: str = "flops"

    @property
    def name(self) -> str:
        """As it stands in tables."""
        if self.kind == "cuboid":
            cut = f", {self.partition} cut" if self.segments > 1 else ""
            return f"Cuboid seq1f1b, k={self.segments}{cut}"
        return {"deepspeed": "DeepSpeed PipelineEngine", "torch": "torch.distributed.pipelining 1F1B"}[self.kind]

    def build(self, workload: Workload, micro_batches: int, traces: Path) -> Contestant:
        """Set up the pipeline. All ranks must call."""
        if self.kind == "cuboid":
            return _Cuboid(self, workload, micro_batches, traces)
        return _DeepSpeed(workload, micro_batches) if self.kind == "deepspeed" else _Torch(workload, micro_batches)


def entries(segments: list[int]) -> list[Entry]:
    """Everyone: the two peers, and Cuboid with each number of segments and both cuts."""
    ours = [Entry("cuboid", k, cut) for k in segments for cut in (("flops", "even") if k > 1 else ("flops",))]
    return [Entry("torch"), Entry("deepspeed"), *ours]


class _Torch:
    pool: MeteredPool | None = None
    records_itself = False

    def __init__(self, workload: Workload, micro_batches: int) -> None:
        rank = dist.get_rank()
        self._module = PlainStage(workload.model(), rank, workload.stages)
        stage = PipelineStage(self._module, rank, workload.stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=token_loss)
        self._ids, self._labels = workload.batch(micro_batches)
        self._is_first, self._is_last = rank == 0, rank == workload.stages - 1
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self._module.parameters(), lr=_LEARNING_RATE)

    def step(self) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        if self._is_last:
            self._schedule.step(target=self._labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*([self._ids] if self._is_first else []), return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean() if self._is_last else None

    def timeline(self) -> Timeline | None:
        return None

    def close(self) -> None:
        del self._schedule, self._module


class _DeepSpeed:
    pool: MeteredPool | None = None
    records_itself = False

    def __init__(self, workload: Workload, micro_batches: int) -> None:
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and point-to-point messages don't use it
        deepspeed.init_distributed()
        whole = workload.model()
        module = PipelineModule(
            [PlainStage(whole, stage, workload.stages) for stage in range(workload.stages)],
            num_stages=workload.stages,
            loss_fn=token_loss,
            partition_method="uniform",
        )
        self._engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=_deepspeed_config(micro_batches)
        )
        self._batches = _micro_batches(workload, micro_batches)
        self.optimizer: torch.optim.Optimizer = self._engine.optimizer

    def step(self) -> torch.Tensor | None:
        loss: torch.Tensor = self._engine.train_batch(self._batches)
        return loss

    def timeline(self) -> Timeline | None:
        return None

    def close(self) -> None:
        self._engine.destroy()
        del self._engine


class _Cuboid:
    records_itself = True

    def __init__(self, entry: Entry, workload: Workload, micro_batches: int, traces: Path) -> None:
        self._trace = traces / f"m{micro_batches}_k{entry.segments}_{entry.partition}"
        pipeline = {
            "engine": "seq1f1b",
            "stages": workload.stages,
            "segments": entry.segments,
            "partition": entry.partition,
            "stage_balance": list(workload.balance),
            "trace": str(self._trace),
            "trace_step": _TRACED_STEP,
        }
        config = {**_deepspeed_config(micro_batches), "pipeline": pipeline}
        model = cuboid.shard(workload.model(), config)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        self.pool: MeteredPool | None = MeteredPool()
        self._engine.pipeline.pool = self.pool
        self._batches = (
            {"input_ids": ids, "shift_labels": labels} for ids, labels in _micro_batches(workload, micro_batches)
        )
        self.optimizer: torch.optim.Optimizer = self._engine.optimizer

    def step(self) -> torch.Tensor | None:
        loss: torch.Tensor = self._engine.train_batch(self._batches)
        return loss

    def timeline(self) -> Timeline | None:
        return read_chrome_trace(self._trace / f"step_{_TRACED_STEP}.json") if dist.get_rank() == 0 else None

    def close(self) -> None:
        self._engine.destroy()
        del self._engine


def _deepspeed_config(micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": _LEARNING_RATE}},
        "gradient_clipping": 0.0,  # it would clip at 1 by default
        "steps_per_print": 10**9,
    }


def _micro_batches(workload: Workload, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The workload's batch over and over, as pairs of ids ``[1, S]`` and labels ``[1, S]``."""
    return itertools.cycle(zip(*(rows.split(1) for rows in workload.batch(count)), strict=True))
