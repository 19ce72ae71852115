"""Handle Ctrl-C, SIGTERM and the end of a run's time: all ranks stop together, after the current step."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self

from cuboid.errors import CuboidError, PeerLostError, RankError
from cuboid.failures.exit_messages import say_interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 0.5
#: Why ranks stop that got no signal: the time is up that ``--max-time`` gives the run.
OUT_OF_TIME: Final = "--max-time"
StopCause = signal.Signals | Literal["--max-time"]
#: Exit status of a run whose time is up, as timeout(1) has it.
_OUT_OF_TIME_STATUS = 124
#: Said when the first signal arrives in a step.
STOPPING: Final = "stopping after this step; Ctrl-C once more ends it at once"
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupts:
    """The signals of this rank, and what all ranks agreed on. Use it as a context manager, in the main thread.

    Until :meth:`defer` is called, a signal ends the process at once, since there is nothing to save yet. After that,
    the first signal is only recorded, and so is every SIGTERM, because launchers send one after the Ctrl-C that all
    ranks have received. A second Ctrl-C ends the process at once.

    Signals are read by a thread. Python's own handlers would run at the main thread's next instruction, which may be
    after a collective that never ends.

    Attributes:
        stop: what all ranks agree to stop for; see :meth:`agree`.
        is_late: says on the first rank whether there is no time for another step.
    """

    def __init__(self) -> None:
        self.stop: StopCause | None = None
        self.is_late: Callable[[], bool] = bool
        self._seen: set[signal.Signals] = set()
        self._deferred: Callable[[], None] | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._reader, self._writer = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> Self:
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        # Python writes to the wake-up file descriptor only for signals that have a Python handler.
        self._replaced = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_user_error = isinstance(error, CuboidError) and not isinstance(error, RankError | PeerLostError)
        may_be_lost_peer = isinstance(error, Exception) and not is_user_error
        if may_be_lost_peer:
            # Another rank may have exited because of a signal that hasn't arrived here yet.
            time.sleep(_ECHO_S)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if may_be_lost_peer and self._seen:
            # Two signals in quick succession may have arrived as one here, while another rank exited on the second.
            print(f"cuboid: stopping failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(128 + min(self._seen)) from None

    def defer(self, on_first: Callable[[], None]) -> None:
        """From now on, only record the first signal; ``on_first`` is called when it arrives, in another thread."""
        self._deferred = on_first

    def own(self) -> list[float]:
        """For each kind of signal, 1 if this rank received it, else 0; then the same for the end of the time."""
        return [*(float(number in self._seen) for number in _SIGNALS), float(self.is_late())]

    def agree(self, totals: Sequence[float]) -> None:
        """Set :attr:`stop` if any rank has a cause; ``totals`` is the sum of :meth:`own` over all ranks."""
        causes: tuple[StopCause, ...] = (*_SIGNALS, OUT_OF_TIME)
        for cause, total in zip(causes, totals, strict=True):
            if total > 0 and self.stop is None:
                self.stop = cause

    def _watch(self) -> None:
        while numbers := self._reader.recv(1):
            # The wake-up file descriptor gets all signals that have Python handlers.
            if numbers[0] in _SIGNALS:
                self._note(signal.Signals(numbers[0]))

    def _note(self, number: signal.Signals) -> None:
        again = number is signal.SIGINT and number in self._seen
        on_first = self._deferred
        if again or on_first is None:
            _exit_at_once(number)
        first = not self._seen
        self._seen.add(number)
        if first:
            on_first()


def exit_status(cause: StopCause) -> int:
    """Exit status of a process that was stopped, as shells and timeout(1) report it."""
    return _OUT_OF_TIME_STATUS if isinstance(cause, str) else 128 + cause


def stopped_text(cause: StopCause, step: int, steps: int) -> str:
    """How far a run came that was stopped, for its last message."""
    place = f"after step {step} of {steps}" if step else "before the first step"
    return f"stopped by {cause if isinstance(cause, str) else cause.name} {place}"


def _exit_at_once(number: signal.Signals) -> NoReturn:
    """Exit without cleaning up, since the main thread may be in a collective that never ends."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # a progress bar has hidden it
    if number is signal.SIGINT:
        say_interrupted()
    os._exit(128 + number)


def _ignore(number: int, frame: object) -> None:
    """The Python handler. It does nothing: :meth:`Interrupts._watch` handles the signals."""
