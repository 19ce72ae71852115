"""The loss of each step, in one file of the run.

Checkpoints have only a hash of the losses, so that they don't grow with the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cuboid import CheckpointError

#: Name of the file in a run's folder.
LOSSES = "train_losses.csv"
_HEADER = "step,loss\n"
#: More than any line has, so that a damaged file isn't read into memory as one line.
_LONGEST_LINE = 64


def digest_of(losses: Sequence[float]) -> str:
    """A hash of losses to the last bit."""
    return hashlib.sha256(np.asarray(losses, dtype="<f8").tobytes()).hexdigest()


def write_losses(path: Path, losses: Sequence[float], *, present: int) -> None:
    """Bring the file up to date with the losses of all steps so far.

    This process has written ``present`` of them there already; if 0, the file is replaced.

    Raises:
        CheckpointError: there is another file of that name.
        OSError: from the file system.
    """
    lines = [f"{step},{loss!r}\n" for step, loss in enumerate(losses[present:], start=present + 1)]
    if present:
        _write(path, lines, "a")
        return
    if path.exists() and not _is_ours(path):
        raise CheckpointError(f"{path} isn't a file of losses, which would replace it; move it away")
    # Steps after the one that the run was resumed from are dropped; at no time the earlier ones are missing.
    beside = path.with_name(f"{path.name}.new")
    _write(beside, [_HEADER, *lines], "w")
    beside.replace(path)


def read_losses(path: Path, steps: int, digest: str | None) -> list[float] | None:
    """The losses of the first ``steps`` steps; None if the file doesn't have them, or others than ``digest`` is of."""
    losses: list[float] = []
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            if file.readline(_LONGEST_LINE) != _HEADER:
                return None
            for step in range(1, steps + 1):
                number, _, loss = file.readline(_LONGEST_LINE).partition(",")
                if number != str(step):
                    return None
                losses.append(float(loss))
    except (OSError, ValueError):
        return None
    return losses if digest_of(losses) == digest else None


def _is_ours(path: Path) -> bool:
    with path.open(encoding="ascii", errors="replace") as file:
        return file.readline(_LONGEST_LINE) == _HEADER


def _write(path: Path, lines: Sequence[str], mode: str) -> None:
    with path.open(mode, encoding="ascii") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
