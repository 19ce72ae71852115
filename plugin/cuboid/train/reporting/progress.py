"""The progress bar of a run, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

    If the output isn't a terminal (a log), a line is written at each tenth of the run instead. Before the run was
    resumed, it made ``done`` steps.
    """

    def __init__(self, steps: int, shown: bool, done: int = 0) -> None:
        self._steps = steps
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

    def step(self, step: int, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
        """Show the state after ``step`` steps."""
        text = f"loss {loss:.3f} · {tokens_per_s:,.0f} tok/s · {memory_bytes / _GIB:.2f} GiB/rank"
        self._bar.update(self._task, completed=step, description=text)
        passes_a_tenth = step * 10 // self._steps > (step - 1) * 10 // self._steps
        if self._shown and not self._console.is_terminal and passes_a_tenth:
            self.say(f"step {step}/{self._steps} · {text}")
