"""Ctrl-C ends a command with one line, whatever it is doing; ``cuboid train`` answers it with a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

#: The exit status of what Ctrl-C has ended, in the shell's form.
INTERRUPTED = 130


def end_interrupted() -> NoReturn:
    """Exit as an interrupted command does; under a launcher, rank 0 alone says so."""
    _say()
    sys.exit(INTERRUPTED)


def expect_interrupts() -> None:
    """If this process is the command ``cuboid``, leave out the traceback of Ctrl-C, during its imports too."""
    command = Path(sys.argv[0]).name == "cuboid" or sys.orig_argv[1:].count("cuboid.cli") == 1
    if command and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _say()
    else:
        sys.__excepthook__(kind, error, trace)


def _say() -> None:
    if os.environ.get("RANK", "0") == "0":
        print("cuboid: interrupted", file=sys.stderr, flush=True)
