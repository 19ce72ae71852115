"""The progress bar of a run, on one rank."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

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

    def step(self, step: int, loss: float, tokens_per_s: float, memory_bytes: int, left_s: float) -> None:
        """Show the state after ``step`` steps."""
        text = f"loss {loss:.3f} · {tokens_per_s:,.0f} tok/s · {memory_bytes / _GIB:.2f} GiB/rank"
        self._bar.update(self._task, completed=step, description=text)
        now = time.monotonic()
        is_due = step == self._steps or now - self._logged_at >= self._log_every_s
        if self._shown and not self._console.is_terminal and is_due:
            self._logged_at = now
            self.say(f"step {step}/{self._steps} · {text} · {timedelta(seconds=round(left_s))} left")
