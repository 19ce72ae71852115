"""Time that is worth measuring: each rank on a core of its own, and nobody else on it."""

from __future__ import annotations

import os
import time

import psutil
import torch
import torch.distributed as dist

#: A step is measured again where other processes took more than this part of the ranks' cores meanwhile.
QUIET = 0.03
#: How long the cores must have been quiet before a step begins.
CALM_S = 0.5


class Judged:
    """Mixed into what is known of a step that was measured.

    Attributes:
        foreign: part of the ranks' cores that other processes took meanwhile.
    """

    foreign: float

    @property
    def is_quiet(self) -> bool:
        """Whether the step counts."""
        return self.foreign <= QUIET


class Timed(Judged):
    """Likewise, of which the time is known.

    Attributes:
        step_s: how long it took.
    """

    step_s: float


def pin(rank: int) -> int | None:
    """Keep every thread of this process on one core, a different one for each rank. None where that can't be done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    return core


def gather(own: list[float]) -> torch.Tensor:
    """Every rank's numbers, ``[ranks, numbers]`` in float64. Collective."""
    everyone = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64)
    everyone[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(everyone)
    return everyone


class Watch:
    """Tells how much of this rank's core other processes take.

    Args:
        core: None where nothing can be known; all is taken to be quiet then.
        limit_s: how long in all to wait for quiet times, or to repeat what was disturbed.
    """

    def __init__(self, core: int | None, limit_s: float) -> None:
        self._core = core
        self._deadline_s = time.monotonic() + limit_s
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._begin = self._now()

    def share(self) -> float:
        """The part of the time since :meth:`start` that others took, from 0 to 1."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return 0.0 if self._core is None else max(0.0, (busy_s - own_s) / wall_s)

    def wait(self) -> None:
        """Until all ranks' cores are quiet, or the time is over. Collective."""
        while not self.is_over():
            self.start()
            time.sleep(CALM_S)
            if gather([self.share()]).mean() <= QUIET:
                return

    def is_over(self) -> bool:
        """Whether the time for waiting is, by the first rank's clock. Collective."""
        return bool(gather([float(time.monotonic() > self._deadline_s)])[0, 0])

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), busy_s(self._core), time.process_time()


def busy_s(core: int | None) -> float:
    """Seconds in which a core did anything since the system started."""
    if core is None:
        return 0.0
    times = psutil.cpu_times(percpu=True)[core]
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice
