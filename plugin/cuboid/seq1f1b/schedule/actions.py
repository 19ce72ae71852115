"""The actions that schedules consist of.

A *unit* is one segment of one micro-batch on one stage. A schedule is the order in which each rank computes its units.
A program is one rank's part of a schedule with sends and receives inserted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """An operation on a unit."""

    FORWARD = "F"
    #: A whole backward: gradients of the stage's input and of its weights.
    BACKWARD = "B"
    #: The first half of a split backward, on which the previous stage and the earlier segments depend.
    INPUT_GRADIENT = "I"
    #: The second half, on which no other action depends.
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    # Members are singletons, so identity will do. Enum's own hash, that of the name, would take most of the time of a
    # large simulation.
    __hash__ = object.__hash__

    @property
    def computes(self) -> bool:
        """Whether this is a computation; the others are messages between two ranks."""
        return len(self.value) == 1


@dataclass(frozen=True, slots=True)
class Action:
    """One operation on one unit; all numbers start at 0. A message's stage is the stage that sends or receives it.

    Written as ``F2.0.3``: operation, stage, micro-batch, segment.
    """

    op: Op
    stage: int
    micro_batch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.micro_batch}.{self.segment}"


#: For each rank, in the order of pipe coordinates, its computations in order. This also defines each stage's rank.
Schedule = tuple[tuple[Action, ...], ...]
#: One rank's computations and messages, in order.
Program = tuple[Action, ...]
