"""Run a launcher so that Ctrl-C and SIGTERM reach its ranks only.

    python -P plugin/cuboid/failures/shielded_launcher.py deepspeed --num_accelerators 8 --module cuboid.cli train …

A launcher that receives these signals exits, and kills its ranks 30 seconds later, when a checkpoint may not be
finished. Here only the ranks are signalled; the launcher exits with their status when they have ended. This file
imports nothing of Cuboid, so that the additional process stays small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

#: The number of Ctrl-C presses after which all processes are killed.
_PATIENCE = 3


class ShieldedLauncher:
    """A launcher in its own session, so that the terminal's Ctrl-C doesn't reach it."""

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
        """Wait for the launcher; returns its exit status in the shell's form (128 + signal)."""
        assert self._launcher is not None
        status = self._launcher.wait()
        return status if status >= 0 else 128 - status

    def _on(self, number: int, _frame: object) -> None:
        if self._launcher is None:
            # The launcher is still being started; ``__init__`` passes the signal on.
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
            # A closed terminal (SIGHUP) asks the ranks to stop as SIGTERM does. Before ranks exist, nothing needs to be
            # saved, and all processes are ended.
            polite = signal.SIGTERM if number == signal.SIGHUP else number
            ranks = [process for process in started if _is_rank(process)]
            _send(ranks or started, polite if ranks else signal.SIGTERM)


def _is_rank(process: psutil.Process) -> bool:
    """Whether a launcher started this process as a rank."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        # A rank's own children inherit the variable, so the parent mustn't have it.
        return "LOCAL_RANK" in process.environ() and (parent is None or "LOCAL_RANK" not in parent.environ())
    return False


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":
    for variable in ("RANK", "LOCAL_RANK"):
        os.environ.pop(variable, None)
    sys.exit(ShieldedLauncher(sys.argv[1:]).wait())
