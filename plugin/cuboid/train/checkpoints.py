"""Write a run's checkpoints, and resume from them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cuboid
from cuboid.checkpoint.run_lock import RunLock
from cuboid.errors import CheckpointError, DamagedCheckpointError
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile, digest_of, read_losses
from cuboid.integrations.callbacks.progress import TrainProgress
from cuboid.integrations.callbacks.step_times import StepTimes
from cuboid.train.job import TrainJob
from cuboid.train.loop import History
from cuboid.train.resume import RunState, find_run, with_remedy
from cuboid.train.run_folder import CHECKPOINTS
from cuboid.train.training_data import TrainingData


@dataclass(frozen=True)
class RunCheckpoints:
    """Writes and reads a run's checkpoints."""

    engine: Any
    job: TrainJob
    data: TrainingData
    #: Sequences of one optimizer step, over all ranks.
    global_batch: int
    #: When this process began, by ``time.perf_counter``.
    started: float
    progress: TrainProgress
    #: Of the run, which the first rank writes.
    metrics: MetricsFile
    #: On the run's folder; None on all ranks but the first.
    lock: RunLock | None
    guard: LossGuardCallback

    @property
    def resumed_after(self) -> list[int]:
        """The steps after which the run was resumed, by this process or earlier ones."""
        if self.job.resumed is None:
            return []
        state = self.job.resumed.state
        return list(dict.fromkeys([*state.resumed_after, state.step]))

    @property
    def wall_s(self) -> float:
        """Seconds of the run so far, including earlier processes."""
        earlier = 0.0 if self.job.resumed is None else self.job.resumed.state.wall_s
        return earlier + time.perf_counter() - self.started

    def begin(self) -> tuple[RunCheckpoints, History]:
        """Restore the engine from the checkpoint to resume from, if any; collective.

        Returns:
            The object to use from now on, whose job has the checkpoint that was restored; and the run's history.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model or optimizer.
        """
        if self.job.resumed is None:
            if self.job.options.resume:
                self.progress.say(f"nothing to resume from in {self.job.options.out}; beginning a new run")
            self.metrics.begin(0)
            return self, History()
        path, state = self.job.resumed.path, self.job.resumed.state
        try:
            self.engine.load_checkpoint(path)
        except DamagedCheckpointError as error:
            if self.job.options.resume_if_any and error.intact is not None:
                self.progress.say(f"{error}. Resuming from that one")
                earlier = find_run(self.job.options.out, error.intact.name)
                self.job.resumed.check_same_run(earlier)
                return replace(self, job=replace(self.job, resumed=earlier)).begin()
            raise CheckpointError(f"--resume can't resume from a damaged checkpoint: {with_remedy(error)}") from error
        self.progress.say(f"going on after step {state.step} of {self.job.steps}, from {path}")
        self.guard.restore(state.loss_guard or {})
        losses = self._losses_before(state)
        # A run that is stopped isn't evaluated before it is resumed.
        is_evaluated = any(point.step == state.step for point in state.heldout_losses)
        self.metrics.begin(state.step, is_evaluated=is_evaluated)
        return self, History(losses, list(state.heldout_losses), StepTimes(state.step_s))

    def check_lock(self) -> None:
        """Raise an error on the first rank if another run has taken over the run's folder."""
        if self.lock is not None:
            self.lock.check()

    def save(self, history: History) -> Path | None:
        """Write a checkpoint, or start to write it if the config saves asynchronously; collective.

        Returns:
            Its path; None if it could not be written and the config lets training continue.

        Raises:
            CheckpointError: it could not be written.
        """
        began = time.perf_counter()
        self.check_lock()
        root, tag = self.job.options.out / CHECKPOINTS, f"global_step{history.step}"
        if not self._sync_metrics():
            return None
        with self.progress.aside():
            saved = self.engine.save_checkpoint(root, tag=tag, client_state=self._state(history).model_dump())
        history.times.saved(began)
        if not saved:
            return None
        begun = cuboid.parse_config(self.job.config).checkpoint.asynchronous
        self.progress.say(f"checkpoint after {history.step} steps{' begun' if begun else ''}: {root / tag}")
        return root / tag

    def _losses_before(self, state: RunState) -> list[float]:
        """The loss of each step until the checkpoint; NaN where it is lost."""
        if state.train_losses is not None:
            return list(state.train_losses)
        path = self.job.options.out / METRICS
        losses = read_losses(path, state.step, state.losses_digest)
        if losses is None:
            self.progress.say(f"{path} doesn't have the losses of the steps until {state.step}; the report lacks them")
            return [math.nan] * state.step
        return losses

    def _sync_metrics(self) -> bool:
        """Bring the run's metrics up to date on their device; collective.

        Returns False if they can't be written and the config lets training continue; else that is an error.
        """
        try:
            self.metrics.sync()
        except CheckpointError as error:
            if cuboid.parse_config(self.job.config).checkpoint.on_failure == "raise":
                raise
            self.progress.say(f"no checkpoint was written, and training continues: {error}")
            return False
        return True

    def _state(self, history: History) -> RunState:
        options = self.job.options
        return RunState(
            step=history.step,
            steps=self.job.steps,
            seed=options.seed,
            sequence_length=options.sequence_length,
            global_batch=self.global_batch,
            heldout_blocks=options.heldout_blocks,
            model_sha256=self.job.model_sha256,
            data_fingerprint=self.data.fingerprint,
            losses_digest=digest_of(history.losses),
            heldout_losses=history.heldout,
            loss_guard=self.guard.state()["attributes"],
            step_s=history.times.mean_s,
            wall_s=self.wall_s,
            resumed_after=self.resumed_after,
        )
