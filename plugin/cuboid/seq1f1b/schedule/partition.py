"""Where sequences are cut into segments, and the list of layers into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, seen_keys, segment_flops

#: Cost of the consecutive things ``[start, stop)``. It must not shrink as they become more, on either side.
Cost = Callable[[int, int], float]


def segment_cost(sizes: ModelSizes) -> Cost:
    """The cost that segments are balanced by: the forward of the whole model, head and all.

    No cut is perfect for every stage at once, since the last one, with the head, has more work that doesn't grow with
    the position. This one is right for the stages' sum, and close for each where stages are balanced too.
    """
    return segment_flops(sizes)


def even_cut(length: int, segments: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths as equal as multiples of ``multiple`` can be. Longer ones come first, for they attend to less.

    Raises:
        ConfigError: the sequence is too short.
    """
    _check_length(length, segments, multiple)
    each, rest = divmod(length // multiple, segments)
    return tuple(multiple * (each + (index < rest)) for index in range(segments))


def check_lengths(lengths: Sequence[int], *, length: int | None = None, segments: int, multiple: int = 1) -> None:
    """Check lengths that a user gave.

    Args:
        lengths: of the segments.
        length: S, tokens of the sequence, if it is known.
        segments: k.
        multiple: what each length must be a multiple of.

    Raises:
        ConfigError: they aren't k lengths with the sum S, or the mesh can't divide one.
    """
    given = f"pipeline.partition {list(lengths)}"
    if len(lengths) != segments:
        raise ConfigError(f"{given} has {len(lengths)} lengths, but pipeline.segments is {segments}")
    wrong = next((each for each in lengths if each < 1 or each % multiple), None)
    if wrong is not None:
        raise ConfigError(
            f"{given} has a segment of {wrong} tokens; each needs a multiple of {multiple}, and at least that"
        )
    if length is not None and sum(lengths) != length:
        raise ConfigError(
            f'{given} adds up to {sum(lengths)}, but sequences have {length} tokens; "flops" takes any length'
        )


def cut_sequence(length: int, segments: int, *, multiple: int = 1, cost: Cost) -> tuple[int, ...]:
    """Lengths of the segments such that the costliest one costs as little as possible, exactly.

    Of several such cuts it is the one whose boundaries are nearest to those of equal shares.

    Args:
        length: S, tokens of the sequence, a multiple of ``multiple``.
        segments: k.
        multiple: what each length must be a multiple of.
        cost: of a segment.

    Raises:
        ConfigError: the sequence is too short for so many segments.
    """
    _check_length(length, segments, multiple)
    cut = Cut(length // multiple, segments, lambda start, stop: cost(start * multiple, stop * multiple))
    return tuple(multiple * (stop - start) for start, stop in pairwise((0, *cut.evened(cut.bottleneck()))))


def balance_stages(costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Numbers of consecutive layers such that the costliest stage costs as little as possible, exactly.

    Args:
        costs: of each layer.
        stages: P; each has at least one layer.
        first: what the first stage does besides its layers.
        last: what the last stage does besides, the head above all.

    Raises:
        ConfigError: there are more stages than layers.
    """
    count = len(costs)
    if stages > count:
        raise ConfigError(f"{count} layers can't fill pipeline.stages = {stages}; {count} stages or fewer would work")
    sums = list(accumulate(costs, initial=0 * costs[0]))

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if start == 0 else 0) + (last if stop == count else 0)

    return cut_sequence(count, stages, cost=cost)


def balance_by_flops(sizes: ModelSizes, stages: int, length: int) -> tuple[int, ...]:
    """:func:`balance_stages` by the operations on sequences of ``length`` tokens, those of the head on the last stage.

    Raises:
        ConfigError: there are more stages than layers.
    """
    return balance_stages(sizes.layer_flops(length), stages, last=sizes.head_flops(length))


@dataclass(frozen=True)
class HeadShare:
    """What the head, or the loss with its logits, is beside the layers, by operations.

    Args:
        layers: as many average layers as it is worth.
        of_stage: its part of the stage that has it.
        excess: by how much the costliest stage takes longer than the average of all stages: 0.5 is half as long again.
    """

    layers: float
    of_stage: float
    excess: float

    @classmethod
    def of(cls, sizes: ModelSizes, counts: Sequence[int], length: int) -> HeadShare:
        """Of a model whose stages have these numbers of layers, on sequences of ``length`` tokens."""
        costs, head = sizes.layer_flops(length), sizes.head_flops(length)
        stages = [sum(costs[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]
        stages[-1] += head
        whole = sum(costs) + head
        return cls(head * len(costs) / sum(costs), head / stages[-1], max(stages) * len(stages) / whole - 1)


class MeasuredCut:
    """The cost of a segment as the first steps' times show it.

    Times are explained by a·tokens + b·(keys that the tokens see) + c, none of them negative: projections, attention,
    and what a unit takes whatever its length. The fit is by least squares in exact arithmetic, so that all ranks that
    are given the same times come to the very same cut.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []
        self._seconds: list[Fraction] = []

    def add(self, lengths: Sequence[int], seconds: Sequence[float]) -> None:
        """Take note of the time of each segment of a sequence, forward and backward on all stages together."""
        for (start, stop), time_s in zip(pairwise(accumulate(lengths, initial=0)), seconds, strict=True):
            self._rows.append((stop - start, seen_keys(start, stop), 1))
            self._seconds.append(Fraction(time_s))

    @property
    def is_ready(self) -> bool:
        """Whether there is any time to go by."""
        return any(time_s > 0 for time_s in self._seconds)

    def cost(self) -> Cost:
        """Seconds of a segment, by all the times so far. :attr:`is_ready` must be true."""
        per_token, per_key, constant = (float(weight) for weight in self._fit())

        def seconds(start: int, stop: int) -> float:
            return per_token * (stop - start) + per_key * seen_keys(start, stop) + constant

        return seconds

    def _fit(self) -> list[Fraction]:
        assert self.is_ready
        best, least = [Fraction(0)] * 3, Fraction(0)
        gram = [[Fraction(sum(row[i] * row[j] for row in self._rows)) for j in range(3)] for i in range(3)]
        right = [
            sum((row[i] * time_s for row, time_s in zip(self._rows, self._seconds, strict=True)), Fraction(0))
            for i in range(3)
        ]
        # Without negative weights the best fit is the ordinary one for some of the terms; there are seven choices.
        for chosen in (chosen for size in (1, 2, 3) for chosen in combinations(range(3), size)):
            weights = _solve([[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if weights is None or min(weights) < 0:
                continue
            # The squared error, but for a term that is the same for all choices.
            error = -sum(weight * right[i] for weight, i in zip(weights, chosen, strict=True))
            if error < least:
                best, least = [Fraction(0)] * 3, Fraction(error)
                for weight, i in zip(weights, chosen, strict=True):
                    best[i] = weight
        return best


def _check_length(length: int, segments: int, multiple: int) -> None:
    assert segments >= 1
    assert multiple >= 1
    assert length % multiple == 0
    if length < segments * multiple:
        grain = f" of which each has a multiple of {multiple} tokens" if multiple > 1 else ""
        raise ConfigError(
            f"a sequence of {length} tokens can't be cut into pipeline.segments = {segments}{grain}; "
            f"{max(length // multiple, 1)} or fewer would work"
        )


def _solve(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Solution of a system of linear equations, or None where there isn't just one."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = next((row for row in rows[column:] if row[column] != 0), None)
        if pivot is None:
            return None
        index = next(index for index, row in enumerate(rows) if row is pivot)
        rows[column], rows[index] = pivot, rows[column]
        rows = [
            row if row is pivot else [x - row[column] / pivot[column] * y for x, y in zip(row, pivot, strict=True)]
            for row in rows
        ]
    return [row[-1] / row[column] for column, row in enumerate(rows)]


# --- the search behind every cut: consecutive parts such that the costliest one costs the least ---


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
