"""Messages of a process that ends early: its error, for the user and the launcher, or that Ctrl-C ended it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

#: Exit status after Ctrl-C, as shells report it: 128 + SIGINT.
INTERRUPTED = 130


def tell_launcher(message: str) -> None:
    """Write an error to torchrun's error file, so that torchrun's long report on the ranks ends with this message."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with contextlib.suppress(OSError):
            content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def say_interrupted() -> None:
    """Print that Ctrl-C ended the process (under a launcher, on rank 0 only), even if another thread holds stderr."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, b"cuboid: interrupted\n")


def end_interrupted() -> NoReturn:
    """Print that Ctrl-C ended the process, and exit with :data:`INTERRUPTED`."""
    say_interrupted()
    sys.exit(INTERRUPTED)


def is_command() -> bool:
    """Whether this process runs the ``cuboid`` command."""
    return Path(sys.argv[0]).name == "cuboid" or "cuboid.cli" in sys.orig_argv


def expect_interrupts() -> None:
    """If this process runs the ``cuboid`` command, suppress the traceback of Ctrl-C, also during imports."""
    if is_command() and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say_interrupted()
    else:
        sys.__excepthook__(kind, error, trace)
