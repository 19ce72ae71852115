"""Ctrl-C, SIGTERM and the end of a run's time: a checkpoint at the step's end, on all ranks, and then the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from transformers import TrainerControl, TrainerState, TrainingArguments

from cuboid.distributed.collectives import sum_over_ranks
from cuboid.errors import ConfigError
from cuboid.failures.interrupts import STOPPING, Interrupts, StopCause, exit_status, stopped_text
from cuboid.failures.rank_agreement import end_together
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback
from cuboid.integrations.callbacks.training_engine import engine_of


class InterruptCallback(TimedCallback):
    """Stops training at the end of a step, with a checkpoint, when a rank is asked to or its time is up.

    The first Ctrl-C (SIGINT) or SIGTERM of any rank lets all ranks finish the step that runs, write a checkpoint as
    ``save_steps`` would, and end: with exit status 130 or 143, or 124 when the time is up. A second Ctrl-C ends the
    processes at once. Before ``train`` and after it, signals do what they did before.

    Args:
        max_time_s: seconds from the start of the process. Training stops after the last step that leaves time for one
            more step and one more checkpoint, as long as the longest so far; at least one step is made.
        exits: whether the processes end. If not, ``train`` returns, and :attr:`stopped_by` says why.
        saves: whether the Trainer is asked for a checkpoint; else another callback writes one.
        interrupts: the signals, if the caller has taken them over already, and gives them back.
        say: called on the first rank with what the first signal's effect is; by default it is printed to stderr.

    Attributes:
        stopped_by: the signal, ``"--max-time"``, or None.
    """

    def __init__(
        self,
        max_time_s: float | None = None,
        *,
        exits: bool = True,
        saves: bool = True,
        interrupts: Interrupts | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        self.stopped_by: StopCause | None = None
        self._max_time_s, self._exits, self._saves = max_time_s, exits, saves
        self._given, self._say = interrupts, _print if say is None else say
        self._interrupts: Interrupts | None = None
        self._last_event = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over the signals."""
        if self._given is None and threading.current_thread() is not threading.main_thread():
            raise ConfigError("InterruptCallback: signals come to the main thread alone; call train() there")
        self.stopped_by = None
        longest_save_s, self._times = self._times.longest_save_s, StepTimes()
        self._times.longest_save_s = longest_save_s
        self._interrupts = Interrupts().__enter__() if self._given is None else self._given
        if state.is_world_process_zero and self._max_time_s is not None:
            self._interrupts.is_late = partial(self._times.is_late, self._max_time_s)
        is_first = state.is_world_process_zero

        def say() -> None:
            if is_first:
                self._say(STOPPING)

        self._interrupts.defer(say)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Agree on whether to stop."""
        self._last_event = time.perf_counter()
        super().on_step_end(args, state, control, **kwargs)
        return self._stop_if_asked(args, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Agree on it after an evaluation too, which may take long."""
        self._last_event = time.perf_counter()
        return self._stop_if_asked(args, control) if state.global_step else control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note when a save begins at the earliest."""
        self._last_event = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note how long a save takes."""
        self.saved(self._last_event)

    def saved(self, began: float) -> None:
        """A save ends that another callback began at this ``time.perf_counter()``."""
        self._times.saved(began)

    def agree(self, args: TrainingArguments) -> bool:
        """Whether the ranks agree to stop, or have done so; collective."""
        interrupts = self._interrupts
        if interrupts is not None and self.stopped_by is None:
            interrupts.agree(sum_over_ranks(interrupts.own(), args.device))
            self.stopped_by = interrupts.stop
        return self.stopped_by is not None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Give the signals back, and end the processes if they were asked to stop before the last step."""
        self.release()
        if self.stopped_by is None or not self._exits or state.global_step >= state.max_steps:
            return
        engine = engine_of(model)
        if engine is not None:
            engine.wait_for_checkpoint()
        if state.is_world_process_zero:
            print(
                stopped_text(self.stopped_by, state.global_step, state.max_steps)
                + f"; train(resume_from_checkpoint=True) resumes from {args.output_dir}/checkpoint-{state.global_step}",
                flush=True,
            )
        if dist.is_initialized():
            # A rank that leaves first would take the others' connections along.
            dist.barrier()
            end_together()
            dist.destroy_process_group()
        raise SystemExit(exit_status(self.stopped_by))

    def release(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Give the signals back; with the exception that ended training, if one did."""
        interrupts, self._interrupts = self._interrupts, None
        if interrupts is not None and interrupts is not self._given:
            interrupts.__exit__(kind, error, trace)

    def _stop_if_asked(self, args: TrainingArguments, control: TrainerControl) -> TrainerControl:
        if self._interrupts is not None and self.stopped_by is None and self.agree(args):
            # An evaluation that is due now can wait for the resumed run, the checkpoint can't.
            control.should_evaluate = False
            control.should_save, control.should_training_stop = self._saves, True
        return control


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
