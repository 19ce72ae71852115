"""Who takes part, and what each has to be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cuboid.seq1f1b.runtime.profiler import Profiler
from emulated.ours import Channels, CuboidPipeline
from emulated.peers import DeepSpeedPipeline, TorchPipeline
from emulated.work import Work


class Contestant(Protocol):
    """One pipeline on this rank."""

    optimizer: torch.optim.Optimizer

    def step(self, recorder: Profiler) -> float:
        """Forward and backward of all micro-batches, and a step of SGD, whose rate is zero: each step does the same.

        Args:
            recorder: sees each unit.

        Returns:
            The mean loss on the last stage, 0 elsewhere.
        """

    def close(self) -> None:
        """Let go of everything."""


@dataclass(frozen=True)
class Entry:
    """Which pipeline takes part.

    Args:
        kind: "cuboid", "deepspeed" or "torch".
        schedule: a name in :data:`~cuboid.seq1f1b.schedule.schedules.SCHEDULES`; the peers have "1f1b".
        segments: k; 1 for all but "seq1f1b".
        partition: where sequences are cut, "flops" or "even".
    """

    kind: str
    schedule: str = "1f1b"
    segments: int = 1
    partition: str = "flops"

    @property
    def name(self) -> str:
        """As it stands in tables."""
        if self.kind != "cuboid":
            return {"deepspeed": "DeepSpeed PipelineEngine", "torch": "torch.distributed.pipelining 1F1B"}[self.kind]
        cut = f", k={self.segments}, {self.partition} cut" if self.segments > 1 else ""
        return f"Cuboid {self.schedule}{cut}"

    def build(self, work: Work, stage: int, channels: Channels) -> Contestant:
        """Set up the pipeline. All ranks must call.

        Args:
            work: what it does.
            stage: this rank's.
            channels: this rank's, for Cuboid's.
        """
        if self.kind == "cuboid":
            return CuboidPipeline(work, self.schedule, self.lengths(work), stage, channels)
        return DeepSpeedPipeline(work, stage) if self.kind == "deepspeed" else TorchPipeline(work, stage)

    def lengths(self, work: Work) -> tuple[int, ...]:
        """Tokens of each segment."""
        return work.lengths(self.segments, self.partition)

    def refusal(self, work: Work) -> str | None:
        """Why this pipeline can't do this work; None if it can."""
        if self.kind == "torch" and work.micro_batches < work.stages:
            return (
                f"torch's Schedule1F1B refuses {work.micro_batches} micro-batches on {work.stages} stages: it wants "
                "no fewer micro-batches than stages."
            )
        return None


#: Whom every contestant is compared with.
YARDSTICKS = {"own_1f1b": Entry("cuboid"), "torch": Entry("torch"), "deepspeed": Entry("deepspeed")}


def entries(segments: Sequence[int]) -> list[Entry]:
    """Everyone: Cuboid with whole sequences, with each number of segments and both cuts, and the peers."""
    cuts = [Entry("cuboid", "seq1f1b", k, cut) for k in segments for cut in ("flops", "even")]
    return [Entry("cuboid", "gpipe"), *YARDSTICKS.values(), *cuts]
