"""Lowering: turns a schedule into the ranks' programs by inserting sends and receives.

On CUDA, a posted receive is a kernel that spins until the message arrives, and anything that synchronizes the device
(the first launch of a kernel that isn't loaded yet, a ``cudaFree`` of the allocator) waits for it too. So a rank must
not post a receive before an action of its own on which the received message depends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from cuboid.seq1f1b.schedule.actions import Action, Op, Program, Schedule
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, incoming, other_ends, outgoing
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import simulate
from cuboid.seq1f1b.schedule.validation import DeadlockError, placement, validate, validate_programs

#: Source and target stage.
RankPair = tuple[int, int]


def lower(
    schedule: Schedule, shape: PipelineShape, duration_s: Callable[[Action], float] | None = None
) -> tuple[Program, ...]:
    """Insert sends and receives into a schedule so that ranks can't deadlock.

    That holds even if every action first waits for everything that is in flight on its device
    (:func:`~cuboid.seq1f1b.schedule.validation.validate_programs`). :func:`insert_messages` posts receives early, which
    works for the schedules of :mod:`~cuboid.seq1f1b.schedule.schedules`. If a generated schedule would deadlock with
    that, or if it has collectives, messages are placed by :func:`insert_messages_once_sent`, which never deadlocks.

    Args:
        schedule: each rank's computations in order; forwards only, or backwards too.
        shape: the pipeline's shape.
        duration_s: of an action, more than 0; see :func:`insert_messages_once_sent`.

    Raises:
        ScheduleError: the schedule itself isn't valid.
    """
    backward = any(action.op is not Op.FORWARD for actions in schedule for action in actions)
    validate(schedule, shape, backward=backward)
    if not shape.head_ranks:
        programs = insert_messages(schedule, shape)
        try:
            validate_programs(programs, shape)
        except DeadlockError:
            pass
        else:
            return programs
    programs = insert_messages_once_sent(schedule, shape, duration_s)
    validate_programs(programs, shape)
    return programs


def insert_messages(schedule: Schedule, shape: PipelineShape) -> tuple[Program, ...]:
    """Insert messages, with most receives posted one computation before their use.

    A result is sent right after it is computed. A channel's receives are posted in the order of its sends. A forward's
    receive is posted before the preceding computation, which overlaps the message. So is a backward's receive, if the
    preceding computation is a backward. Before a forward it isn't: later stages may need that forward's result to
    compute the gradient; and in 1F1B, where they don't, the two directions would wait for each other if both receives
    were posted this early. Stages on the same rank exchange no messages.

    Raises:
        ScheduleError: a stage is on two ranks.
    """
    arrivals = _arrivals(schedule, shape)
    return tuple(_program(actions, shape, arrivals) for actions in schedule)


def insert_messages_once_sent(
    schedule: Schedule, shape: PipelineShape, duration_s: Callable[[Action], float] | None = None
) -> tuple[Program, ...]:
    """Insert messages, with every receive posted only after the computation that produces its message has started.

    Likewise all ranks join a collective after the last computation that contributes to it has started. The order comes
    from a simulation with these durations, by default equal ones. If all ranks' actions ran one by one in the order of
    their simulated starts, no action would wait for a message; so the programs can't deadlock, however long actions
    really take.

    Raises:
        ScheduleError: a stage is on two ranks.
        DeadlockError: the schedule itself can't be run to its end.
    """
    rank_of = placement(schedule)
    simulated = simulate(schedule, shape, duration_s or (lambda _: 1))
    begun = [(span.start_s, rank, span.action) for rank, spans in enumerate(simulated.spans) for span in spans]
    programs: list[list[Action]] = [[] for _ in schedule]
    #: How many computations that contribute to a collective have started, by its action on the last stage.
    joined: Counter[Action] = Counter()
    for _, rank, action in sorted(begun, key=lambda one: one[:2]):
        programs[rank].append(action)
        send = outgoing(action, shape)
        if send is None:
            continue
        if send.op.is_collective:
            of_last = Action(send.op, shape.stages - 1, send.micro_batch, send.segment)
            joined[of_last] += 1
            if joined[of_last] == (1 if send.op is Op.BROADCAST_HIDDEN else shape.head_ranks):
                for end in (of_last, *other_ends(of_last, shape)):
                    programs[rank_of[end.stage]].append(end)
        elif rank_of[counterpart(send).stage] != rank:
            programs[rank].append(send)
            programs[rank_of[counterpart(send).stage]].append(counterpart(send))
    return tuple(map(tuple, programs))


def to_simulate(schedule: Schedule, shape: PipelineShape, duration_s: Callable[[Action], float]) -> Schedule:
    """What :func:`~cuboid.seq1f1b.schedule.simulator.simulate` takes for a schedule as training runs it.

    With a head that is spread these are the programs, which say when ranks join its collectives; otherwise the schedule
    itself, whose messages wait for nothing.
    """
    return insert_messages_once_sent(schedule, shape, duration_s) if shape.head_ranks else schedule


def _arrivals(schedule: Schedule, shape: PipelineShape) -> dict[RankPair, list[Action]]:
    """Return the receives of each channel between two ranks, in the order of the sends."""
    rank_of = placement(schedule)
    arrivals: dict[RankPair, list[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            send = outgoing(action, shape)
            if send is not None and rank_of[counterpart(send).stage] != rank:
                arrivals.setdefault(channel(send), []).append(counterpart(send))
    return arrivals


def _program(actions: tuple[Action, ...], shape: PipelineShape, arrivals: Mapping[RankPair, list[Action]]) -> Program:
    """Return one rank's program, given the receives of all ranks."""
    here = {channel(receive) for action in actions if (receive := incoming(action, shape))} & arrivals.keys()
    place = {receive: index for key in here for index, receive in enumerate(arrivals[key])}
    posted = dict.fromkeys(here, 0)
    program: list[Action] = []

    def post(receive: Action | None) -> None:
        """Post a receive and all earlier ones of its channel, unless posted already; nothing if there is no message."""
        if receive in place:
            key, total = channel(receive), place[receive] + 1
            program.extend(arrivals[key][posted[key] : total])
            posted[key] = max(posted[key], total)

    for action, following in zip(actions, (*actions[1:], None), strict=True):
        post(incoming(action, shape))
        early = None if following is None else incoming(following, shape)
        if early is not None and (early.op is Op.RECEIVE_ACTIVATION or action.op is not Op.FORWARD):
            post(early)
        program.append(action)
        send = outgoing(action, shape)
        if send is not None and channel(send) in arrivals:
            program.append(send)
    return tuple(program)
