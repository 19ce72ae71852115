"""The best of many layouts that fit in memory: compared by formulas, the first ones counted in their layers' code."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from cuboid.errors import ConfigError
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import ends_memory, fullest, states_bytes, usable_bytes
from cuboid.planner.cost.step import StepCost
from cuboid.planner.estimate import Estimate

_logger = logging.getLogger(__name__)

Goal = Literal["fastest", "smallest", "fewest"]
#: How many layouts of a set are counted, at most, until one fits: a count takes seconds for each kind of mesh.
MOST_COUNTED = 40
#: How many layouts are compared to name the smallest one when nothing fits.
_COMPARED = 32


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, the best one first, and the number of layouts that divide model, batch and cluster.

    Args:
        best: layouts that fit by formulas, the first one also by its count.
        considered: how many were compared.
        refused: how many would come before the first one, but don't fit by their counts.
    """

    best: tuple[Estimate, ...]
    considered: int
    refused: int = 0


def best_of(sets: Iterable[Iterable[StepCost]], what: str, *, goal: Goal = "fastest", count: int = 10) -> SearchResult:
    """The best of one model's layouts on one cluster that fit in memory.

    Args:
        sets: sets of layouts, the next of which is asked for only if none of those before fits; comparing layouts is
            fast if they share ``known`` layer times.
        what: names model, work and cluster in error messages.
        goal, count: as in :func:`cuboid.planner.search.search`.

    Raises:
        ConfigError: there are no layouts, or none fits.
    """
    every: list[StepCost] = []
    refused: list[Estimate] = []
    is_bounded = False
    for costs in sets:
        added = list(costs)
        every += added
        best: list[Estimate] = []
        of_set = 0
        for one in _in_order(added, goal):
            if not best and not one.fits_counted:
                refused.append(one)
                of_set += 1
                if of_set == MOST_COUNTED:
                    is_bounded = True
                    break
                continue
            if all(_group(one.layout) != _group(better.layout) for better in best):
                best.append(one)
            if len(best) == count:
                break
        if best:
            if is_bounded:
                _logger.warning(
                    "%s: the best %d layouts that fit by formulas don't by what is alive in their layers; later ones "
                    "weren't counted, and among them may be a better one than %s",
                    what, MOST_COUNTED, best[0].layout,
                )  # fmt: skip
            return SearchResult(tuple(best), len(every), len(refused))
    if refused:
        raise ConfigError(_none_counted_fits(what, refused, is_bounded=is_bounded))
    raise ConfigError(_nothing_fits(what, every))


def _in_order(costs: Sequence[StepCost], goal: Goal) -> Iterator[Estimate]:
    """Estimates that fit by formulas, the best one first; only as many are made as the caller asks for."""
    candidates = []
    for number, cost in enumerate(costs):
        least = states_bytes(cost)
        if least <= usable_bytes(cost.cluster):
            candidates.append((least if goal == "smallest" else cost.least_s(), number, cost))
    candidates.sort(key=lambda candidate: candidate[:2])
    waiting: list[tuple[float, int, Estimate]] = []
    for order, (bound, _, cost) in enumerate(candidates):
        # Candidates are sorted by their bounds: no later one can be better.
        while waiting and waiting[0][0] < bound:
            yield heappop(waiting)[-1]
        if ends_memory(cost) <= usable_bytes(cost.cluster):
            one = Estimate.of(cost)
            if one.fits:
                heappush(waiting, (_value(one, goal), order, one))
    while waiting:
        yield heappop(waiting)[-1]


def improved(best: Sequence[Estimate], more: Iterable[Estimate], count: int) -> list[Estimate]:
    """The fastest ``count`` of some estimates and of further ones that fit, the first one by its count, too."""
    for one in sorted(more, key=lambda estimate: estimate.time.total_s):
        if one.fits and (one.time.total_s >= best[0].time.total_s or one.fits_counted):
            best = _with(best, one)
    return list(best[:count])


def _with(estimates: Iterable[Estimate], one: Estimate) -> list[Estimate]:
    """Add an estimate and sort; of layouts of one group only the best stays."""
    best: dict[Any, Estimate] = {}
    for estimate in sorted([*estimates, one], key=lambda estimate: estimate.time.total_s):
        best.setdefault(_group(estimate.layout), estimate)
    return list(best.values())


def _group(layout: Layout) -> tuple[Any, ...]:
    """What layouts of one group have in common."""
    return layout.mesh, layout.stages, layout.replicas, layout.segments


def _value(estimate: Estimate, goal: Goal) -> float:
    return estimate.memory_bytes if goal == "smallest" else estimate.time.total_s


def _none_counted_fits(what: str, refused: Sequence[Estimate], *, is_bounded: bool) -> str:
    counted_bytes, _, smallest = min(
        (estimate.counted_bytes or 0.0, number, estimate) for number, estimate in enumerate(refused)
    )
    others = f"; more than {MOST_COUNTED} of a kind weren't counted" if is_bounded else ""
    return (
        f"no layout fits {what} with all that is alive while a layer runs, counted in its own code: of the "
        f"{len(refused)} best that fit by formulas, {smallest.layout} needs the least, {counted_bytes / 2**30:.1f} GiB "
        f"a GPU, and {smallest.limit_bytes / 2**30:.1f} can be used{others}; take more GPUs, or shorter sequences"
    )


def _nothing_fits(what: str, costs: Sequence[StepCost]) -> str:
    if not costs:
        return (
            f"no layout divides {what}: the batch must be a multiple of the replicas times their rows, and heads and "
            "features of the mesh; try a global batch with more divisors, or another number of GPUs"
        )
    memory, cost = _smallest(costs)
    return (
        f"no layout fits {what}: the smallest found, {cost.layout}, needs {memory / 2**30:.1f} GiB a GPU, and "
        f"{usable_bytes(cost.cluster) / 2**30:.1f} can be used; take more GPUs, or shorter sequences"
    )


def _smallest(costs: Sequence[StepCost]) -> tuple[float, StepCost]:
    """The layout that needs the least memory, with this memory, of those that are likely to; the faster one of equals.

    They are those with the smallest states, and of equal ones those that keep the fewest activations.
    """

    def likely_size(cost: StepCost) -> tuple[float, bool, bool, float, bool, bool]:
        layout = cost.layout
        tokens = layout.micro_batch / layout.mesh.size / layout.segments
        waits = layout.gradient_sync == "step", layout.weight_gather == "step"
        return states_bytes(cost), layout.checkpointing == "none", not layout.moves, tokens, *waits

    likely = sorted(costs, key=likely_size)[:_COMPARED]
    memory, _, cost = min(((fullest(cost).total, cost.least_s(), cost) for cost in likely), key=lambda one: one[:2])
    return memory, cost
