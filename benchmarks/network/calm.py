"""How much of the machine other processes take, seen from the process that has the ranks."""

from __future__ import annotations

import time

import psutil
from quiet import CALM_S, QUIET


class Bystanders:
    """Watches the whole machine, for ranks that share all of its cores.

    Args:
        limit_s: how long in all to wait for quiet times, or to repeat what was disturbed.
    """

    def __init__(self, limit_s: float) -> None:
        self._cores = psutil.cpu_count() or 1
        self._deadline_s = time.monotonic() + limit_s
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._begin = self._now()

    def share(self, ranks_s: float) -> float:
        """The part of the machine that others took since :meth:`start`, from 0 to 1.

        Args:
            ranks_s: processor time of all ranks since then.
        """
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return max(0.0, (busy_s - own_s - ranks_s) / (wall_s * self._cores))

    def wait(self) -> None:
        """Until the machine is quiet, or the time is over. The ranks must be idle."""
        while not self.is_over():
            self.start()
            time.sleep(CALM_S)
            if self.share(0.0) <= QUIET:
                return

    def is_over(self) -> bool:
        """Whether the time for waiting is."""
        return time.monotonic() > self._deadline_s

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # Interrupts are left out: on these machines nearly all of them are the ranks' own packets.
        busy_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return time.perf_counter(), busy_s, time.process_time()
