"""Predicts the time and memory of a schedule without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.dependencies import dependencies, fulfils, incoming, other_ends
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.validation import placement, walk


@dataclass(frozen=True)
class Span:
    """When an action ran. All ranks use one clock with an arbitrary zero."""

    action: Action
    start_s: float
    end_s: float


#: Points (time, amount) of a step function: the amount was in use from that time on.
MemoryCurve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step of the pipeline, simulated or measured.

    Args:
        spans: for each rank, its actions in time order. Messages may be among them; they don't count as work.
        peak_bytes: for each rank, the peak memory of its units in flight; 0 if unknown.
        memory: for each rank, the memory of its units over time; empty if unknown.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_bytes: tuple[float, ...]
    memory: tuple[MemoryCurve, ...] = ()

    @property
    def makespan_s(self) -> float:
        """Time from the first start on any rank to the last end."""
        spans = [span for rank in self.spans for span in rank]
        if not spans:
            return 0
        return max(span.end_s for span in spans) - min(span.start_s for span in spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each rank, the time that it spent on computation."""
        return tuple(sum(s.end_s - s.start_s for s in rank if s.action.op.computes) for rank in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the fraction of the step, from 0 to 1, in which it was idle."""
        makespan_s = self.makespan_s
        return tuple(1 - busy_s / makespan_s if makespan_s else 0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time together, from 0 to 1."""
        return sum(self.bubbles) / len(self.spans) if self.spans else 0


class ActionGraph:
    """The computations of all ranks and their dependencies: the part of a simulation that doesn't depend on costs.

    Args:
        sequences: each rank's computations, in order; or the ranks' programs, whose collectives then count: a rank
            joins one after the computation before it, and none is over before all ranks have joined. Messages between
            two ranks are on their way from the end of a computation in either case.
        shape: the pipeline's shape.
    """

    def __init__(self, sequences: Sequence[Sequence[Action]], shape: PipelineShape) -> None:
        self.sequences, self.shape = sequences, shape

    @cached_property
    def schedule(self) -> Schedule:
        """The computations."""
        return tuple(tuple(action for action in actions if action.op.computes) for actions in self.sequences)

    @cached_property
    def _steps(self) -> list[tuple[int, Action, list[tuple[int, Action | None]]]]:
        """All computations and collectives in an order in which they can run: the rank, the action, what it needs.

        Each of the latter is given by its index in this list, and as an action if its result comes from another rank.
        """
        sequences = [[one for one in rank if one.op.computes or one.op.is_collective] for rank in self.sequences]
        rank_of, places = placement(sequences), dict[Action, int]()
        has_collectives = any(action.op.is_collective for action in chain.from_iterable(sequences))

        @cache
        def needs_of(action: Action) -> tuple[Action, ...]:
            if action.op.is_collective:
                return ()
            needs = dependencies(action, self.shape)
            joined = incoming(action, self.shape) if has_collectives else None
            if joined is None or not joined.op.is_collective:
                return needs
            # In place of what other ranks have computed for it.
            here = (need for need in needs if rank_of[need.stage] == rank_of[action.stage])
            return (*here, joined, *other_ends(joined, self.shape))

        steps: list[tuple[int, Action, list[tuple[int, Action | None]]]] = []
        for rank, action in walk(sequences, needs_of):
            # A rank that is the last to join a collective waits for what the others send, too.
            needs = [
                (places[need], need if need.op.is_collective or rank_of[need.stage] != rank else None)
                for need in needs_of(action)
            ]
            places[fulfils(action)] = len(steps)
            steps.append((rank, action, needs))
        return steps

    def times(
        self, duration_s: Callable[[Action], float], transfer_s: Callable[[Action], float] | None = None
    ) -> Iterator[tuple[int, Action, float, float]]:
        """Yield rank, computation, start and end, each rank's in order; arguments as for :func:`simulate`.

        Raises:
            ScheduleError: the schedule can't be run to its end.
        """
        clocks: list[float] = [0] * len(self.sequences)
        ends: list[float] = []
        for rank, action, needs in self._steps:
            if action.op.is_collective:
                ends.append(clocks[rank])
                continue
            start_s = clocks[rank]
            for place, remote in needs:
                arrival_s = ends[place] + (transfer_s(remote) if remote is not None and transfer_s is not None else 0)
                start_s = max(start_s, arrival_s)
            clocks[rank] = end_s = start_s + duration_s(action)
            ends.append(end_s)
            yield rank, action, start_s, end_s


def simulate(
    sequences: Sequence[Sequence[Action]],
    shape: PipelineShape,
    duration_s: Callable[[Action], float],
    *,
    transfer_s: Callable[[Action], float] | None = None,
    kept_bytes: Callable[[Action], float] | None = None,
    input_gradient_frees: float = 0,
) -> Timeline:
    """Simulate a step in which each rank starts an action once the previous one is done and its inputs have arrived.

    Args:
        sequences, shape: as for :class:`ActionGraph`.
        duration_s: returns the seconds that an action takes.
        transfer_s: returns the seconds from the end of an action until its result has arrived on another rank. Ranks
            compute meanwhile, and messages don't delay one another. None: no time.
        kept_bytes: given a unit's forward, returns the bytes (or any other measure of memory) that the unit keeps from
            the start of its forward until its gradients are done. None: memory isn't simulated.
        input_gradient_frees: the fraction of that memory that the first half of a split backward frees; negative if
            that half needs more than it frees.

    Raises:
        ScheduleError: the schedule can't be run to its end.
    """
    spans: list[list[Span]] = [[] for _ in sequences]
    for rank, action, start_s, end_s in ActionGraph(sequences, shape).times(duration_s, transfer_s):
        spans[rank].append(Span(action, start_s, end_s))
    memory = () if kept_bytes is None else tuple(memory_curve(rank, kept_bytes, input_gradient_frees) for rank in spans)
    peaks = [max((now for _, now in curve), default=0) for curve in memory] or [0] * len(spans)
    return Timeline(tuple(tuple(rank) for rank in spans), tuple(peaks), memory)


def memory_curve(
    spans: Iterable[Span], kept_bytes: Callable[[Action], float], input_gradient_frees: float = 0
) -> MemoryCurve:
    """Return the memory of one rank's units over time; see :func:`simulate`.

    Memory is allocated when an action starts and freed when it ends.
    """
    now: float = 0
    curve: list[tuple[float, float]] = []
    for span in spans:
        action = span.action
        if not action.op.computes:
            continue
        kept = kept_bytes(Action(Op.FORWARD, action.stage, action.micro_batch, action.segment))
        freed = kept * _freed(action.op, input_gradient_frees)
        now -= freed
        curve.append((span.start_s if freed < 0 else span.end_s, now))
    return tuple(curve)


def _freed(op: Op, input_gradient_frees: float) -> float:
    """Return the fraction of a unit's memory that an action frees; negative if the action allocates it."""
    match op:
        case Op.FORWARD:
            return -1
        case Op.INPUT_GRADIENT:
            return input_gradient_frees
        case Op.WEIGHT_GRADIENT:
            return 1 - input_gradient_frees
        case Op.HEAD_FORWARD | Op.HEAD_BACKWARD:
            # A share's logits aren't part of what a unit's layers keep; how many units have them is bounded.
            return 0
    return 1


def peak_bytes(
    actions: Iterable[Action], kept_bytes: Callable[[Action], float], input_gradient_frees: float = 0
) -> float:
    """Return the peak memory of one rank's units; see :func:`simulate`.

    If every unit keeps 1, this is the maximum number of units in flight.
    """
    # A rank's actions run one after another, so their indices can serve as times.
    order = (Span(action, index, index) for index, action in enumerate(actions))
    return max((now for _, now in memory_curve(order, kept_bytes, input_gradient_frees)), default=0)
