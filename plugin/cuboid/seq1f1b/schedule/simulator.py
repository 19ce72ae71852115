"""What a schedule takes in time and memory, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.dependencies import dependencies, fulfils
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.validation import placement, walk


@dataclass(frozen=True)
class Span:
    """When an action ran. All ranks are on one clock; its zero is arbitrary."""

    action: Action
    start_s: float
    end_s: float


#: Points of a step function: the time from which on so much was in use.
MemoryCurve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step of the pipeline, simulated or measured.

    Args:
        spans: for each rank what it did, in time order. Messages may be among it; they don't count as work.
        peak_bytes: for each rank the most that its units in flight took; 0 where it isn't known.
        memory: for each rank what its units took from when on; empty where it isn't known.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_bytes: tuple[float, ...]
    memory: tuple[MemoryCurve, ...] = ()

    @property
    def makespan_s(self) -> float:
        """From the first start on any rank to the last end."""
        spans = [span for rank in self.spans for span in rank]
        if not spans:
            return 0
        return max(span.end_s for span in spans) - min(span.start_s for span in spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each rank the time in which it computed."""
        return tuple(sum(s.end_s - s.start_s for s in rank if s.action.op.computes) for rank in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank the part of the step, from 0 to 1, in which it was idle."""
        makespan_s = self.makespan_s
        return tuple(1 - busy_s / makespan_s if makespan_s else 0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The idle part of all ranks' time together, from 0 to 1."""
        return sum(self.bubbles) / len(self.spans) if self.spans else 0


class ActionGraph:
    """A schedule's actions and what each depends on: what of a simulation is the same whatever actions cost.

    Args:
        schedule: what each rank computes, in order.
        shape: of the pipeline.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape) -> None:
        self.schedule, self.shape = schedule, shape

    @cached_property
    def _steps(self) -> list[tuple[int, Action, list[tuple[int, Action | None]]]]:
        """In an order in which they can run, with rank, action, and what it needs.

        Of that the place in the list, and the action if its result comes from another rank.
        """
        rank_of, places = placement(self.schedule), dict[Action, int]()
        needs_of = cache(lambda action: dependencies(action, self.shape))
        found: list[tuple[int, Action, list[tuple[int, Action | None]]]] = []
        for rank, action in walk(self.schedule, needs_of):
            needs = [(places[each], each if rank_of[each.stage] != rank else None) for each in needs_of(action)]
            places[fulfils(action)] = len(found)
            found.append((rank, action, needs))
        return found

    def times(
        self, duration_s: Callable[[Action], float], transfer_s: Callable[[Action], float] | None = None
    ) -> Iterator[tuple[int, Action, float, float]]:
        """Rank, action, start and end of all actions, those of a rank in its order; arguments as of :func:`simulate`.

        Raises:
            ScheduleError: the schedule can't be run to its end.
        """
        clocks: list[float] = [0] * len(self.schedule)
        ends: list[float] = []
        for rank, action, needs in self._steps:
            start_s = clocks[rank]
            for place, sent in needs:
                there_s = ends[place] + (transfer_s(sent) if sent is not None and transfer_s is not None else 0)
                start_s = max(start_s, there_s)
            clocks[rank] = end_s = start_s + duration_s(action)
            ends.append(end_s)
            yield rank, action, start_s, end_s


def simulate(
    schedule: Schedule,
    shape: PipelineShape,
    duration_s: Callable[[Action], float],
    *,
    transfer_s: Callable[[Action], float] | None = None,
    kept_bytes: Callable[[Action], float] | None = None,
    input_gradient_frees: float = 0,
) -> Timeline:
    """Let every rank start each of its actions as soon as the one before is done and what it depends on has come.

    Args:
        schedule: what each rank computes, in order.
        shape: of the pipeline.
        duration_s: seconds that an action takes.
        transfer_s: seconds from the end of an action until its result is there on another rank. Ranks compute
            meanwhile, and messages don't hold up one another. None: no time.
        kept_bytes: bytes that a unit holds from the start of its forward, which is what is passed, until its gradients
            are done; or any other measure of memory. None: nothing is known.
        input_gradient_frees: the part of it that is freed by the first half of a split backward; negative where that
            half needs more than it frees.

    Raises:
        ScheduleError: the schedule can't be run to its end.
    """
    spans: list[list[Span]] = [[] for _ in schedule]
    for rank, action, start_s, end_s in ActionGraph(schedule, shape).times(duration_s, transfer_s):
        spans[rank].append(Span(action, start_s, end_s))
    memory = () if kept_bytes is None else tuple(memory_curve(rank, kept_bytes, input_gradient_frees) for rank in spans)
    peaks = [max((now for _, now in curve), default=0) for curve in memory] or [0] * len(spans)
    return Timeline(tuple(tuple(rank) for rank in spans), tuple(peaks), memory)


def memory_curve(
    spans: Iterable[Span], kept_bytes: Callable[[Action], float], input_gradient_frees: float = 0
) -> MemoryCurve:
    """What the units of one rank take, over time; see :func:`simulate`.

    Memory is taken when an action starts and freed when it ends.
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
    """The part of what a unit keeps that is free after an action of it."""
    match op:
        case Op.FORWARD:
            return -1
        case Op.INPUT_GRADIENT:
            return input_gradient_frees
        case Op.WEIGHT_GRADIENT:
            return 1 - input_gradient_frees
    return 1


def peak_bytes(
    actions: Iterable[Action], kept_bytes: Callable[[Action], float], input_gradient_frees: float = 0
) -> float:
    """The most that the units of one rank take together; see :func:`simulate`.

    With 1 for each unit this is the number of units in flight.
    """
    # Actions of a rank follow one another, so their places do for times.
    order = (Span(action, index, index) for index, action in enumerate(actions))
    return max((now for _, now in memory_curve(order, kept_bytes, input_gradient_frees)), default=0)
