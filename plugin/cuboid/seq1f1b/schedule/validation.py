"""Proves that a schedule is complete, respects dependencies, and can't deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from cuboid.errors import CuboidError
from cuboid.seq1f1b.schedule.actions import Action, Op, Program, Schedule
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, dependencies, fulfils, incoming, other_ends
from cuboid.seq1f1b.schedule.schedules import PipelineShape


class ScheduleError(CuboidError):
    """A schedule omits an action, repeats it, or runs it before its dependencies."""


class DeadlockError(ScheduleError):
    """Ranks wait for each other forever."""


def validate(schedule: Schedule, shape: PipelineShape, *, backward: bool = True) -> None:
    """Check that every unit runs once, on the rank of its stage, and that all ranks can finish.

    With ``backward``, the units run backward too, whole or split.

    Raises:
        ScheduleError: an action is wrong; the message names it.
        DeadlockError: ranks wait for each other; the message names the action at which each one waits.
    """
    _check_complete(schedule, shape, backward)
    placement(schedule)
    _check_order(schedule, lambda action: dependencies(action, shape))
    for _ in walk(schedule, lambda action: dependencies(action, shape)):
        pass


def validate_programs(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Check the messages of all ranks' programs, and that no blocking behaviour of messages leads to a deadlock.

    The transport must keep channels (:func:`cuboid.seq1f1b.schedule.dependencies.channel`) independent of one another
    and each of them in order; a computation waits for its input. The proof assumes the worst case, in which every
    action first waits for the other end of all messages that its rank has sent or posted before. Anything that
    synchronizes a CUDA device does that, because NCCL's sends and receives are kernels that spin until the peer joins:
    the first launch of a kernel that isn't loaded yet, an allocation that frees cached memory, the first collective of
    a group.

    Raises:
        ScheduleError: an action is wrong; the message names it.
        DeadlockError: ranks wait for each other; the message names the action at which each one waits.
    """
    for action, ranks in _places(programs).items():
        if len(ranks) > 1:
            raise ScheduleError(f"{action} is done more than once (on ranks {_listed(ranks)})")
    rank_of = placement(programs)
    _check_messages(programs, shape, rank_of)
    needs: dict[Action, tuple[Action, ...]] = {}
    for program in programs:
        before: Action | None = None
        for action in program:
            # It is enough to look at the message right before: an earlier one was waited for by the action after it.
            under_way = () if before is None or before.op.computes else other_ends(before, shape)
            needs[action] = _needs(action, shape, rank_of) + under_way
            before = action
    for _ in walk(programs, needs.__getitem__):
        pass


def placement(sequences: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Return the rank of each stage.

    Raises:
        ScheduleError: a stage is on two ranks, although its weights and KV cache can only be on one.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(sequences):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, but stage {action.stage} is on rank {rank_of[action.stage]}"
                )
    return rank_of


def walk(
    sequences: Sequence[Sequence[Action]], needs: Callable[[Action], Iterable[Action]]
) -> Iterator[tuple[int, Action]]:
    """Iterate over the actions of all ranks, each rank's in order, each action after all those that it needs.

    Yields:
        Pairs of rank and action.

    Raises:
        DeadlockError: no rank can proceed.
    """
    position = [0] * len(sequences)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(sequences)))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(sequences[rank]):
            action = sequences[rank][position[rank]]
            missing = next((need for need in needs(action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            position[rank] += 1
            done.add(fulfils(action))
            ready.extend(waiting.pop(fulfils(action), ()))
    if waiting:
        stalls = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
        raise DeadlockError(
            "deadlock: "
            + "; ".join(f"rank {rank} waits at {sequences[rank][position[rank]]} for {need}" for rank, need in stalls)
        )


def _check_complete(schedule: Schedule, shape: PipelineShape, backward: bool) -> None:
    places = _places(schedule)
    for action, ranks in places.items():
        if not action.op.computes or (action.op is not Op.FORWARD and not backward):
            raise ScheduleError(f"{action} doesn't belong into this schedule")
        if not _in_shape(action, shape):
            raise ScheduleError(f"{action} is outside the pipeline's {shape}")
        if len(ranks) > 1:
            raise ScheduleError(f"{action} is done more than once (on ranks {_listed(ranks)})")
    _check_head(places, shape, backward)
    units = (
        (stage, micro_batch, segment)
        for stage in range(shape.stages)
        for micro_batch in range(shape.micro_batches)
        for segment in range(shape.segments)
    )
    for unit in units:
        forward, whole_backward, *halves = (
            Action(op, *unit) for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
        )
        if forward not in places:
            raise ScheduleError(f"{forward} is missing")
        split = [half for half in halves if half in places]
        if split and whole_backward in places:
            raise ScheduleError(f"{whole_backward} does what {split[0]} does too")
        if backward and whole_backward not in places and len(split) < 2:
            missing = next(half for half in halves if half not in split) if split else whole_backward
            raise ScheduleError(f"{missing} is missing")


def _check_head(places: dict[Action, list[int]], shape: PipelineShape, backward: bool) -> None:
    expected = {
        Action(op, stage, micro_batch, segment)
        for op in (Op.HEAD_FORWARD, Op.HEAD_BACKWARD)
        for stage in shape.head_stages
        for micro_batch in range(shape.micro_batches)
        for segment in range(shape.segments)
        if backward
    }
    scheduled = {action for action in places if action.op.is_head}
    for action in sorted(expected ^ scheduled, key=str):
        raise ScheduleError(f"{action} is missing" if action in expected else f"{action} is no share of the head")


def _check_order(schedule: Schedule, needs: Callable[[Action], Iterable[Action]]) -> None:
    """Check the order within each rank. :func:`walk` would find the same errors, but report them as deadlocks."""
    for rank, actions in enumerate(schedule):
        computed_here = {fulfils(action) for action in actions}
        done: set[Action] = set()
        for action in actions:
            for need in needs(action):
                if need in computed_here and need not in done:
                    raise ScheduleError(f"on rank {rank}, {action} comes before {need}, which it depends on")
            done.add(fulfils(action))


def _check_messages(programs: Sequence[Program], shape: PipelineShape, rank_of: dict[int, int]) -> None:
    """Check that both ends of every channel have the same order, and that every message is used."""
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    used = {
        receive
        for action in chain.from_iterable(programs)
        if (receive := incoming(action, shape))
        and not receive.op.is_collective
        and rank_of.get(counterpart(receive).stage) != rank_of[action.stage]
    }
    _check_collectives(programs, shape)
    for action in chain.from_iterable(programs):
        if action.op.computes or action.op.is_collective:
            continue
        is_send = action.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
        if (counterpart(action) if is_send else action) not in used:
            raise ScheduleError(f"{action} carries nothing that another rank uses")
        (sends if is_send else receives).setdefault(channel(action), []).append(action)
    for key in sends.keys() | receives.keys():
        for sent, received in zip_longest(sends.get(key, ()), receives.get(key, ())):
            if sent is None or received is None:
                raise ScheduleError(f"{sent or received} has no counterpart {counterpart(sent or received)}")
            if counterpart(sent) != received:
                raise ScheduleError(
                    f"stage {key[0]} sends {sent} where stage {key[1]} receives {received}; the orders must be the same"
                )


def _check_collectives(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Check that all ranks join every collective of the head once, in the same order: one group has all of them."""
    orders = [
        [(action.op.value, action.micro_batch, action.segment) for action in program if action.op.is_collective]
        for program in programs
    ]
    for rank, order in enumerate(orders):
        for first, joined in zip_longest(orders[0], order):
            if first != joined:
                raise ScheduleError(f"rank {rank} joins the collective {joined} where rank 0 joins {first}")
    expected = 3 * shape.micro_batches * shape.segments if shape.head_ranks else 0
    if len(orders[0]) != expected:
        raise ScheduleError(f"there are {len(orders[0])} collectives of the head, and it needs {expected}")


def _needs(action: Action, shape: PipelineShape, rank_of: dict[int, int]) -> tuple[Action, ...]:
    """Return what an action of a program waits for, apart from other messages in flight on its rank."""
    match action.op:
        case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
            return ()
        case Op.SEND_ACTIVATION | Op.SEND_GRADIENT:
            return dependencies(action, shape)
    if action.op.is_collective:
        return dependencies(action, shape)
    needs = dependencies(action, shape)
    receive = incoming(action, shape)
    if receive is None:
        return needs
    ends = other_ends(receive, shape)
    if not receive.op.is_collective and rank_of.get(ends[0].stage) == rank_of[action.stage]:
        return needs
    return (receive, *ends, *(need for need in needs if need.stage == action.stage))


def _in_shape(action: Action, shape: PipelineShape) -> bool:
    return (
        0 <= action.stage < shape.stages
        and 0 <= action.micro_batch < shape.micro_batches
        and 0 <= action.segment < shape.segments
    )


def _places(sequences: Iterable[Iterable[Action]]) -> dict[Action, list[int]]:
    """Return, for each action, the ranks that run it, with repetitions."""
    places: dict[Action, list[int]] = {}
    for rank, actions in enumerate(sequences):
        for action in actions:
            places.setdefault(action, []).append(rank)
    return places


def _listed(ranks: list[int]) -> str:
    return " and ".join(str(rank) for rank in ranks)
