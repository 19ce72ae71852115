"""Time that is worth measuring: nobody else computes on the cores that the ranks have."""

from __future__ import annotations

import os
import time

import psutil

#: A step is measured again where other processes took more than this part of the cores meanwhile.
QUIET = 0.03
#: How long the cores must have been quiet before a step begins.
CALM_S = 0.5


def pin(rank: int) -> int | None:
    """Keep every thread of this process on one core, a different one for each rank. None where that can't be done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    return core


class Watch:
    """Tells how much other processes compute; waits for quiet times, or has steps repeated, up to a limit in all."""

    def __init__(self, limit_s: float, core: int | None = None) -> None:
        self._core = core
        self._cores = 1 if core is not None else psutil.cpu_count() or 1
        self._deadline_s = time.monotonic() + limit_s
        self.start()

    def start(self) -> None:
        self._begin = self._now()

    def share(self, ranks_s: float = 0.0) -> float:
        """The part of the cores, from 0 to 1, that neither this process nor its ranks took since :meth:`start`."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return max(0.0, (busy_s - own_s - ranks_s) / (wall_s * self._cores))

    def wait(self) -> None:
        """Until the cores are quiet, or the time is over. The ranks must be idle."""
        while not self.is_over():
            self.start()
            time.sleep(CALM_S)
            if self.share() <= QUIET:
                return

    def is_over(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times() if self._core is None else psutil.cpu_times(percpu=True)[self._core]
        # Interrupts are left out: in these measurements nearly all of them are the ranks' own packets.
        busy_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return time.perf_counter(), busy_s, time.process_time()
