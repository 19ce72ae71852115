"""Cuts sequences into segments, and the list of layers into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import floor

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.unit_costs import (
    LayerSizes,
    ModelSizes,
    ends_of,
    layers_of_stages,
    seen_keys,
    segment_flops,
)

#: Cost of consecutive items (tokens, layers) ``[start, stop)``. It must not shrink when the range grows at either end.
Cost = Callable[[int, int], float]


def segment_cost(sizes: ModelSizes) -> Cost:
    """Return the cost by which segments are balanced: the forward of the whole model, including the head.

    No cut is perfect for every stage at once, because the last stage, with the head, has more work that doesn't grow
    with the position. This cost is right for the sum over stages, and close for each stage if the stages are balanced.
    """
    return segment_flops(sizes)


def even_cut(length: int, segments: int, multiple: int = 1) -> tuple[int, ...]:
    """Return lengths as equal as multiples of ``multiple`` can be. Longer ones come first, as they attend to less.

    Raises:
        ConfigError: the sequence is too short.
    """
    _check_length(length, segments, multiple)
    share, remainder = divmod(length // multiple, segments)
    return tuple(multiple * (share + (index < remainder)) for index in range(segments))


def check_lengths(lengths: Sequence[int], *, length: int | None = None, segments: int, multiple: int = 1) -> None:
    """Check the segment lengths that a user gave.

    Args:
        lengths: tokens of each segment.
        length: S, tokens of the sequence, if known.
        segments: k.
        multiple: what each length must be a multiple of.

    Raises:
        ConfigError: they aren't k lengths with the sum S, or one isn't a positive multiple of ``multiple``.
    """
    setting = f"pipeline.partition {list(lengths)}"
    if len(lengths) != segments:
        raise ConfigError(f"{setting} has {len(lengths)} lengths, but pipeline.segments is {segments}")
    wrong = next((tokens for tokens in lengths if tokens < 1 or tokens % multiple), None)
    if wrong is not None:
        why = ", which the mesh's sequence and hidden axes can share" if multiple > 1 else ""
        raise ConfigError(f"{setting} has a segment of {wrong} tokens; use multiples of {multiple}, at least that{why}")
    if length is not None and sum(lengths) != length:
        raise ConfigError(
            f"{setting} adds up to {sum(lengths)}, but sequences have {length} tokens; give sequences of "
            f'{sum(lengths)} tokens, or take "flops", which cuts any length'
        )


def cut_sequence(length: int, segments: int, *, multiple: int = 1, cost: Cost) -> tuple[int, ...]:
    """Return the segment lengths that minimize the cost of the costliest segment, exactly.

    Of several such cuts, this is the one whose boundaries are nearest to those of equal shares.

    Args:
        length: S, tokens of the sequence, a multiple of ``multiple``.
        segments: k.
        multiple: what each length must be a multiple of.
        cost: returns the cost of a segment.

    Raises:
        ConfigError: the sequence is too short for so many segments.
    """
    _check_length(length, segments, multiple)
    cut = Cut(length // multiple, segments, lambda start, stop: cost(start * multiple, stop * multiple))
    return tuple(multiple * (stop - start) for start, stop in pairwise((0, *cut.evened(cut.bottleneck()))))


def balance_stages(costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimizes the cost of the costliest stage, exactly.

    Args:
        costs: cost of each layer.
        stages: P; each has at least one layer.
        first: cost of the first stage besides its layers.
        last: cost of the last stage besides its layers, mainly the head.

    Raises:
        ConfigError: there are more stages than layers.
    """
    count = len(costs)
    if stages > count:
        raise ConfigError(f"{count} layers can't fill pipeline.stages = {stages}; {count} stages or fewer would work")
    # The initial zero has the type of the costs, so that integers (and fractions) stay exact.
    sums = list(accumulate(costs, initial=0 * costs[0]))

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if start == 0 else 0) + (last if stop == count else 0)

    return cut_sequence(count, stages, cost=cost)


def balance_by_flops(sizes: ModelSizes, stages: int, length: int, *, has_head: bool = True) -> tuple[int, ...]:
    """:func:`balance_stages` by the operations on sequences of ``length`` tokens.

    The head counts for the last stage, unless that has none of its own (``has_head``) because the head is spread.

    Raises:
        ConfigError: there are more stages than layers.
    """
    return balance_stages(sizes.layer_flops(length), stages, last=sizes.head_flops(length) if has_head else 0)


#: Fraction by which stages that begin inside a layer must make the costliest one cheaper, for what they add: a sum of
#: the residual stream with zeros.
HALVES_GAIN = 0.02


def balance_halves(
    sizes: ModelSizes, placement: Sequence[int], length: int, *, has_head: bool = True
) -> tuple[float, ...]:
    """As :func:`balance_by_flops`, for stages that may begin inside a layer where that is worth it.

    Args:
        sizes: which know the halves of the layers that can be cut.
        placement: the pipeline rank of each stage. Stages that follow each other on one rank share no layer.
        length, has_head: of :func:`balance_by_flops`.

    Raises:
        ConfigError: there are more stages than layers.
    """
    head = sizes.head_flops(length) if has_head else 0
    uncut = balance_by_flops(sizes, len(placement), length, has_head=has_head)
    pieces: list[tuple[LayerSizes, float]] = []
    for layer in sizes.layers:
        pieces += [(layer, 1)] if layer.second_weights is None else [(half, 0.5) for half in layer.halves]
    costs = ModelSizes(tuple(piece for piece, _ in pieces), sizes.head).layer_flops(length)
    stops = [stop for _, stop in ends_of(balance_stages(costs, len(placement), last=head))]
    ends = [sum(count for _, count in pieces[:stop]) for stop in stops]
    for stage, end in enumerate(ends[:-1]):
        if placement[stage] == placement[stage + 1]:
            ends[stage] = floor(end)
    halves = tuple(whole_if_integer(stop - start) for start, stop in pairwise((0, *ends)))

    def costliest(counts: Sequence[float]) -> int:
        stages = stage_flops(sizes, counts, length)
        stages[-1] += head
        return max(stages)

    is_worth_it = min(halves) >= 1 and costliest(halves) <= (1 - HALVES_GAIN) * costliest(uncut)
    return halves if is_worth_it else uncut


def stage_flops(sizes: ModelSizes, counts: Sequence[float], length: int) -> list[int]:
    """Forward operations of each stage's layers, on sequences of ``length`` tokens."""
    return [sum(ModelSizes(layers, 0).layer_flops(length)) for layers in layers_of_stages(sizes, counts)]


def whole_if_integer(number: float) -> float:
    """A number of layers, as an integer if it is one."""
    return int(number) if number == floor(number) else number


@dataclass(frozen=True)
class HeadShare:
    """The operations of the head (or of the loss and its logits), compared with those of the layers."""

    #: The head's operations, as a number of average layers.
    layers: float
    #: The head's fraction of its stage's operations.
    of_stage: float
    #: By how much the costliest stage exceeds the average of all stages: 0.5 is half as long again.
    excess: float

    @classmethod
    def of(cls, sizes: ModelSizes, counts: Sequence[float], length: int) -> HeadShare:
        """Compute it for a model whose stages have these numbers of layers, on sequences of ``length`` tokens."""
        costs, head = sizes.layer_flops(length), sizes.head_flops(length)
        stages = stage_flops(sizes, counts, length)
        stages[-1] += head
        total = sum(costs) + head
        return cls(head * len(costs) / sum(costs), head / stages[-1], max(stages) * len(stages) / total - 1)


class MeasuredCut:
    """The cost of a segment, fitted to the measured times of the first steps.

    The model is a·tokens + b·(keys that the tokens see) + c, with no coefficient negative: projections, attention, and
    a unit's constant overhead. The least-squares fit uses exact arithmetic, so that all ranks compute the same cut from
    the same times.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []
        self._seconds: list[Fraction] = []

    def add(self, lengths: Sequence[int], seconds: Sequence[float]) -> None:
        """Add the time of each segment of a sequence: its forward and backward, summed over all stages."""
        for (start, stop), time_s in zip(ends_of(lengths), seconds, strict=True):
            self._rows.append((stop - start, seen_keys(start, stop), 1))
            self._seconds.append(Fraction(time_s))

    @property
    def is_ready(self) -> bool:
        """Whether there is any time to fit."""
        return any(time_s > 0 for time_s in self._seconds)

    def cost(self) -> Cost:
        """Return the cost in seconds, fitted to all times so far. :attr:`is_ready` must be true."""
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
        # The best fit without negative weights is the unconstrained fit of some subset of the three terms (columns of
        # ``_rows``), so try all seven subsets.
        for terms in (terms for size in (1, 2, 3) for terms in combinations(range(3), size)):
            weights = _solve([[gram[i][j] for j in terms] for i in terms], [right[i] for i in terms])
            if weights is None or min(weights) < 0:
                continue
            # The squared error, minus a term that is the same for all subsets.
            error = -sum(weight * right[i] for weight, i in zip(weights, terms, strict=True))
            if error < least:
                best, least = [Fraction(0)] * 3, Fraction(error)
                for weight, i in zip(weights, terms, strict=True):
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
    """Solve a system of linear equations; return None unless there is exactly one solution."""
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


# --- the search used for every cut: consecutive parts that minimize the cost of the costliest one ---


class Cut:
    """Searches boundaries that cut ``count`` grains (the smallest pieces) into ``parts`` parts, none of them empty."""

    def __init__(self, count: int, parts: int, cost: Cost) -> None:
        self._count, self._parts, self._cost = count, parts, cost

    def bottleneck(self) -> float:
        """Return the least cost that the costliest part can have.

        It lies between ``low`` and ``high``, where ``high`` is always reached by a known cut. A greedy search with a
        bound between the two either finds a cut, whose costliest part becomes the new ``high``, or it fails. Then the
        least cost that exceeded the bound becomes the new ``low``: any smaller bound would fail in the same way.
        """
        stops = (*range(1, self._parts), self._count)
        low, high = self._cost(0, 1), self._costliest(stops)
        while low < high:
            bound = (low + high) // 2 if isinstance(low, int) and isinstance(high, int) else low + (high - low) / 2
            bound = min(max(bound, low), high)
            result = self._greedy(bound)
            if isinstance(result, tuple):
                reached = self._costliest(result)
                if reached == high:
                    # Only with floats: ``low`` and ``high`` are adjacent numbers.
                    break
                high = reached
            else:
                low = result
        return high

    def evened(self, bound: float) -> tuple[int, ...]:
        """Return the ends of parts that cost at most ``bound``, each as near as possible to that of an equal share."""
        earliest = self._earliest(bound)
        total = self._cost(0, self._count)
        stops: list[int] = []
        start = 0
        for part in range(1, self._parts):
            latest = self._furthest(start, bound, self._count - self._parts + part)
            target = self._share(total * part / self._parts)
            start = min(max(target, earliest[part - 1], start + 1), latest)
            stops.append(start)
        return (*stops, self._count)

    def _share(self, cost: float) -> int:
        """Return the end of the part starting at 0 whose cost is nearest to ``cost``."""
        stop = _bisect(lambda stop: self._cost(0, stop) <= cost, 1, self._count - 1)
        return min(stop, stop + 1, key=lambda stop: abs(self._cost(0, stop) - cost))

    def _costliest(self, stops: tuple[int, ...]) -> float:
        return max(self._cost(start, stop) for start, stop in pairwise((0, *stops)))

    def _greedy(self, bound: float) -> tuple[int, ...] | float:
        """Return a cut with no part over ``bound``; if there is none, the least cost over it that was met."""
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
        """Return, for each end but the last, the earliest place from which the parts after it can keep to ``bound``."""
        starts = [self._count]
        for part in range(self._parts - 1, 0, -1):
            starts.append(starts[-1] - self._furthest_back(starts[-1], bound, starts[-1] - part))
        return starts[:0:-1]

    def _furthest_back(self, stop: int, bound: float, limit: int) -> int:
        return _bisect(lambda size: self._cost(stop - size, stop) <= bound, 1, limit)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the greatest number from ``low`` to ``high`` for which ``holds``, which must hold for all smaller ones."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
