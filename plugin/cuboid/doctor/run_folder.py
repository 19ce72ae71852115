"""A run's folder: whether another run has it, and whether there is room for the next checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cuboid.checkpoint.run_lock import LOCK, state_of_lock
from cuboid.doctor.finding import Finding, problem, right, within
from cuboid.doctor.resources import disk
from cuboid.errors import CuboidError

#: For a lock of another host's, 45 s are needed.
_LOCK_S, _SIZES_S = 90.0, 60.0


def run_folder(folder: Path, say: Callable[[str], object]) -> Iterator[Finding]:
    """Whether ``cuboid train --out`` could begin in a folder."""
    yield from _lock(folder, say)
    try:
        needed = within(_SIZES_S, lambda: _newest_checkpoint(folder / "checkpoints"))
    except (OSError, TimeoutError):
        needed = 0
    yield from disk(folder, needed)


def _lock(folder: Path, say: Callable[[str], object]) -> Iterator[Finding]:
    path = folder / LOCK
    try:
        holder, ended = within(_LOCK_S, lambda: state_of_lock(path, say))
    except TimeoutError:
        yield problem("lock", f"{path}: its file system doesn't answer", "look at its server, and at `mount`")
    except CuboidError as error:
        yield problem("lock", str(error), "remove or rename it, if no run writes there")
    except OSError as error:
        yield problem("lock", f"{path}: can't be read: {error.strerror}", "choose another --out")
    else:
        if holder is None:
            yield right("lock", f"{folder} belongs to no run")
        elif ended:
            yield right("lock", f"{path} is stale, of {holder}; the next run takes it over, nothing has to be removed")
        else:
            yield problem("lock", f"{folder} is in use by {holder}", "wait for its end, or choose another --out")


def _newest_checkpoint(folder: Path) -> int:
    """Bytes of the newest finished checkpoint; 0 if there is none."""
    finished = [manifest for manifest in folder.glob("*/manifest.json") if ".incomplete" not in str(manifest.parent)]
    if not finished:
        return 0
    newest = max(finished, key=lambda manifest: manifest.stat().st_mtime).parent
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
