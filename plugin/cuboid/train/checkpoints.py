"""The record of a run: its losses, when it is evaluated, its checkpoints, and how it is resumed from them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

import cuboid
from cuboid.checkpoint.run_lock import RunLock
from cuboid.data.training_data import TrainingData
from cuboid.errors import CheckpointError, DamagedCheckpointError
from cuboid.integrations.callbacks.interrupt import InterruptCallback
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.callbacks.metrics import MetricsCallback
from cuboid.integrations.callbacks.metrics_file import METRICS, digest_of, evaluation_losses, read_losses
from cuboid.integrations.callbacks.progress import RunProgressCallback
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback
from cuboid.integrations.callbacks.training_engine import engine_of
from cuboid.integrations.run_report.schema import HeldoutPoint
from cuboid.train.job import TrainJob
from cuboid.train.resume import Resumed, RunState, find_run, with_remedy
from cuboid.train.run_folder import CHECKPOINTS
from cuboid.train.trainer_args import names_optimizer, names_schedule, trained_by


@dataclass(frozen=True)
class RunLength:
    """The length of a run, and when it evaluates and saves.

    Attributes:
        steps: optimizer steps.
        evaluations: number of evaluations of the held-out loss after the first step.
        save_every: optimizer steps between checkpoints, with one after the last step too; 0 for none.
    """

    steps: int
    evaluations: int
    save_every: int

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate the held-out loss after a step; 0 for before the first."""
        # At the first step at or after each equal fraction of the run.
        return step == 0 or step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps

    def saves_after(self, step: int) -> bool:
        """Whether to write a checkpoint after a step."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.steps)

    def is_reached(self, step: int, heldout: Sequence[HeldoutPoint]) -> bool:
        """Whether all steps and the last evaluation are done."""
        return step == self.steps and heldout[-1].step == step


class RunCheckpoints(TimedCallback):
    """Keeps a run's record, and writes and reads its checkpoints. The first of the run's callbacks.

    A checkpoint that is due is written before the next step, or at the end of the training: only then the step's loss
    is in the record, and its evaluation made.

    Args:
        job, data: of the run.
        global_batch: sequences of one optimizer step, over all ranks.
        started: when this process began, by ``time.perf_counter``.
        lock: on the run's folder; None on all ranks but the first.
        progress, metrics, guard, interrupt: the run's other callbacks.

    Attributes:
        losses: of each optimizer step, in nats per token, mean over all replicas; NaN where a resumed run has lost it.
        heldout: held-out losses, the first before any step.
        times: of the steps of this process.
        sent_bytes: bytes that this rank sent in the last optimizer step, by axis of the mesh and to other stages.
        latest: the checkpoint to go on from if the run is stopped; None if there was nothing to save, or it could not
            be written.
    """

    def __init__(
        self,
        job: TrainJob,
        data: TrainingData,
        global_batch: int,
        started: float,
        lock: RunLock | None,
        *,
        progress: RunProgressCallback,
        metrics: MetricsCallback,
        guard: LossGuardCallback,
        interrupt: InterruptCallback,
    ) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.heldout: list[HeldoutPoint] = []
        self.sent_bytes: dict[str, int] = {}
        self.latest: Path | None = None
        self._job, self._data, self._global_batch, self._started, self._lock = job, data, global_batch, started, lock
        self._progress, self._metrics, self._guard, self._interrupt = progress, metrics, guard, interrupt
        self._resumed = job.resumed
        self._length = RunLength(job.steps, job.options.evaluations, job.options.save_every or 0)
        self._is_due = False
        self._engine: Any = None
        self._trainer: Any = None

    @property
    def times(self) -> StepTimes:
        """The clock of this process's steps."""
        return self._times

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return len(self.losses)

    @property
    def is_finished(self) -> bool:
        """Whether all steps and the last evaluation are done."""
        return self._length.is_reached(self.step, self.heldout)

    @property
    def resumed_after(self) -> list[int]:
        """The steps after which the run was resumed, by this process or earlier ones."""
        if self._resumed is None:
            return []
        return list(dict.fromkeys([*self._resumed.state.resumed_after, self._resumed.state.step]))

    @property
    def wall_s(self) -> float:
        """Seconds of the run so far, including earlier processes."""
        earlier = 0.0 if self._resumed is None else self._resumed.state.wall_s
        return earlier + time.perf_counter() - self._started

    def begin(self, trainer: Any) -> None:
        """Let a trainer that has made its engine go on from the checkpoint to resume from, if any; collective.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model or optimizer.
        """
        self._trainer, self._engine = trainer, engine_of(trainer.model)
        if self._job.config.get("scheduler") is None and not names_schedule(self._job.trainer_args):
            # The Trainer's constant rate needs no steps, and no place in checkpoints.
            self._engine.lr_scheduler = None
        if self._resumed is not None:
            self._restore(self._resumed, trainer)
        elif self._job.options.resume:
            self._progress.say(f"nothing to resume from in {self._job.options.out}; beginning a new run")
        # Before the first step; or, in a resumed run, if it was stopped between a step and the evaluation due after it.
        is_evaluated = bool(self.heldout) and self.heldout[-1].step == self.step
        self._metrics.is_evaluated = is_evaluated
        trainer.args.eval_on_start = self._length.evaluates_after(self.step) and not is_evaluated

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the checkpoint that is due after the last step, and note when this one begins."""
        if self._is_due:
            self._save()
        cuboid.mesh_of(self._engine).comm_counter.reset()
        super().on_step_begin(args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Note what the step took, and say what is due after it."""
        super().on_step_end(args, state, control, **kwargs)
        self.sent_bytes = cuboid.mesh_of(self._engine).comm_counter.snapshot()
        # The Trainer would count the steps of this process alone.
        state.epoch = state.global_step * self._global_batch / self._data.mixture.blocks
        control.should_evaluate = self._length.evaluates_after(state.global_step)
        self._is_due = self._length.saves_after(state.global_step)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the loss of a step."""
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])
            # It grows by a dict each step, on each rank.
            state.log_history.clear()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the losses of an evaluation."""
        loss, *others = evaluation_losses(metrics or {}).values()
        self.heldout.append(
            HeldoutPoint(step=state.global_step, loss=loss, others=dict(zip(self._data.evaluated, others, strict=True)))
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last checkpoint, unless the run was stopped after no step."""
        is_stopped = self._interrupt.stopped_by is not None and not self.is_finished
        if self.step > (0 if self._resumed is None else self._resumed.state.step) and (self._is_due or is_stopped):
            self._save()

    def check_lock(self) -> None:
        """Raise an error on the first rank if another run has taken over the run's folder."""
        if self._lock is not None:
            self._lock.check()

    def _restore(self, resumed: Resumed, trainer: Any) -> None:
        try:
            self._engine.load_checkpoint(resumed.path)
        except DamagedCheckpointError as error:
            if self._job.options.resume_if_any and error.intact is not None:
                self._progress.say(f"{error}. Resuming from that one")
                earlier = find_run(self._job.options.out, error.intact.name)
                resumed.check_same_run(earlier)
                self._restore(earlier, trainer)
                return
            raise CheckpointError(f"--resume can't resume from a damaged checkpoint: {with_remedy(error)}") from error
        state, self._resumed, self.latest = resumed.state, resumed, resumed.path
        if names_optimizer(self._job.trainer_args):
            trainer.restore_schedule(self._engine)
        self._progress.say(f"going on after step {state.step} of {self._job.steps}, from {resumed.path}")
        self.losses, self.heldout = self._losses_before(state), list(state.heldout_losses)
        self._times = StepTimes(state.step_s)
        trainer.state.global_step = state.step
        if state.loss_guard is not None:
            trainer.state.stateful_callbacks[LossGuardCallback.__name__] = {"attributes": state.loss_guard}

    def _losses_before(self, state: RunState) -> list[float]:
        """The loss of each step until the checkpoint; NaN where it is lost."""
        if state.train_losses is not None:
            return list(state.train_losses)
        path = self._job.options.out / METRICS
        losses = read_losses(path, state.step, state.losses_digest)
        if losses is None:
            self._progress.say(f"{path} doesn't have the losses of the steps until {state.step}; the report lacks them")
            return [math.nan] * state.step
        return losses

    def _save(self) -> None:
        """Write a checkpoint, or start to write it if the config saves asynchronously; collective.

        Raises:
            CheckpointError: it could not be written, and the config doesn't let training continue.
        """
        began = time.perf_counter()
        self._is_due, self.latest = False, None
        self.check_lock()
        settings = cuboid.parse_config(self._job.config).checkpoint
        try:
            self._metrics.sync()
        except CheckpointError as error:
            if settings.on_failure == "raise":
                raise
            self._progress.say(f"no checkpoint was written, and training continues: {error}")
            return
        root, tag = self._job.options.out / CHECKPOINTS, f"global_step{self.step}"
        with self._progress.aside():
            saved = self._engine.save_checkpoint(root, tag=tag, client_state=self._state().model_dump())
        self._interrupt.saved(began)
        if saved:
            self.latest = root / tag
            begun = " begun" if settings.asynchronous else ""
            self._progress.say(f"checkpoint after {self.step} steps{begun}: {self.latest}")

    def _state(self) -> RunState:
        options = self._job.options
        return RunState(
            step=self.step,
            steps=self._job.steps,
            seed=options.seed,
            sequence_length=options.sequence_length,
            global_batch=self._global_batch,
            heldout_blocks=options.heldout_blocks,
            model_sha256=self._job.model_sha256,
            data_fingerprint=self._data.fingerprint,
            losses_digest=digest_of(self.losses),
            heldout_losses=self.heldout,
            loss_guard=self._guard.state()["attributes"],
            step_s=self.times.mean_s,
            wall_s=self.wall_s,
            resumed_after=self.resumed_after,
            trainer_args=trained_by(self._job.trainer_args),
            **self._trainer.schedule_state(),
        )
