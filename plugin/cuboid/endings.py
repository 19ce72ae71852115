"""What a process says when it ends early: why, to the user and to the launcher, or that Ctrl-C ended it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
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
    """If this process is the command ``cuboid``, let Ctrl-C end it with a line while it imports, until ``cli.app``."""
    is_command = Path(sys.argv[0]).name == "cuboid" or "cuboid.cli" in sys.orig_argv
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def raise_interrupts() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, once everything is imported."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(number: int, _: FrameType | None) -> None:
    # Not by an exception: extension modules clear those that arise while they initialize, and the command would go on.
    say_interrupted()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
