"""The training loop: micro-batches in, losses out. Every rank runs it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import cuboid
from cuboid import CuboidError
from cuboid.train import memory
from cuboid.train.batches import Blocks, Share, Shuffle, heldout_batches
from cuboid.train.driver import Driver
from cuboid.train.progress import TrainProgress
from cuboid.train.report import HeldoutPoint


@dataclass
class History:
    """What the loop notes down.

    Attributes:
        losses: of each optimizer step, nats per token, mean over all replicas.
        heldout: held-out losses, the first before any step.
        step_s: seconds of each optimizer step, evaluations not counted.
        sent_bytes: bytes that this rank sent in the last optimizer step, by axis of the mesh and to other stages.
    """

    losses: list[float] = field(default_factory=list)
    heldout: list[HeldoutPoint] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def mean_step_s(self) -> float:
        """Seconds of a step, without the first, which warms up."""
        counted = self.step_s[1:] or self.step_s
        return sum(counted) / len(counted)


@dataclass(frozen=True)
class Loop:
    """Trains an engine on one replica's share of the data.

    Attributes:
        engine: what ``deepspeed.initialize`` returned.
        driver: of the engine.
        blocks: the training data.
        heldout: the held-out blocks, int64 ``[blocks, sequence_length]``.
        shuffle: the order of the training data.
        share: this replica's part.
        accumulation: micro-batches of one optimizer step.
    """

    engine: Any
    driver: Driver
    blocks: Blocks
    heldout: Tensor
    shuffle: Shuffle
    share: Share
    accumulation: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all replicas."""
        return self.share.micro_batch * self.share.replicas * self.accumulation * self.blocks.sequence_length

    def run(self, steps: int, evaluations: int, progress: TrainProgress) -> History:
        """Train for ``steps`` optimizer steps; collective.

        The held-out loss is taken before the first step and then ``evaluations`` times, the last at the end.

        Raises:
            CuboidError: the loss is no longer a finite number.
        """
        history = History()
        history.heldout.append(self._evaluate(0, progress))
        for step in range(1, steps + 1):
            self._step(step, history)
            progress.step(step, history.losses[-1], self.tokens_per_step / history.mean_step_s, memory.now_bytes())
            if step * evaluations // steps > (step - 1) * evaluations // steps:
                history.heldout.append(self._evaluate(step, progress))
        return history

    def _step(self, step: int, history: History) -> None:
        started = time.perf_counter()
        traffic = cuboid.mesh_of(self.engine).traffic
        traffic.reset()
        micro_steps = range((step - 1) * self.accumulation, step * self.accumulation)
        history.losses.append(
            self.driver.train(self.blocks.take(self.shuffle.indices(number, self.share)) for number in micro_steps)
        )
        history.step_s.append(time.perf_counter() - started)
        history.sent_bytes = traffic.snapshot()
        if not math.isfinite(history.losses[-1]):
            raise CuboidError(
                f"the loss is {history.losses[-1]} at step {step}; a lower learning rate, a longer warm-up, "
                "or gradient clipping may help"
            )

    def _evaluate(self, step: int, progress: TrainProgress) -> HeldoutPoint:
        """Mean loss per token over all held-out blocks, the same on every rank."""
        loss = self.driver.evaluate(heldout_batches(self.heldout, self.share))
        progress.say(f"held-out loss after {step} steps: {loss:.4f}")
        return HeldoutPoint(step=step, loss=loss)
