"""The search behind every cut: consecutive parts such that the costliest one costs the least."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

#: Cost of the consecutive things ``[start, stop)``. It must not shrink as they become more, on either side.
Cost = Callable[[int, int], float]


class Cut:
    """A search for boundaries among ``count`` grains, of which each of ``parts`` parts has at least one."""

    def __init__(self, count: int, parts: int, cost: Cost) -> None:
        self._count, self._parts, self._cost = count, parts, cost

    def bottleneck(self) -> float:
        """The least cost that the costliest part can have.

        It lies between ``low`` and ``high``, of which the latter is always that of a cut at hand. A bound between the
        two either leads to a cut, whose own costliest part is the new ``high``, or it falls short; the least cost that
        was over it is then the new ``low``, for with any bound below that all would come out the same.
        """
        stops = (*range(1, self._parts), self._count)
        low, high = self._cost(0, 1), self._costliest(stops)
        while low < high:
            bound = (low + high) // 2 if isinstance(low, int) and isinstance(high, int) else low + (high - low) / 2
            bound = min(max(bound, low), high)
            found = self._greedy(bound)
            if isinstance(found, tuple):
                reached = self._costliest(found)
                if reached == high:
                    # Only for floats, between which nothing lies.
                    break
                high = reached
            else:
                low = found
        return high

    def evened(self, bound: float) -> tuple[int, ...]:
        """Ends of the parts, none over ``bound``, each end as near to that of an equal share as can be."""
        earliest = self._earliest(bound)
        total = self._cost(0, self._count)
        stops: list[int] = []
        start = 0
        for part in range(1, self._parts):
            latest = self._furthest(start, bound, self._count - self._parts + part)
            wanted = self._share(total * part / self._parts)
            start = min(max(wanted, earliest[part - 1], start + 1), latest)
            stops.append(start)
        return (*stops, self._count)

    def _share(self, cost: float) -> int:
        """The end of a first part that costs as nearly as can be so much."""
        stop = _bisect(lambda stop: self._cost(0, stop) <= cost, 1, self._count - 1)
        return min(stop, stop + 1, key=lambda stop: abs(self._cost(0, stop) - cost))

    def _costliest(self, stops: tuple[int, ...]) -> float:
        return max(self._cost(start, stop) for start, stop in pairwise((0, *stops)))

    def _greedy(self, bound: float) -> tuple[int, ...] | float:
        """A cut with no part over ``bound``, or the least cost over it that stood in the way."""
        stops: list[int] = []
        start, over = 0, float("inf")
        for part in range(1, self._parts + 1):
            limit = self._count - self._parts + part
            if self._cost(start, start + 1) > bound:
                return min(over, self._cost(start, start + 1))
            stop = self._furthest(start, bound, limit)
            if stop < limit:
                over = min(over, self._cost(start, stop + 1))
            stops.append(stop)
            start = stop
        return tuple(stops) if start == self._count else over

    def _furthest(self, start: int, bound: float, limit: int) -> int:
        return _bisect(lambda stop: self._cost(start, stop) <= bound, start + 1, limit)

    def _earliest(self, bound: float) -> list[int]:
        """For each end but the last, the least place from which the parts after it can do with ``bound``."""
        starts = [self._count]
        for part in range(self._parts - 1, 0, -1):
            starts.append(starts[-1] - self._furthest_back(starts[-1], bound, starts[-1] - part))
        return starts[:0:-1]

    def _furthest_back(self, stop: int, bound: float, limit: int) -> int:
        return _bisect(lambda size: self._cost(stop - size, stop) <= bound, 1, limit)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest number from ``low`` to ``high`` for which something holds, which holds for all smaller ones too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
