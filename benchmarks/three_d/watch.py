"""Time that is worth measuring where several ranks share each core."""

from __future__ import annotations

import time

import quiet
from quiet import busy_s, gather


class Watch(quiet.Watch):
    """As ``benchmarks/quiet.py``'s, which is for ranks with a core each: beside other ranks on the same core it would
    take them for strangers.

    Making one is collective.
    """

    def __init__(self, core: int | None, limit_s: float) -> None:
        everyone = gather([-1.0 if core is None else float(core)])[:, 0].tolist()
        self._cores = None if core is None else sorted({int(each) for each in everyone})
        super().__init__(core, limit_s)

    def share(self) -> float:
        """The part of all the ranks' cores that others took since :meth:`start`, from 0 to 1. Collective."""
        wall_s, all_busy_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        if self._cores is None:
            return 0.0
        all_s = gather([own_s])[:, 0].sum().item()
        return max(0.0, (all_busy_s - all_s) / (wall_s * len(self._cores)))

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), sum(map(busy_s, self._cores or [])), time.process_time()
