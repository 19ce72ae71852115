"""Time that is worth measuring where several ranks share each core.

As ``benchmarks/quiet.py``, whose watch is for ranks with a core each: beside other ranks on the same core it would take
them for strangers.
"""

from __future__ import annotations

import time

import psutil
from quiet import QUIET, gather

#: How long the machine must have been quiet before a step begins.
_CALM_S = 0.5


class Watch:
    """Tells how much of the ranks' cores processes other than the ranks take.

    Making one is collective.

    Args:
        core: of this rank; None where nothing can be known, and all is taken to be quiet then.
        limit_s: how long in all to wait for quiet times, or to repeat what was disturbed.
    """

    def __init__(self, core: int | None, limit_s: float) -> None:
        everyone = gather([-1.0 if core is None else float(core)])[:, 0].tolist()
        self._cores = None if core is None else sorted({int(each) for each in everyone})
        self._deadline_s = time.monotonic() + limit_s
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._begin = self._now()

    def foreign(self) -> float:
        """The part of the cores' time since :meth:`start` that others took, from 0 to 1. Collective."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        if self._cores is None:
            return 0.0
        all_s = gather([own_s])[:, 0].sum().item()
        return max(0.0, (busy_s - all_s) / (wall_s * len(self._cores)))

    def wait(self) -> None:
        """Until the cores are quiet, or the time is over. Collective."""
        while not self.is_over():
            self.start()
            time.sleep(_CALM_S)
            if gather([self.foreign()])[:, 0].mean().item() <= QUIET:
                return

    def is_over(self) -> bool:
        """Whether the time for waiting is, by the first rank's clock. Collective."""
        return bool(gather([float(time.monotonic() > self._deadline_s)])[0, 0])

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._busy_s(), time.process_time()

    def _busy_s(self) -> float:
        if self._cores is None:
            return 0.0
        each = [psutil.cpu_times(percpu=True)[core] for core in self._cores]
        return sum(sum(t) - t.idle - getattr(t, "iowait", 0.0) - t.guest - t.guest_nice for t in each)
