"""A run that is told to stop still cleans up, and nothing disturbs it while it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the ``with`` block by SystemExit, as SIGINT does by KeyboardInterrupt.

    Without it they would end the process where it stands, without any ``finally``. A signal that is ignored, as
    ``nohup`` has SIGHUP, still is.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals to stop wait until the end of the ``with`` block, in child processes started there too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
