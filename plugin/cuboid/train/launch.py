"""Run a launcher so that Ctrl-C and SIGTERM reach its ranks, and nobody else.

    python -P plugin/cuboid/train/launch.py deepspeed --num_accelerators 8 --module cuboid.cli train …

Launchers end on these signals themselves and kill their ranks 30 seconds later, which a checkpoint may well take. Here
the ranks are told alone; the launcher sees them end, and ends with their status. This file imports nothing of Cuboid's,
so that the one more process is a small one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

#: After so many times Ctrl-C, everything is killed.
_PATIENCE = 3


class Launch:
    """A launcher in a session of its own, which the terminal's Ctrl-C doesn't reach.

    Args:
        command: of the launcher.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._interrupts = 0
        self._launcher: subprocess.Popen | None = None
        self._early: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on)
        self._launcher = subprocess.Popen(command, start_new_session=True)
        for early in self._early:
            self._pass_on(early)

    def wait(self) -> int:
        """The launcher's exit status, as a shell gives it."""
        assert self._launcher is not None
        status = self._launcher.wait()
        return status if status >= 0 else 128 - status

    def _on(self, number: int, _frame: object) -> None:
        if self._launcher is None:
            self._early.append(number)
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        assert self._launcher is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher.pid)
            started = [launcher, *launcher.children(recursive=True)]
            self._interrupts += number == signal.SIGINT
            if self._interrupts >= _PATIENCE:
                _send(started, signal.SIGKILL)
                return
            # Without ranks there is nobody who would have to save anything. A terminal that closes asks to stop, too.
            polite = signal.SIGTERM if number == signal.SIGHUP else number
            ranks = [process for process in started if _is_rank(process)]
            _send(ranks or started, polite if ranks else signal.SIGTERM)


def _is_rank(process: psutil.Process) -> bool:
    """Whether a launcher started this process as a rank; what a rank starts has the same variables."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return _has_rank(process) and (parent is None or not _has_rank(parent))
    return False


def _has_rank(process: psutil.Process) -> bool:
    return "LOCAL_RANK" in process.environ()


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":
    for variable in ("RANK", "LOCAL_RANK"):
        os.environ.pop(variable, None)
    sys.exit(Launch(sys.argv[1:]).wait())
