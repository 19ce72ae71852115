"""What a process says when it ends early: why, to the user and to the launcher, or that Ctrl-C ended it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

#: The exit status of what Ctrl-C has ended, in the shell's form.
INTERRUPTED = 130


def tell_launcher(message: str) -> None:
    """Leave word of an error for torchrun, whose long report on the ranks then ends with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with contextlib.suppress(OSError):
            content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def say_interrupted() -> None:
    """Say that Ctrl-C ended the process; under a launcher, rank 0 alone does. Also where other threads hold stderr."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, b"cuboid: interrupted\n")


def end_interrupted() -> NoReturn:
    """Exit as an interrupted command does."""
    say_interrupted()
    sys.exit(INTERRUPTED)


def expect_interrupts() -> None:
    """If this process is the command ``cuboid``, leave out the traceback of Ctrl-C, during its imports too."""
    is_command = Path(sys.argv[0]).name == "cuboid" or "cuboid.cli" in sys.orig_argv
    if is_command and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say_interrupted()
    else:
        sys.__excepthook__(kind, error, trace)
