"""Programs that posted receives too early, to see that the proofs find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cuboid.seq1f1b.schedule import lowering
from cuboid.seq1f1b.schedule.actions import Action, Program, Schedule
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, incoming, outgoing
from cuboid.seq1f1b.schedule.schedules import PipelineShape


def former_programs(schedule: Schedule, shape: PipelineShape) -> tuple[Program, ...]:
    """A schedule's programs as they were until November 2026, where each rank has one stage.

    The first receive of every channel is posted at the start, and the next one always before the use of the last.
    """
    arrivals: dict[tuple[int, int], list[Action]] = {}
    for actions in schedule:
        for action in actions:
            send = outgoing(action, shape)
            if send is not None:
                arrivals.setdefault(channel(send), []).append(counterpart(send))
    programs = []
    for stage, actions in enumerate(schedule):
        waiting = {key: list(receives) for key, receives in arrivals.items() if key[1] == stage}
        program = [waiting[key].pop(0) for key in sorted(waiting)]
        for action in actions:
            receive = incoming(action, shape)
            if receive is not None and waiting[channel(receive)]:
                program.append(waiting[channel(receive)].pop(0))
            program.append(action)
            send = outgoing(action, shape)
            program += [] if send is None else [send]
        programs.append(tuple(program))
    return tuple(programs)


@contextmanager
def formerly_lowered() -> Iterator[None]:
    """Inside, schedules that this process hasn't lowered yet get these programs, which the validator isn't shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "insert_messages", former_programs)
        patch.setattr(lowering, "validate_programs", lambda *_: None)
        yield
