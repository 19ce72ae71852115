"""The progress of a run, on one rank: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from transformers import TrainerControl, TrainerState, TrainingArguments

from cuboid.integrations.callbacks.metrics_file import evaluation_losses
from cuboid.integrations.callbacks.step_times import StepTimes, TimedCallback

_GIB = 1 << 30


class TrainProgress:
    """Shows loss, tokens per second, memory per rank and the remaining time.

    If the output isn't a terminal (a log), lines are written instead: for the first and the last step, and for others
    if ``log_every_s`` seconds have passed since the last line. Before the run was resumed, it made ``done`` steps.
    """

    def __init__(self, steps: int, shown: bool, log_every_s: float, done: int = 0) -> None:
        self._steps = steps
        self._log_every_s = log_every_s
        self._logged_at = -math.inf
        self._shown = shown
        self._console = Console(stderr=True, quiet=not shown, highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),  # all of it fits 80 columns
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("starting", total=steps, completed=done)

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(message, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which another bar can use the terminal."""
        live = self._bar.live
        # Erases the bar when it stops; otherwise a copy of it would stay above the other one.
        live.transient = True
        self._bar.stop()
        live.transient = False
        try:
            yield
        finally:
            self._bar.start()

    def step(self, step: int, loss: float, tokens_per_s: float | None, memory_bytes: int, left_s: float) -> None:
        """Show the state after ``step`` steps."""
        speed = "" if tokens_per_s is None else f"{tokens_per_s:,.0f} tok/s · "
        text = f"loss {loss:.3f} · {speed}{memory_bytes / _GIB:.2f} GiB/rank"
        self._bar.update(self._task, completed=step, description=text)
        now = time.monotonic()
        is_due = step == self._steps or now - self._logged_at >= self._log_every_s
        if self._shown and not self._console.is_terminal and is_due:
            self._logged_at = now
            self.say(f"step {step}/{self._steps} · {text} · {timedelta(seconds=round(left_s))} left")


class RunProgressCallback(TimedCallback):
    """Shows a Trainer's loss, speed, memory and remaining time, as ``cuboid train`` does.

    A terminal shows a bar. A file or pipe gets a line for the first and the last step, for others if ``log_every_s``
    seconds have passed since the last line, and for each evaluation. ``CuboidTrainer`` shows it in place of the
    Trainer's own output; of the plain ``Trainer``, remove ``ProgressCallback`` and ``PrinterCallback``.

    Args:
        log_every_s: seconds between two lines of a log, at least; 0: a line for each log of the Trainer's.
        tokens_per_step: of all replicas, where each step has as many; by default what the Trainer counts.
        shown: whether this rank may show something; by default the first one does.
    """

    def __init__(
        self, log_every_s: float = 10.0, *, tokens_per_step: int | None = None, shown: bool | None = None
    ) -> None:
        super().__init__()
        self._log_every_s, self._tokens_per_step, self._shown = log_every_s, tokens_per_step, shown
        self._progress: TrainProgress | None = None
        self._tokens = 0

    def say(self, message: str) -> None:
        """Print a line, above the bar if there is one; also before and after the training."""
        if self._progress is not None:
            self._progress.say(message)
        elif self._shown:
            Console(stderr=True, highlight=False).print(message, markup=False, soft_wrap=True)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Context in which another bar can use the terminal."""
        return contextlib.nullcontext() if self._progress is None else self._progress.aside()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Learn whether this is the first rank."""
        if self._shown is None:
            self._shown = state.is_world_process_zero

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to show it."""
        self.release()
        self._times, self._tokens = StepTimes(), int(state.num_input_tokens_seen)
        shown = state.is_world_process_zero if self._shown is None else self._shown
        self._progress = TrainProgress(state.max_steps, shown, self._log_every_s, state.global_step).__enter__()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show a step, or an evaluation."""
        if self._progress is None or logs is None:
            return
        if "loss" in logs:
            tokens, self._tokens = int(state.num_input_tokens_seen) - self._tokens, int(state.num_input_tokens_seen)
            rates = self._times.rates(state.max_steps - state.global_step, tokens=tokens, flops=None, peak_flops=None)
            memory_bytes = int(rates["memory_bytes"])
            speed = rates.get("tokens_per_s")
            if self._tokens_per_step is not None:
                speed = self._tokens_per_step / self._times.mean_s
            self._progress.step(state.global_step, float(logs["loss"]), speed, memory_bytes, rates["left_s"])
            return
        losses = evaluation_losses(logs)
        if losses:
            self._progress.say(self.evaluation_text(state.global_step, losses))

    def evaluation_text(self, step: int, losses: Mapping[str, float]) -> str:
        """The line of an evaluation, of one or several texts."""
        return f"after {step} steps: " + ", ".join(f"{name} {value:.4f}" for name, value in losses.items())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the terminal."""
        self.release()

    def release(self, *_: object) -> None:
        """Leave the terminal, however the training ended."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.__exit__(None, None, None)
