"""The training loop, which every rank runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import cuboid
from cuboid.failures.interrupts import Interrupts
from cuboid.integrations.callbacks import memory_use
from cuboid.integrations.callbacks.metrics_file import MetricsFile
from cuboid.train.data.batches import Blocks, Share, Shuffle, heldout_batches
from cuboid.train.driver import Driver
from cuboid.train.reporting.progress import TrainProgress
from cuboid.train.reporting.report import HeldoutPoint


@dataclass
class History:
    """Records of the run; including the time before it was resumed, unless stated otherwise.

    Attributes:
        losses: of each optimizer step, in nats per token, mean over all replicas; NaN where a resumed run has lost it.
        heldout: held-out losses, the first before any step.
        step_s: seconds of each optimizer step of this process, without evaluations.
        earlier_step_s: mean seconds of a step before the run was resumed; None if it wasn't.
        sent_bytes: bytes that this rank sent in the last optimizer step, by axis of the mesh and to other stages.
        longest_save_s: seconds of this process's longest save of a checkpoint.
        has_begun: whether this process has begun a step.
    """

    losses: list[float] = field(default_factory=list)
    heldout: list[HeldoutPoint] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    earlier_step_s: float | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)
    longest_save_s: float = 0.0
    has_begun: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return len(self.losses)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a step, without the first one, which includes warm-up."""
        counted = self.step_s[1:] or self.step_s
        if counted:
            return sum(counted) / len(counted)
        return self.earlier_step_s or 0.0


@dataclass(frozen=True)
class RunLength:
    """The length of a run, and when it evaluates and saves.

    Attributes:
        steps: optimizer steps.
        evaluations: number of evaluations of the held-out loss after the first step.
        save_every: optimizer steps between checkpoints, with one after the last step too; 0 for none.
        save: writes a checkpoint; collective.
    """

    steps: int
    evaluations: int
    save_every: int
    save: Callable[[History], object]

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate the held-out loss after a step; 0 for before the first."""
        # At the first step at or after each equal fraction of the run.
        return step == 0 or step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps

    def saves_after(self, step: int) -> bool:
        """Whether to write a checkpoint after a step."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.steps)

    def is_reached(self, history: History) -> bool:
        """Whether all steps and the last evaluation are done."""
        return history.step == self.steps and history.heldout[-1].step == self.steps


@dataclass(frozen=True)
class Loop:
    """Trains an engine on one replica's share of the data."""

    engine: Any
    driver: Driver
    interrupts: Interrupts
    #: The training data, and its order.
    blocks: Blocks
    #: int64 ``[blocks, sequence_length]``; and by name, those of other texts to evaluate.
    heldout: Tensor
    evaluated: Mapping[str, Tensor]
    shuffle: Shuffle
    share: Share
    #: Micro-batches of one optimizer step.
    accumulation: int
    #: Of the run; None on all ranks but the first.
    metrics: MetricsFile | None
    #: Seconds of a step at the devices' peak, without recomputation: an MFU of 1. None where that isn't known.
    peak_step_s: float | None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all replicas."""
        return self.share.micro_batch * self.share.replicas * self.accumulation * self.blocks.sequence_length

    def run(self, run_length: RunLength, history: History, progress: TrainProgress) -> None:
        """Train from the end of the history until its length is reached or the ranks agree to stop; collective.

        The held-out loss is evaluated before the first step and then ``run_length.evaluations`` times, the last time at
        the end. The history is extended in place.

        Raises:
            CuboidError: a bad loss ends the run, or a checkpoint can't be written.
        """
        # Before the first step; or, in a resumed run, if it was stopped between a step and the evaluation due after it.
        self._evaluate(run_length, history, progress)
        while history.step < run_length.steps and self.interrupts.stop is None:
            self._step(history)
            self._show(run_length, history, progress)
            if self.interrupts.stop is None:
                self._evaluate(run_length, history, progress)
            if self.interrupts.stop is None and run_length.saves_after(history.step):
                run_length.save(history)

    def _step(self, history: History) -> None:
        started, step = time.perf_counter(), history.step + 1
        history.has_begun = True
        traffic = cuboid.mesh_of(self.engine).comm_counter
        traffic.reset()
        micro_steps = range((step - 1) * self.accumulation, step * self.accumulation)
        loss = self.driver.train(self.blocks.take(self.shuffle.indices(number, self.share)) for number in micro_steps)
        history.losses.append(loss)
        history.step_s.append(time.perf_counter() - started)
        history.sent_bytes = traffic.snapshot()

    def _show(self, run_length: RunLength, history: History, progress: TrainProgress) -> None:
        """Show the last step, and add it to the metrics."""
        loss, memory_bytes = history.losses[-1], memory_use.now_bytes()
        left_s = (run_length.steps - history.step) * history.mean_step_s
        progress.step(history.step, loss, self.tokens_per_step / history.mean_step_s, memory_bytes, left_s)
        if self.metrics is None:
            return
        seconds, norm = history.step_s[-1], self.engine.get_global_grad_norm()
        figures: dict[str, float | None] = {
            "loss": loss,
            "learning_rate": float(self.engine.get_lr()[0]),
            "grad_norm": None if norm is None else float(norm),
            "step_s": seconds,
            "tokens_per_s": self.tokens_per_step / seconds,
            "memory_bytes": memory_bytes,
            "left_s": left_s,
        }
        if self.peak_step_s is not None:
            figures["mfu"] = self.peak_step_s / seconds
        self._record(history.step, figures)

    def _record(self, step: int, figures: dict[str, float | None]) -> None:
        """Add figures to the metrics, and give them to the loggers that the config names (``tensorboard``, …)."""
        if self.metrics is None:
            return
        self.metrics.add(step, figures)
        if self.engine.monitor.enabled:
            known = [(name, value) for name, value in figures.items() if value is not None and math.isfinite(value)]
            # By the number of samples, as DeepSpeed's own figures are.
            samples = self.engine.global_samples
            self.engine.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in known])

    def _evaluate(self, run_length: RunLength, history: History, progress: TrainProgress) -> None:
        """Evaluate the held-out loss if it is due after this step and hasn't been evaluated yet."""
        is_evaluated = bool(history.heldout) and history.heldout[-1].step == history.step
        if run_length.evaluates_after(history.step) and not is_evaluated:
            loss = self.driver.evaluate(heldout_batches(self.heldout, self.share))
            others = {
                name: self.driver.evaluate(heldout_batches(blocks, self.share))
                for name, blocks in self.evaluated.items()
            }
            more = "".join(f", {name} {other:.4f}" for name, other in others.items())
            progress.say(f"held-out loss after {history.step} steps: {loss:.4f}{more}")
            history.heldout.append(HeldoutPoint(step=history.step, loss=loss, others=others))
            self._record(history.step, {"heldout_loss": loss, **{f"{name}_loss": x for name, x in others.items()}})
