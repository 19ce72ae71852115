"""Schedules by list scheduling: actions of any cost, split backwards, several stages per rank, a memory limit.

The step is simulated in the order of time. A free rank immediately starts one of the actions whose inputs have arrived;
a rule selects which. Three orders are fixed, so that gradients are summed in the order of 1F1B: a stage's forwards go
through the micro-batches and segments from first to last; its backwards go through the micro-batches from first to last
and through each one's segments from last to first; its weight gradients follow the order of its backwards.

**No deadlock.** A segment's backward needs the forward of all segments of its micro-batch on all stages, so a rank
whose memory is full of forwards may wait forever. As in the banker's algorithm (Dijkstra, 1965), a forward of
micro-batch m is therefore started only if, for each unfinished micro-batch j < m on this rank,

    what the micro-batches from j on keep + what j's missing forwards will keep <= limit

stays true. Weight gradients that are ready don't count there: they need no memory and free what they keep. The
condition depends on one rank alone, and the order of micro-batches is the same on all ranks. So some action can always
run. Take the first unfinished micro-batch. If a forward of it is missing, one whose input has arrived fits, at the
latest after its rank's pending weight gradients. If none is missing, its next backward can run: where backwards take
more memory than they free, the headroom is reserved for that.

**A head that is spread.** Each rank has a share of every unit's head, in two actions: H once the last stage's forward
is done, and G once H is done on all ranks; the last stage's backward waits for G on all ranks. Both go through the
units in the order of the forwards, on all ranks, and come before everything else, because all backwards wait for them.
They take no part of the limit. A share's logits are kept from H to G, so a rank is at most :data:`_MOST_SHARES` units
ahead with H. That can't deadlock: H of the first unit whose G isn't done on all ranks is always allowed.

What they and that backward wait for comes from a collective, which a rank joins once the last computation that
contributes to it has started, after what the rank computes at that time
(:func:`~cuboid.seq1f1b.schedule.lowering.insert_messages_once_sent`). So it arrives when these computations are over on
all ranks. Ranks drift as well, and in a fixed order the others idle for the slowest: each result is placed as if it had
to wait for a *slack* more, in which a rank does something else. Units are then kept for longer, which a low limit
doesn't allow. So several slacks are tried, and the orders are compared as if each collective were :data:`_LATE` average
actions late.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, product

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.lowering import insert_messages_once_sent
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import ActionGraph
from cuboid.seq1f1b.schedule.unit_costs import INPUT_GRADIENT_FREES

#: Total number of actions that may be scheduled while trying rules and modes: a few seconds of Python. One combination
#: is always tried.
TRIED_ACTIONS = 400_000
#: Fraction by which a step may be longer if the weight gradients of whole micro-batches are one product each.
_MICRO_BATCH_GAIN = 0.005
#: Most units of which a rank keeps its share of the logits, between H and G, of a head that is spread.
_MOST_SHARES = 2
#: How late, in average actions, collectives are taken to be where orders are compared.
_LATE = 0.25
#: Average actions between a collective's end and the place of what needs it. Rules are compared with the first.
_SLACKS = (_LATE, 0.0, 0.5, 1.0, 2.0)
#: One in so many of the tried actions is for other slacks of the best rules; the best one's are tried in any case.
_SLACKS_SHARE = 16
#: For rounding errors in sums of floats.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ActionCosts:
    """Time and memory costs of a pipeline's actions.

    Memory is measured in *sequences*: 1 is what one sequence keeps on that rank, over all its stages.

    Args:
        duration_s: duration of an action, in seconds or any other unit of time.
        kept: given a forward, what its unit keeps for backward, in sequences. The units of a micro-batch on one rank
            add up to 1 if all sequences are equally long.
        transfer_s: time from the end of an action until its result has arrived on another rank.
        input_gradient_frees: fraction of ``kept`` that I frees; W frees the rest. Negative if I allocates more than it
            frees.
        most_waiting: maximum number of a rank's units between I and W; None for no limit. Under activation
            checkpointing, I recomputes what W needs, which is many times what the forward kept: with 1, no more of it
            is alive at a time than in a whole backward.
    """

    duration_s: Callable[[Action], float]
    kept: Callable[[Action], float]
    transfer_s: float = 0.0
    input_gradient_frees: float = INPUT_GRADIENT_FREES
    most_waiting: int | None = None


class BackwardMode(Enum):
    """How a unit's backward runs."""

    SPLIT = "the input gradient in I, the weight gradient in W when there is time"
    WHOLE = "in one action, B"
    #: Consecutive Ws can be computed as one product, and their gradient reduced once.
    SPLIT_BY_MICRO_BATCH = "as SPLIT, with the W of a micro-batch's segments in a run where memory allows"


@dataclass(frozen=True)
class _Rule:
    """Selects one of several actions that can start."""

    #: Prefer a forward to a backward.
    forward_first: bool
    #: Of the forwards of one micro-batch, prefer the earliest stage's; otherwise the latest stage's.
    early_forward: bool
    #: Of several backwards, prefer the earliest stage's; otherwise the latest stage's.
    early_backward: bool


#: In the order in which they are tried; large pipelines only try the first ones.
_RULES = tuple(_Rule(*flags) for flags in product((False, True), (False, True), (True, False)))


def list_schedule(
    shape: PipelineShape,
    rank_of: Sequence[int],
    costs: ActionCosts,
    limits: Sequence[float],
    modes: Sequence[BackwardMode] = tuple(BackwardMode),
    tried_actions: int = TRIED_ACTIONS,
) -> Schedule:
    """Return the shortest of the schedules that several rules produce. Deterministic: the same on every rank.

    For large pipelines not all combinations of rules and modes are tried: the first of ``modes`` always is, others if
    ``tried_actions`` allows. Among schedules of about the same length, one is preferred that runs the weight gradients
    of a micro-batch consecutively.

    Args:
        shape: the pipeline's shape; its stages are those of all ranks.
        rank_of: the rank of each stage.
        costs: the costs of the actions.
        limits: for each rank, the most that its units may keep at a time, in sequences (see :class:`ActionCosts`).
        modes: the ways in which a unit's backward may run.
        tried_actions: total number of actions to schedule before no more rules are tried.

    Raises:
        ConfigError: a limit is less than what one micro-batch needs.
    """
    # With one stage per rank there is never more than one forward and one backward to choose from, so only
    # ``forward_first`` matters.
    rules = _RULES if shape.stages > len(limits) else (_RULES[0], _RULES[4])
    # A unit has at most three actions on each stage, F, I and W, and two on each rank that shares the head.
    count = (3 * shape.stages + 2 * shape.head_ranks) * shape.units
    tries = max(1, tried_actions // count)
    tables = {mode: _Tables(shape, rank_of, costs, limits, mode) for mode in islice(modes, tries)}
    tried = islice(product(rules, modes), tries)
    orders = sorted((_Search(tables[mode], rule, _LATE).run() for rule, mode in tried), key=_Found.score)
    if not shape.head_ranks or len(orders) == tries:
        return orders[0].schedule
    different: dict[float, _Found] = {}
    for one in orders:
        different.setdefault(one.end_s, one)  # several rules may make the same order
    more = max(len(_SLACKS) - 1, tried_actions // (_SLACKS_SHARE * count))
    pairs = islice(product(different.values(), _SLACKS[1:]), min(more, tries - len(orders)))
    others = [_Search(one.tables, one.rule, slack).run() for one, slack in pairs]
    return min((orders[0], *others), key=_Found.late_end_s).schedule


class _Tables:
    """The constants of a search.

    Tables are indexed by stage and unit; a stage's units are numbered in the order of its forwards. A whole backward is
    treated as an I.
    """

    def __init__(
        self,
        shape: PipelineShape,
        rank_of: Sequence[int],
        costs: ActionCosts,
        limits: Sequence[float],
        mode: BackwardMode,
    ) -> None:
        self.shape, self.rank_of, self.limits, self.mode = shape, rank_of, limits, mode
        self.transfer_s, self.action_s = costs.transfer_s, costs.duration_s
        self.stages_of: list[list[int]] = [[] for _ in range(max(rank_of) + 1)]
        for stage, rank in enumerate(rank_of):
            self.stages_of[rank].append(stage)
        is_whole = mode is BackwardMode.WHOLE
        ops = {Op.FORWARD: Op.FORWARD, Op.INPUT_GRADIENT: Op.BACKWARD if is_whole else Op.INPUT_GRADIENT}
        if not is_whole:
            ops[Op.WEIGHT_GRADIENT] = Op.WEIGHT_GRADIENT
        self.actions = {
            place: [
                [Action(op, stage, *divmod(unit, shape.segments)) for unit in range(shape.units)]
                for stage in range(shape.stages)
            ]
            for place, op in ops.items()
        }
        self.duration_s = {
            op: [list(map(costs.duration_s, row)) for row in table] for op, table in self.actions.items()
        }
        #: For both actions of a head that is spread, by rank and unit.
        self.shares = {
            op: [
                [Action(op, stage, *divmod(unit, shape.segments)) for unit in range(shape.units)]
                for _, stage in sorted((rank_of[stage], stage) for stage in shape.head_stages)
            ]
            for op in (Op.HEAD_FORWARD, Op.HEAD_BACKWARD)
        }
        self.shares_s = {op: [list(map(costs.duration_s, row)) for row in table] for op, table in self.shares.items()}
        durations_s = [duration_s for table in self.duration_s.values() for row in table for duration_s in row]
        self.average_s = sum(durations_s) / len(durations_s)
        self.kept = [list(map(costs.kept, row)) for row in self.actions[Op.FORWARD]]
        self.frees = 1.0 if is_whole else costs.input_gradient_frees
        self.most_waiting = None if is_whole else costs.most_waiting
        #: For each rank and micro-batch, what all units of the micro-batch keep.
        self.totals = [[self._total(rank, m) for m in range(shape.micro_batches)] for rank in range(len(limits))]
        #: For each rank, the most memory that an I needs beyond what its unit keeps already: 0 if Is free memory.
        self.headroom = [
            max(0.0, -self.frees) * max(max(self.kept[stage]) for stage in stages) for stages in self.stages_of
        ]
        for rank, (limit, headroom) in enumerate(zip(limits, self.headroom, strict=True)):
            least = max(self.totals[rank]) + headroom
            if limit < least - _TOLERANCE:
                raise ConfigError(
                    f"a memory limit of {limit:.4g} sequences is too little: rank {rank} of the pipeline keeps all "
                    f"of a micro-batch before that runs backward, {least:.4g} sequences; give at least that"
                )

    def _total(self, rank: int, micro_batch: int) -> float:
        units = slice(micro_batch * self.shape.segments, (micro_batch + 1) * self.shape.segments)
        return sum(sum(self.kept[stage][units]) for stage in self.stages_of[rank])


class _Memory:
    """Tracks what one rank keeps, and which actions its memory limit still allows. All amounts are in sequences.

    ``headroom`` is the part of the limit that forwards must leave free; ``totals`` says for each micro-batch what all
    its units keep.
    """

    def __init__(self, limit: float, headroom: float, totals: Sequence[float]) -> None:
        self._limit = limit + _TOLERANCE
        self._safe = self._limit - headroom
        self._now = 0.0
        #: For each micro-batch, what its units between F and I keep, and what its missing forwards will keep.
        self._open = [0.0] * len(totals)
        self._missing = list(totals)
        self._first = 0

    def fits(self, kept: float) -> bool:
        """Whether there is room for this much more."""
        return self._now + kept <= self._limit

    def is_safe(self, micro_batch: int, kept: float, newest: int) -> bool:
        """Whether a forward leaves enough memory for the missing forwards of all micro-batches before its own.

        ``kept`` is what its unit keeps; no micro-batch after ``newest`` has started.
        """
        held = kept
        for j in range(newest, self._first - 1, -1):
            # Now the sum over all micro-batches from j on: the left side of the condition in the module's docstring.
            held += self._open[j]
            if j < micro_batch and held + self._missing[j] > self._safe:
                return False
        return True

    def forward(self, micro_batch: int, kept: float) -> None:
        """A unit's forward starts."""
        self._now += kept
        self._open[micro_batch] += kept
        self._missing[micro_batch] -= kept

    def input_gradient(self, micro_batch: int, kept: float, freed: float) -> None:
        """A unit's I starts. Afterwards the unit keeps only what its W needs."""
        self._now -= freed
        self._open[micro_batch] -= kept
        while self._first < len(self._open) and self._missing[self._first] + self._open[self._first] < _TOLERANCE:
            self._first += 1

    def weight_gradient(self, freed: float) -> None:
        """A unit's W starts, which is its last action."""
        self._now -= freed


#: An operation, its stage (of a share of the head: its rank), and the number of times that this one has started it.
_Choice = tuple[Op, int, int]


@dataclass(frozen=True)
class _Found:
    """A schedule that was found."""

    tables: _Tables
    rule: _Rule
    schedule: Schedule
    #: When the last rank finishes; with a head that is spread, if each collective takes the slack.
    end_s: float

    def score(self) -> float:
        """The time by which it is compared with others."""
        is_preferred = self.tables.mode is BackwardMode.SPLIT_BY_MICRO_BATCH
        return self.end_s * (1 if is_preferred else 1 + _MICRO_BATCH_GAIN)

    def late_end_s(self) -> float:
        """When the last rank finishes, if the head's collectives are late."""
        tables = self.tables
        programs = insert_messages_once_sent(self.schedule, tables.shape, tables.action_s)

        def transfer_s(action: Action) -> float:
            return tables.transfer_s + (_LATE * tables.average_s if action.op.is_collective else 0)

        return max(end_s for *_, end_s in ActionGraph(programs, tables.shape).times(tables.action_s, transfer_s))


class _Search:
    """Builds one schedule by one rule, and with one slack for a head that is spread, in average actions."""

    def __init__(self, tables: _Tables, rule: _Rule, slack: float) -> None:
        self._tables, self._rule, self._slack_s = tables, rule, slack * tables.average_s
        stages, units = tables.shape.stages, tables.shape.units
        self._segments, self._units = tables.shape.segments, units
        never = [float("inf")] * units
        #: By stage and unit, when the input of F and the gradient for I arrive from the neighbouring stage.
        self._hidden_s = [[0.0] * units, *(never[:] for _ in range(stages - 1))]
        self._gradient_s = [
            *(never[:] for _ in range(stages - 1)),
            never[:] if tables.shape.head_ranks else [0.0] * units,
        ]
        #: By rank and unit, when the input of H and the other ranks' sums for G arrive.
        self._shares_s = {op: [never[:] for _ in range(tables.shape.head_ranks)] for op in tables.shares}
        #: By unit, how many ranks have started H or G.
        self._joined = {op: [0] * units for op in tables.shares}
        #: For each operation, how many of them each stage has started.
        self._begun = {op: [0] * stages for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, *tables.shares)}
        self._memory = list(map(_Memory, tables.limits, tables.headroom, tables.totals))
        self._found: list[list[Action]] = [[] for _ in tables.limits]
        #: When each rank is done with what it has started.
        self._free_s = [0.0] * len(tables.limits)
        #: Heap of the times at which something may change for a rank.
        self._events = [(0.0, rank) for rank in range(len(tables.limits))]

    def run(self) -> _Found:
        """Build the schedule."""
        free_s = self._free_s
        while self._events:
            now_s, rank = heapq.heappop(self._events)
            if free_s[rank] > now_s:  # busy; the end of its action is an event of its own
                continue
            choice = self._choose(rank, now_s)
            if choice is not None:
                free_s[rank] = self._begin(rank, now_s, choice)
                heapq.heappush(self._events, (free_s[rank], rank))
        shape = self._tables.shape
        count = len(self._tables.actions) * shape.stages + len(self._tables.shares) * shape.head_ranks
        assert sum(map(len, self._found)) == count * self._units
        schedule = tuple(map(tuple, self._found))
        return _Found(self._tables, self._rule, schedule, max(free_s))

    def _choose(self, rank: int, now_s: float) -> _Choice | None:
        """Return what a free rank starts next; None if it must wait."""
        share = self._next_share(rank, now_s) if self._tables.shape.head_ranks else None
        if share is not None:
            return share
        stages = self._tables.stages_of[rank]
        forward = self._next_forward(rank, stages, now_s)
        if forward is not None and self._rule.forward_first:
            return forward
        backward = self._next_backward(rank, stages, now_s)
        return backward or forward or self._next_weight_gradient(rank, stages, now_s)

    def _next_share(self, rank: int, now_s: float) -> _Choice | None:
        """Return the next action of the rank's share of the head; G first, since it frees logits."""
        begun, done = (self._begun[op][rank] for op in (Op.HEAD_FORWARD, Op.HEAD_BACKWARD))
        if done < begun and self._shares_s[Op.HEAD_BACKWARD][rank][done] <= now_s:
            return Op.HEAD_BACKWARD, rank, done
        if begun < min(self._units, done + _MOST_SHARES) and self._shares_s[Op.HEAD_FORWARD][rank][begun] <= now_s:
            return Op.HEAD_FORWARD, rank, begun
        return None

    def _next_forward(self, rank: int, stages: Sequence[int], now_s: float, *, drained: bool = False) -> _Choice | None:
        """Return a forward of the earliest micro-batch that has one which can start.

        With ``drained``, the answer is for the case that all pending Ws were done and their memory free.
        """
        begun, memory, best = self._begun[Op.FORWARD], self._memory[rank], None
        # The rank's first stage is never behind its others, so it has the newest micro-batch.
        newest = min(begun[stages[0]], self._units - 1) // self._segments
        for stage in stages if self._rule.early_forward else reversed(stages):
            unit = begun[stage]
            if unit == self._units or self._hidden_s[stage][unit] > now_s:
                continue
            micro_batch, kept = unit // self._segments, self._tables.kept[stage][unit]
            # The earliest micro-batch, so that units of later ones don't fill the memory first.
            if best is not None and best[0] <= micro_batch:
                continue
            if (drained or memory.fits(kept)) and memory.is_safe(micro_batch, kept, newest):
                best = (micro_batch, stage, unit)
        return None if best is None else (Op.FORWARD, *best[1:])

    def _next_backward(
        self, rank: int, stages: Sequence[int], now_s: float, *, drained: bool = False
    ) -> _Choice | None:
        begun, forwards = self._begun[Op.INPUT_GRADIENT], self._begun[Op.FORWARD]
        most = self._tables.most_waiting
        if most is not None and not drained:
            waiting = sum(begun[stage] - self._begun[Op.WEIGHT_GRADIENT][stage] for stage in stages)
            if waiting >= most:
                return None
        for stage in stages if self._rule.early_backward else reversed(stages):
            number = begun[stage]
            if number == self._units:
                continue
            unit = self._backward_unit(number)
            # The rank is free, so every forward that it has started is done.
            if forwards[stage] > unit and self._gradient_s[stage][unit] <= now_s:
                extra = -self._tables.frees * self._tables.kept[stage][unit]
                if drained or extra <= 0 or self._memory[rank].fits(extra):
                    return Op.INPUT_GRADIENT, stage, number
        return None

    def _next_weight_gradient(self, rank: int, stages: Sequence[int], now_s: float) -> _Choice | None:
        """Return a W of the earliest micro-batch that has one; of its latest stage, whose Is ran first."""
        if Op.WEIGHT_GRADIENT not in self._tables.actions:
            return None
        begun, ready = self._begun[Op.WEIGHT_GRADIENT], self._begun[Op.INPUT_GRADIENT]
        waiting = [(begun[stage] // self._segments, -stage) for stage in stages if begun[stage] < ready[stage]]
        if self._tables.mode is BackwardMode.SPLIT_BY_MICRO_BATCH:
            complete = [(m, stage) for m, stage in waiting if ready[-stage] >= (m + 1) * self._segments]
            # Start only part of a micro-batch's Ws if another action needs the memory that they free.
            lacks_room = any(
                find(rank, stages, now_s, drained=True) for find in (self._next_forward, self._next_backward)
            )
            waiting = complete or (waiting if lacks_room else [])
        if not waiting:
            return None
        stage = -min(waiting)[1]
        return Op.WEIGHT_GRADIENT, stage, begun[stage]

    def _begin(self, rank: int, now_s: float, choice: _Choice) -> float:
        """Add an action to the schedule, or a whole run of Ws; return the time at which it ends."""
        op, stage, number = choice
        self._begun[op][stage] += 1
        if op.is_head:
            return self._begin_share(op, rank, number, now_s)
        unit = number if op is Op.FORWARD else self._backward_unit(number)
        self._found[rank].append(self._tables.actions[op][stage][unit])
        end_s = now_s + self._tables.duration_s[op][stage][unit]
        kept, micro_batch = self._tables.kept[stage][unit], unit // self._segments
        if op is Op.FORWARD:
            self._memory[rank].forward(micro_batch, kept)
            if stage + 1 < self._tables.shape.stages:
                self._arrive(self._hidden_s, rank, stage + 1, unit, end_s)
            else:
                self._arrive_at_shares(Op.HEAD_FORWARD, unit, end_s)
        elif op is Op.INPUT_GRADIENT:
            self._memory[rank].input_gradient(micro_batch, kept, self._tables.frees * kept)
            if stage > 0:
                self._arrive(self._gradient_s, rank, stage - 1, unit, end_s)
        else:
            self._memory[rank].weight_gradient((1 - self._tables.frees) * kept)
            number += 1
            run_on = self._tables.mode is BackwardMode.SPLIT_BY_MICRO_BATCH and number % self._segments
            if run_on and number < self._begun[Op.INPUT_GRADIENT][stage]:
                return self._begin(rank, end_s, (op, stage, number))
        return end_s

    def _begin_share(self, op: Op, rank: int, unit: int, now_s: float) -> float:
        """Add an action of the rank's share of the head; return the time at which it ends."""
        self._found[rank].append(self._tables.shares[op][rank][unit])
        end_s = now_s + self._tables.shares_s[op][rank][unit]
        self._joined[op][unit] += 1
        if self._joined[op][unit] == self._tables.shape.head_ranks:
            if op is Op.HEAD_FORWARD:
                self._arrive_at_shares(Op.HEAD_BACKWARD, unit, end_s)
            else:
                # As far as from any other rank.
                joined_s = self._joined_by_all_s(end_s) + self._slack_s
                self._arrive(self._gradient_s, -1, self._tables.shape.stages - 1, unit, joined_s)
        return end_s

    def _arrive_at_shares(self, op: Op, unit: int, end_s: float) -> None:
        """Record when what a share's action needs arrives at every rank."""
        arrival_s = self._joined_by_all_s(end_s) + self._tables.transfer_s + self._slack_s
        for rank, row in enumerate(self._shares_s[op]):
            row[unit] = arrival_s
            heapq.heappush(self._events, (arrival_s, rank))

    def _joined_by_all_s(self, end_s: float) -> float:
        """When all ranks have joined a collective whose last contribution starts now and takes until ``end_s``."""
        return max(end_s, *self._free_s)

    def _arrive(self, arrivals: list[list[float]], rank: int, stage: int, unit: int, end_s: float) -> None:
        """Record when a result arrives at the stage that needs it."""
        target = self._tables.rank_of[stage]
        arrival_s = end_s + (self._tables.transfer_s if target != rank else 0)
        arrivals[stage][unit] = arrival_s
        heapq.heappush(self._events, (arrival_s, target))

    def _backward_unit(self, number: int) -> int:
        """Return the unit of a stage's ``number``-th backward: micro-batches in order, segments from the last."""
        micro_batch, place = divmod(number, self._segments)
        return (micro_batch + 1) * self._segments - 1 - place
