"""Ctrl-C and SIGTERM, which end a run after the step that is running, on all ranks alike."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from cuboid import CuboidError
from cuboid.errors import PeerLostError, RankError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupts:
    """What this rank was asked, and what all ranks together were. Use it as a context manager, in the main thread.

    Until :meth:`defer` is called, a signal ends the process at once: there is nothing to be saved yet. From then on the
    first one is noted only, and so is every SIGTERM: launchers send one after the Ctrl-C that all have got. A second
    Ctrl-C ends the process at once.

    Signals are read by a thread, since Python's own handlers would wait for the main thread's next instruction, and
    that may be inside a collective which never ends.

    Attributes:
        stop: the signal that all ranks agree to stop for; see :meth:`agree`.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
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
        # The thread does the work; a handler has to be there for Python to tell it.
        self._replaced = {number: signal.signal(number, _handled_elsewhere) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        users = isinstance(error, CuboidError) and not isinstance(error, RankError | PeerLostError)
        lost = isinstance(error, Exception) and not users
        if lost:
            # Perhaps another rank has ended already on the signal that is about to arrive here.
            time.sleep(_ECHO_S)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        if lost and self._seen:
            # Signals that come in short order may have arrived as one here, but the others have ended on the second.
            print(f"cuboid: stopping failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(128 + min(self._seen)) from None

    def defer(self, tell: Callable[[], None]) -> None:
        """From now on, only note the first signal.

        Args:
            tell: is called when it comes, in another thread.
        """
        self._deferred = tell

    def own(self) -> list[float]:
        """What this rank was asked: for each kind of signal, 1 or 0."""
        return [float(number in self._seen) for number in _SIGNALS]

    def agree(self, totals: Sequence[float]) -> None:
        """Take over what all ranks were asked.

        Args:
            totals: the sum of :meth:`own` over all ranks.
        """
        for number, total in zip(_SIGNALS, totals, strict=True):
            if total > 0 and self.stop is None:
                self.stop = number

    def _watch(self) -> None:
        while numbers := self._reader.recv(1):
            # Other signals that have handlers are told here too.
            if numbers[0] in _SIGNALS:
                self._note(signal.Signals(numbers[0]))

    def _note(self, number: signal.Signals) -> None:
        again = number is signal.SIGINT and number in self._seen
        tell = self._deferred
        if again or tell is None:
            _end(number)
        first = not self._seen
        self._seen.add(number)
        if first:
            tell()


def _end(number: signal.Signals) -> NoReturn:
    """End this process without another word."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # which a progress bar hides
    os._exit(128 + number)


def _handled_elsewhere(number: int, frame: object) -> None:
    """See :meth:`Interrupts._watch`."""
