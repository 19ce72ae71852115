"""The commands that start ranks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cuboid.doctor.finding import Finding, note, problem, right

_CHECK = "launchers"
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")


def on_path() -> Iterator[Finding]:
    """Whether each launcher is there, and starts ranks with this Python."""
    ours = Path(sys.executable).parent
    usable = []
    for name in _LAUNCHERS:
        command = shutil.which(name)
        beside = (ours / name).is_file()
        if command is None and not beside:
            yield problem(
                _CHECK, f"{name} is neither on PATH nor in {ours}", f"export PATH={ours}:$PATH, if it's there"
            )
        elif command is None:
            yield note(_CHECK, f"{name} isn't on PATH", f"export PATH={ours}:$PATH, or call {ours / name}")
        elif beside and not _is_same(Path(command), ours / name):
            text = f"{name} on PATH is {command}, of another environment than {sys.executable}"
            yield problem(_CHECK, text, f"export PATH={ours}:$PATH, or call {ours / name}")
        else:
            usable.append(command)
    if usable:
        yield right(_CHECK, ", ".join(usable))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
