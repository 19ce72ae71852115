"""What the system says that this process holds and reads (Linux)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_OWN = Path("/proc/self")
_SAMPLE_S = 0.01


@dataclass(frozen=True)
class Footprint:
    """Of a process that loaded a model.

    Args:
        floor_bytes: what it had in memory before: PyTorch, transformers, everything imported.
        peak_bytes: the most that it had in memory at a time, files that it mapped included.
        peak_own_bytes: likewise without files; sampled.
        peak_files_bytes: the most pages of files that it mapped, beyond those from before; sampled.
        proportional_bytes: what it holds afterwards, where each page that several processes share counts in parts.
        held_bytes: what it has in memory afterwards.
        read_bytes: through the system's ``read``, by which mapped files are not read.
    """

    floor_bytes: int
    peak_bytes: int
    peak_own_bytes: int
    peak_files_bytes: int
    proportional_bytes: int
    held_bytes: int
    read_bytes: int


class Watched:
    """Inside a ``with`` block, the footprint of this process is watched; afterwards :attr:`footprint` has it."""

    footprint: Footprint

    def __enter__(self) -> Watched:
        # The peak starts again at what the process has now.
        (_OWN / "clear_refs").write_text("5", encoding="ascii")
        self._before = status_bytes()
        self._read_before = _numbers(_OWN / "io")["rchar"]
        self._own, self._files = self._before["RssAnon"], self._before["RssFile"]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        after = status_bytes()
        self.footprint = Footprint(
            floor_bytes=self._before["VmRSS"],
            peak_bytes=after["VmHWM"],
            peak_own_bytes=self._own,
            peak_files_bytes=self._files - self._before["RssFile"],
            proportional_bytes=_numbers(_OWN / "smaps_rollup")["Pss"],
            held_bytes=after["VmRSS"],
            read_bytes=_numbers(_OWN / "io")["rchar"] - self._read_before,
        )

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            now = status_bytes()
            self._own = max(self._own, now["RssAnon"])
            self._files = max(self._files, now["RssFile"])


def status_bytes() -> dict[str, int]:
    """Sizes of this process's memory, as ``/proc/self/status`` calls them."""
    return _numbers(_OWN / "status")


def _numbers(path: Path) -> dict[str, int]:
    """Lines ``Name: number`` or ``Name: number kB``, in bytes."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found
