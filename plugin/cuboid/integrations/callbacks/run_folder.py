"""The folder of a Trainer's run belongs to it alone, as that of ``cuboid train`` does."""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cuboid.checkpoint.run_lock import RunLock, held
from cuboid.distributed.mesh import Mesh
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.training_engine import mesh_if_sharded

logger = logging.getLogger(__name__)


class RunLockCallback(TrainerCallback):
    """Keeps other runs out of ``output_dir`` during the training, by a file there that names this run's process.

    The lock of a process that was killed is taken over: at once on the same host, and from another host after it gave
    no sign of life for 45 seconds. A run that was taken over nevertheless writes no further checkpoint. List it after
    :class:`~cuboid.integrations.callbacks.interrupt.InterruptCallback`, whose checkpoint is checked then, too.

    Raises:
        CuboidError: on all ranks: another run writes there; or, before a checkpoint is written, has taken it over.
        CheckpointError: the folder can't be written.
    """

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        #: On the first rank, while it trains.
        self._lock: RunLock | None = None
        self._finish: weakref.finalize | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the lock."""
        self.release()
        self._mesh = mesh_if_sharded(model)

        def take() -> None:
            if state.is_world_process_zero:
                stack = ExitStack()
                self._lock = stack.enter_context(held(Path(args.output_dir), "training", logger.warning))
                # However the training ends: also at the end of the process.
                self._finish = weakref.finalize(self, stack.close)

        run_on_all_ranks(take, self._mesh, what="lock of the run's folder")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check that the folder still belongs to this run, if a checkpoint is due."""
        if control.should_save:
            self._check()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Once more, after what may take long."""
        if control.should_save:
            self._check()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Release the lock."""
        self.release()

    def release(self, *_: object) -> None:
        """Release the lock, if it is this run's."""
        finish, self._finish, self._lock = self._finish, None, None
        if finish is not None:
            finish()

    def _check(self) -> None:
        def check() -> None:
            if self._lock is not None:
                self._lock.check()

        run_on_all_ranks(check, self._mesh, what="check of the run's folder")
