"""The vocabulary of schedules: what one rank does at one time.

A *unit* is one segment of one micro-batch on one stage. A schedule says in which order each rank computes its units;
a program is one rank's part of it with the messages written in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from cuboid.errors import CuboidError


class Op(Enum):
    """What is done with a unit."""

    FORWARD = "F"
    #: Both gradients at once: of the stage's input and of its weights.
    BACKWARD = "B"
    #: The first half of a split backward; what the previous stage and the earlier segments wait for.
    INPUT_GRADIENT = "I"
    #: The other half, for which nobody waits.
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    # Members are singletons; the name's hash, which is Enum's, costs more than all else in a large simulation.
    __hash__ = object.__hash__

    @property
    def computes(self) -> bool:
        """Whether this keeps the rank busy; the others are messages between two ranks."""
        return len(self.value) == 1


@dataclass(frozen=True, slots=True)
class Action:
    """One operation on one unit, all numbers counted from 0. For a message, ``stage`` is the end where it is done.

    Written ``F2.0.3``: the operation, the stage, the micro-batch, the segment.
    """

    op: Op
    stage: int
    micro_batch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.micro_batch}.{self.segment}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` writes.

        Raises:
            CuboidError: the text isn't of that form.
        """
        match = re.fullmatch(r"(F|B|I|W|SA|RA|SG|RG)(\d+)\.(\d+)\.(\d+)", text)
        if match is None:
            raise CuboidError(
                f"{text!r} is not an action; write, for example, F2.0.3: stage 2, micro-batch 0, segment 3"
            )
        stage, micro_batch, segment = (int(number) for number in match.groups()[1:])
        return cls(Op(match[1]), stage, micro_batch, segment)


#: For each rank (by its pipe coordinate) what it computes, in order. Which stages a rank has follows from it.
Schedule = tuple[tuple[Action, ...], ...]
#: What one rank computes, in order, with its messages among it.
Program = tuple[Action, ...]
