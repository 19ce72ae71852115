"""From a schedule to the programs of the ranks: where messages are sent and received."""

from __future__ import annotations

from collections.abc import Mapping

from cuboid.seq1f1b.schedule.actions import Action, Op, Program, Schedule
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, incoming, outgoing
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.validation import DeadlockError, placement, validate, validate_programs

#: Source and target stage.
Channel = tuple[int, int]


def lower(schedule: Schedule, shape: PipelineShape, ahead: int = 1) -> tuple[Program, ...]:
    """Write the messages into a schedule so that no rank can block another for ever.

    Args:
        schedule: what each rank computes, in order; forwards only, or backwards too.
        shape: of the pipeline.
        ahead: see :func:`insert_messages`. 1 is enough for the schedules here, and 0 is not. For a schedule that
            needs more, more is taken: with as many as there are messages no send ever waits, so there is an end to it.

    Raises:
        ScheduleError: the schedule itself isn't valid.
    """
    backward = any(action.op is not Op.FORWARD for actions in schedule for action in actions)
    validate(schedule, shape, backward=backward)
    while True:
        programs = insert_messages(schedule, shape, ahead)
        try:
            validate_programs(programs, shape)
        except DeadlockError:
            assert ahead < shape.units, "a valid schedule runs when every receive is posted at the start"
            ahead += 1
        else:
            return programs


def insert_messages(schedule: Schedule, shape: PipelineShape, ahead: int) -> tuple[Program, ...]:
    """Write the messages into a schedule, with receives posted ``ahead`` of the one that is being used.

    A result is sent right after it is computed. A channel's receives are posted in the order of its sends: the first
    ``ahead`` of them at the start, and the next right before the computation that uses up an earlier one, so that its
    transfer overlaps with this computation. Stages on one rank exchange no messages.

    Raises:
        ScheduleError: a stage is on two ranks.
    """
    arrivals = _arrivals(schedule, shape)
    return tuple(_program(actions, shape, arrivals, ahead) for actions in schedule)


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


def _program(
    actions: tuple[Action, ...], shape: PipelineShape, arrivals: Mapping[Channel, list[Action]], ahead: int
) -> Program:
    """One rank's program, given the receives of all ranks."""
    here = {channel(receive) for action in actions if (receive := incoming(action, shape))} & arrivals.keys()
    place = {receive: index for key in here for index, receive in enumerate(arrivals[key])}
    posted = dict.fromkeys(here, 0)
    program: list[Action] = []

    def post(key: Channel, total: int) -> None:
        """Have ``total`` of a channel's receives posted, or all if there are fewer."""
        program.extend(arrivals[key][posted[key] : total])
        posted[key] = max(posted[key], total)

    for key in sorted(here):
        post(key, ahead)
    for action in actions:
        receive, send = incoming(action, shape), outgoing(action, shape)
        if receive in place:
            post(channel(receive), place[receive] + 1 + ahead)
        program.append(action)
        if send is not None and channel(send) in arrivals:
            program.append(send)
    return tuple(program)
