"""The training loop, which every rank runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cuboid
from cuboid.data.batches import Share, heldout_batches, label_count, micro_batch
from cuboid.distributed.collectives import sum_over_ranks
from cuboid.distributed.mesh import current_world_size
from cuboid.failures.interrupts import Interrupts
from cuboid.integrations.callbacks.metrics_file import MetricsFile
from cuboid.integrations.callbacks.progress import TrainProgress
from cuboid.integrations.callbacks.step_times import StepTimes
from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.integrations.deepspeed.pipeline_engine import CuboidPipelineEngine
from cuboid.integrations.deepspeed.training_step import evaluate, train_step
from cuboid.integrations.loss_mean import LossMean
from cuboid.integrations.run_report.schema import HeldoutPoint
from cuboid.train.training_data import TrainingData


@dataclass
class History:
    """Records of the run; including the time before it was resumed, unless stated otherwise.

    Attributes:
        losses: of each optimizer step, in nats per token, mean over all replicas; NaN where a resumed run has lost it.
        heldout: held-out losses, the first before any step.
        times: of the steps of this process.
        sent_bytes: bytes that this rank sent in the last optimizer step, by axis of the mesh and to other stages.
    """

    losses: list[float] = field(default_factory=list)
    heldout: list[HeldoutPoint] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return len(self.losses)


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

    engine: CuboidEngine
    interrupts: Interrupts
    data: TrainingData
    share: Share
    #: Micro-batches of one optimizer step.
    accumulation: int
    #: Of the run, which the first rank writes.
    metrics: MetricsFile
    #: Of a step's forwards and backwards, and FLOP/s of all devices together; None where that isn't known.
    step_flops: float | None
    peak_flops: float | None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all replicas."""
        return self.share.micro_batch * self.share.replicas * self.accumulation * self.data.heldout.shape[1]

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
        step = history.step + 1
        history.times.begin()
        traffic = cuboid.mesh_of(self.engine).comm_counter
        traffic.reset()
        micro_steps = range((step - 1) * self.accumulation, step * self.accumulation)
        batches = [micro_batch(self.data.mixture.rows(number, self.share)) for number in micro_steps]
        if self.data.has_unlearned:
            self._count_alike(batches)
        mean = LossMean(self.engine.device)
        mean.add(train_step(self.engine, iter(batches)), 1)
        history.losses.append(self._agreed(mean))
        history.times.end()
        history.sent_bytes = traffic.snapshot()

    def _count_alike(self, batches: list[dict[str, Any]]) -> None:
        """Let each label of the step count alike, however many there are in a micro-batch; collective.

        The engine takes the mean over micro-batches and replicas, so that each is divided by their mean number of
        labels. A pipeline counts them itself.
        """
        if isinstance(self.engine, CuboidPipelineEngine):
            return
        labels = sum(label_count(batch["labels"]) for batch in batches)
        (of_ranks,) = sum_over_ranks([labels], self.engine.device)
        mean = max(of_ranks, 1.0) / (current_world_size() * len(batches))
        items = torch.tensor(mean, dtype=torch.float64)
        for batch in batches:
            batch["num_items_in_batch"] = items

    def _agreed(self, mean: LossMean) -> float:
        """A mean over all ranks, which in the same all-reduce agree on whether to stop; collective."""
        loss, votes = mean.over_ranks(self.interrupts.own())
        self.interrupts.agree(votes)
        return loss

    def _show(self, run_length: RunLength, history: History, progress: TrainProgress) -> None:
        """Show the last step, and add it to the metrics."""
        loss, tokens = history.losses[-1], self.tokens_per_step
        rates = history.times.rates(
            run_length.steps - history.step, tokens=tokens, flops=self.step_flops, peak_flops=self.peak_flops
        )
        memory_bytes, left_s = int(rates["memory_bytes"]), rates["left_s"]
        progress.step(history.step, loss, tokens / history.times.mean_s, memory_bytes, left_s)
        if self.metrics.is_written:
            norm = self.engine.get_global_grad_norm()
            figures = {
                "loss": loss,
                "learning_rate": float(self.engine.get_lr()[0]),
                "grad_norm": None if norm is None else float(norm),
            }
            self._record(history.step, {**figures, **rates})

    def _record(self, step: int, figures: dict[str, float | None]) -> None:
        """Add figures to the metrics, and give them to the loggers that the config names (``tensorboard``, …)."""
        self.metrics.add(step, figures)
        if self.metrics.is_written and self.engine.monitor.enabled:
            known = [(name, value) for name, value in figures.items() if value is not None and math.isfinite(value)]
            # By the number of samples, as DeepSpeed's own figures are.
            samples = self.engine.global_samples
            self.engine.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in known])

    def _evaluate(self, run_length: RunLength, history: History, progress: TrainProgress) -> None:
        """Evaluate the held-out loss if it is due after this step and hasn't been evaluated yet."""
        is_evaluated = bool(history.heldout) and history.heldout[-1].step == history.step
        if run_length.evaluates_after(history.step) and not is_evaluated:
            loss = self._heldout_loss(self.data.heldout)
            others = {name: self._heldout_loss(blocks) for name, blocks in self.data.evaluated.items()}
            more = "".join(f", {name} {other:.4f}" for name, other in others.items())
            progress.say(f"held-out loss after {history.step} steps: {loss:.4f}{more}")
            history.heldout.append(HeldoutPoint(step=history.step, loss=loss, others=others))
            self._record(history.step, {"heldout_loss": loss, **{f"{name}_loss": x for name, x in others.items()}})

    def _heldout_loss(self, blocks: Tensor) -> float:
        """The mean loss per predicted token of some blocks, of which each replica evaluates its share; collective."""
        batches = heldout_batches(blocks, self.share)
        inputs = (({"input_ids": batch.input_ids, "labels": batch.labels}, batch.tokens) for batch in batches)
        return self._agreed(evaluate(self.engine, inputs))
