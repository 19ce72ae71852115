"""``"stage_balance": "schedule"``: stages whose layers make the simulated step short, rather than the costliest stage.

With few micro-batches most of a step is its start and its end, where a stage waits for those before or behind it. The
shortest step then has stages of unequal cost, and which is best depends on the order of actions, which in turn is made
for the stages' costs. So stages and order are chosen together: stages that are balanced by their cost are the start,
and a hill-climb moves layers between two stages as long as the step that is scheduled for the new stages gets shorter.

All ranks compute the same result, because the search is bounded by the actions that it schedules and not by time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cuboid.errors import ConfigError
from cuboid.models.stages.stage_cut import ASSUMED_LENGTH
from cuboid.seq1f1b.schedule.choice import Comparison, PlacedCosts, Request, compare_schedules
from cuboid.seq1f1b.schedule.partition import HALVES_GAIN, balance_by_flops, balance_halves, whole_if_integer
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes

#: The pipeline rank of each stage.
StageRanks = tuple[int, ...]
#: Number of layers of each stage, which may have half of one.
StageLayers = tuple[float, ...]
#: Total number of actions that may be scheduled to try stages: some ten seconds of Python, on any cluster.
SEARCHED_ACTIONS = 800_000
#: Steps that a search needs about, so that each may have no more than this part of the actions.
_STEPS = 200
#: Modes of backward that are tried for each step, if there are actions enough.
_MODES = 3
#: Schedules that are slower by more than this fraction, with the stages at the start, aren't searched: a search gains
#: hardly more.
_MOST_GAIN = 0.1
#: Fraction by which a step must get shorter to be so for more than rounding.
_LEAST_GAIN = 1e-6


@dataclass(frozen=True)
class StageSearch:
    """Compares schedules, each with the stages that are best for it.

    Args:
        name: the schedule, or ``"auto"`` or another name that covers several.
        request: the pipeline. Its costs are ignored.
        sizes: of the model's layers, with those of halves where stages may begin inside one.
        length: S, tokens of a sequence.
        costs: the costs of stages, given the rank and the number of layers of each.
        searched_actions: total number of actions to schedule before no more stages are tried.
    """

    name: str
    request: Request
    sizes: ModelSizes
    length: int
    costs: Callable[[StageRanks, StageLayers], PlacedCosts]
    searched_actions: int = SEARCHED_ACTIONS

    def compare(self) -> tuple[Comparison, Mapping[StageRanks, StageLayers]]:
        """Return the comparison of the schedules with their best stages, and these stages for each placement.

        With these stages the best schedule's step is no longer than with those balanced by cost.

        Raises:
            ConfigError: see :func:`compare_schedules`.
        """
        layers: dict[StageRanks, StageLayers] = {}

        def costs(rank_of: StageRanks) -> PlacedCosts:
            if rank_of not in layers:
                layers[rank_of] = self._starts(rank_of)[0]
            return self.costs(rank_of, layers[rank_of])

        compared = compare_schedules(self.name, replace(self.request, costs=costs))
        most_s = min(one.timeline.makespan_s for one in compared.fitting) * (1 + _MOST_GAIN)
        # The order of stages is the same for all schedules with one placement, so the fastest of them decides.
        fastest: dict[StageRanks, tuple[float, str, int]] = {}
        for one in compared.fitting:
            candidate = one.timeline.makespan_s, one.name, one.chunks
            if candidate[0] <= most_s:
                fastest[one.rank_of] = min(fastest.get(one.rank_of, candidate), candidate)
        for rank_of, (_, name, chunks) in fastest.items():
            climb = _Climb(self, rank_of, name, chunks, self.searched_actions // len(fastest))
            starts = self._starts(rank_of)
            # The climb tries few rules for each step, and maybe fewer micro-batches: training's own step decides.
            layers[rank_of] = min(dict.fromkeys([*starts, climb.best(starts)]), key=climb.step_s)
        return compare_schedules(self.name, replace(self.request, costs=costs)), layers

    def _starts(self, rank_of: StageRanks) -> list[StageLayers]:
        has_head, lengths = not self.request.spreads_head, (self.length, ASSUMED_LENGTH)
        halves = balance_halves(self.sizes, rank_of, self.length, has_head=has_head)
        uncut = (balance_by_flops(self.sizes, len(rank_of), length, has_head=has_head) for length in lengths)
        return [halves, *uncut]


class _Climb:
    """The search for one schedule, whose stages have their places."""

    def __init__(self, search: StageSearch, rank_of: StageRanks, name: str, chunks: int, actions: int) -> None:
        self._search, self._rank_of, self._name, self._chunks = search, rank_of, name, chunks
        request = search.request
        head_ranks = request.ranks if request.spreads_head else 0
        per_micro_batch = (3 * len(rank_of) + 2 * head_ranks) * request.segments
        # Of many micro-batches, the first fill the pipeline; each further one takes the busiest rank's time.
        fills = -(-2 * request.ranks // request.segments) + 1
        self._micro_batches = min(request.micro_batches, max(fills, actions // (_STEPS * per_micro_batch)))
        step = per_micro_batch * self._micro_batches
        self._tried = step * max(1, min(_MODES, actions // (_STEPS * step)))
        self._steps_left = max(1, actions // self._tried)
        self._known: dict[StageLayers, float] = {}

    def best(self, starts: Sequence[StageLayers]) -> StageLayers:
        """The best stages reached from the best start.

        They are of whole layers, unless the step is shorter by :data:`HALVES_GAIN` with halves.
        """
        uncut = min(filter(_is_whole, starts), key=self._estimated_s)
        uncut = self._reached(uncut, grains=(1,), fewest_left=self._steps_left // 2)
        halves = self._reached(min((uncut, *starts), key=self._estimated_s), grains=(0.5, 1))
        is_worth_it = self._estimated_s(halves) <= (1 - HALVES_GAIN) * self._estimated_s(uncut)
        return halves if _is_whole(halves) or is_worth_it else uncut

    def step_s(self, layers: StageLayers) -> float:
        """Time of the step that training would run with these stages; infinite beyond the memory limit."""
        return self._scheduled(layers, self._search.request.micro_batches, self._search.request.tried_actions)[0]

    def _reached(self, layers: StageLayers, grains: Sequence[float], fewest_left: int = 0) -> StageLayers:
        """The stages from which no move of a grain makes the step shorter, or the last before the steps are spent.

        A shorter step is taken at once, and the moves go on from there rather than from the first.
        """
        best_s = self._estimated_s(layers)
        moves = list(_moves(len(layers), grains))
        place = failed = 0
        while failed < len(moves) and self._steps_left > fewest_left:
            moved = _moved(layers, *moves[place % len(moves)])
            place, failed = place + 1, failed + 1
            if self._is_possible(moved) and self._estimated_s(moved) < best_s * (1 - _LEAST_GAIN):
                layers, best_s, failed = moved, self._estimated_s(moved), 0
        return layers

    def _is_possible(self, layers: StageLayers) -> bool:
        """Whether each stage has at least one layer, and those that begin inside one can and are worth trying."""
        if min(layers) < 1:
            return False
        ends = list(accumulate(layers))
        return all(
            end == math.floor(end)
            or (
                self._search.sizes.layers[math.floor(end)].second_weights is not None
                and self._rank_of[stage] != self._rank_of[stage + 1]
            )
            for stage, end in enumerate(ends[:-1])
        )

    def _estimated_s(self, layers: StageLayers) -> float:
        if layers not in self._known:
            self._steps_left = max(0, self._steps_left - 1)
            step_s, busiest_s = self._scheduled(layers, self._micro_batches, self._tried)
            further = self._search.request.micro_batches - self._micro_batches
            self._known[layers] = step_s + further * busiest_s / self._micro_batches
        return self._known[layers]

    def _scheduled(self, layers: StageLayers, micro_batches: int, tried: int) -> tuple[float, float]:
        """Time of a step, and of the busiest rank's part in it."""
        search = self._search
        request = replace(
            search.request,
            micro_batches=micro_batches,
            costs=lambda rank_of: search.costs(rank_of, layers),
            chunks=self._chunks,
            tried_actions=tried,
        )
        try:
            timeline = compare_schedules(self._name, request).best.timeline
        except ConfigError:
            # A fixed schedule may exceed the limit with other stages.
            return math.inf, math.inf
        return timeline.makespan_s, max(timeline.busy_s)


def _moves(stages: int, grains: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Every way in which one stage gives layers to another: neighbours first, since these move the fewest layers."""
    for distance in range(1, stages):
        for first in range(stages - distance):
            for grain in grains:
                yield first, first + distance, grain
                yield first, first + distance, -grain


def _moved(layers: StageLayers, giver: int, taker: int, count: float) -> StageLayers:
    """Stages where one has ``count`` fewer layers and the other as many more; those between have others, as many."""
    moved = list(layers)
    moved[giver] -= count
    moved[taker] += count
    return tuple(map(whole_if_integer, moved))


def _is_whole(layers: StageLayers) -> bool:
    return all(end == math.floor(end) for end in accumulate(layers))
