"""Messages of a process that ends early: its error, for the user and the launcher, or that Ctrl-C ended it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import NoReturn

#: Exit status after Ctrl-C, as shells report it: 128 + SIGINT.
INTERRUPTED = 130
#: Packages whose frames aren't the user's script.
_FRAMEWORKS = sys.stdlib_module_names | {
    "accelerate",
    "click",
    "colossalai",
    "cuboid",
    "cuboid_patches",
    "deepspeed",
    "peft",
    "torch",
    "transformers",
    "typer",
}


def tell_launcher(message: str) -> None:
    """Write an error to torchrun's error file, so that torchrun's long report on the ranks ends with this message."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with contextlib.suppress(OSError):
            content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def place_in_script(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first of some frames, with their lines, that is neither Cuboid's nor a framework's: " (file:line)", or ""."""
    for frame, line in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _FRAMEWORKS:
            return f" ({frame.f_code.co_filename}:{line})"
    return ""


def is_of_cuboid(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Whether Cuboid's code is the first of some frames, from the innermost, that isn't torch's."""
    names = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames)
    return next((name for name in names if name not in ("torch", "contextlib")), "") == "cuboid"


def end_alone(message: str, rank: int) -> NoReturn:
    """End a process whose main thread waits, where nothing can interrupt it, for what will never come."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "" if main is None else place_in_script(walk_stack(main))
    tell_launcher(f"{message}{place}")
    with contextlib.suppress(OSError, ValueError):
        # What the script has printed so far.
        print(end="", flush=True)
        os.write(2, f"cuboid: rank {rank}: {message}{place}\n".encode())
    os._exit(1)


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
