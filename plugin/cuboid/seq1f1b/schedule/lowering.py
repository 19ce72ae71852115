"""From a schedule to the programs of the ranks: where messages are sent and received.

On CUDA a posted receive is a kernel that spins until the message comes, and whatever waits for the whole device (the
first launch of a kernel that isn't loaded yet, a ``cudaFree`` of the allocator) waits for it too. So a receive must not
be posted before something that its own message depends on.
"""

from __future__ import annotations

from collections.abc import Mapping

from cuboid.seq1f1b.schedule.actions import Action, Op, Program, Schedule
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, incoming, outgoing
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import simulate
from cuboid.seq1f1b.schedule.validation import DeadlockError, placement, validate, validate_programs

#: Source and target stage.
Channel = tuple[int, int]


def lower(schedule: Schedule, shape: PipelineShape) -> tuple[Program, ...]:
    """Write the messages into a schedule so that no rank can block another for ever.

    That holds even where every action first waits for all that its device has begun
    (:func:`~cuboid.seq1f1b.schedule.validation.validate_programs`). The schedules of
    :mod:`~cuboid.seq1f1b.schedule.schedules` get their receives from :func:`insert_messages`; one with which that
    deadlocks gets them from :func:`insert_messages_once_sent`, which never does.

    Args:
        schedule: what each rank computes, in order; forwards only, or backwards too.
        shape: of the pipeline.

    Raises:
        ScheduleError: the schedule itself isn't valid.
    """
    backward = any(action.op is not Op.FORWARD for actions in schedule for action in actions)
    validate(schedule, shape, backward=backward)
    programs = insert_messages(schedule, shape)
    try:
        validate_programs(programs, shape)
    except DeadlockError:
        programs = insert_messages_once_sent(schedule, shape)
        validate_programs(programs, shape)
    return programs


def insert_messages(schedule: Schedule, shape: PipelineShape) -> tuple[Program, ...]:
    """Write the messages into a schedule, with most receives posted one computation before their use.

    A result is sent right after it is computed. A channel's receives are posted in the order of its sends. What a
    forward receives is posted before the computation in front of it, behind which it then travels. So is what a
    backward receives, if that computation is a backward. It isn't if it is a forward: the later stages may need its
    result for the gradient; and in 1F1B, where they don't, the two directions would wait for each other if both were
    this early. Stages on one rank exchange no messages.

    Raises:
        ScheduleError: a stage is on two ranks.
    """
    arrivals = _arrivals(schedule, shape)
    return tuple(_program(actions, shape, arrivals) for actions in schedule)


def insert_messages_once_sent(schedule: Schedule, shape: PipelineShape) -> tuple[Program, ...]:
    """Write the messages into a schedule, with every receive posted once the computation of its message has begun.

    When that is follows from a simulation in which all computations take equally long. Carried out one after the other,
    as they begin there, no action has to wait for a message; so the ranks come to the end whenever they run.

    Raises:
        ScheduleError: a stage is on two ranks.
        DeadlockError: the schedule itself can't be run to its end.
    """
    rank_of = placement(schedule)
    simulated = simulate(schedule, shape, lambda _: 1)
    begun = [(span.start_s, rank, span.action) for rank, spans in enumerate(simulated.spans) for span in spans]
    programs: list[list[Action]] = [[] for _ in schedule]
    for _, rank, action in sorted(begun, key=lambda one: one[:2]):
        programs[rank].append(action)
        send = outgoing(action, shape)
        if send is not None and rank_of[counterpart(send).stage] != rank:
            programs[rank].append(send)
            programs[rank_of[counterpart(send).stage]].append(counterpart(send))
    return tuple(map(tuple, programs))


def _arrivals(schedule: Schedule, shape: PipelineShape) -> dict[Channel, list[Action]]:
    """The receives of each channel between two ranks, in the order of the sends."""
    rank_of = placement(schedule)
    arrivals: dict[Channel, list[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            send = outgoing(action, shape)
            if send is not None and rank_of[counterpart(send).stage] != rank:
                arrivals.setdefault(channel(send), []).append(counterpart(send))
    return arrivals


def _program(actions: tuple[Action, ...], shape: PipelineShape, arrivals: Mapping[Channel, list[Action]]) -> Program:
    """One rank's program, given the receives of all ranks."""
    here = {channel(receive) for action in actions if (receive := incoming(action, shape))} & arrivals.keys()
    place = {receive: index for key in here for index, receive in enumerate(arrivals[key])}
    posted = dict.fromkeys(here, 0)
    program: list[Action] = []

    def post(receive: Action | None) -> None:
        """Have a receive posted, with those that are sent before it, if it comes from another rank."""
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
