"""The actions that schedules consist of.

A *unit* is one segment of one micro-batch on one stage. A schedule is the order in which each rank computes its units.
A program is one rank's part of a schedule with sends and receives inserted.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """An operation on a unit."""

    FORWARD = "F"
    #: A whole backward: gradients of the stage's input and of its weights.
    BACKWARD = "B"
    #: The first half of a split backward, on which the previous stage and the earlier segments depend.
    INPUT_GRADIENT = "I"
    #: The second half, on which no other action depends.
    WEIGHT_GRADIENT = "W"
    #: Where the head is spread over the ranks: one rank's share of a unit's logits.
    HEAD_FORWARD = "H"
    #: The same share's part of the gradients, once all ranks' sums of exponentials are known.
    HEAD_BACKWARD = "G"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    #: Collectives of all ranks of the pipeline, for a head that is spread: the last stage's output to all of them;
    BROADCAST_HIDDEN = "BH"
    #: what each rank knows of its share's logits, to all of them;
    GATHER_STATISTICS = "GS"
    #: and the sum of the gradients of that output, to the last stage.
    REDUCE_GRADIENT = "SH"

    # Members are singletons, so identity will do. Enum's own hash, that of the name, would take most of the time of a
    # large simulation.
    __hash__ = object.__hash__

    @property
    def computes(self) -> bool:
        """Whether this is a computation; the others are messages between two ranks."""
        return len(self.value) == 1

    @property
    def is_collective(self) -> bool:
        """Whether this is a message that all ranks of the pipeline take part in."""
        return self in _COLLECTIVES

    @property
    def is_head(self) -> bool:
        """Whether this is a computation of a head that is spread over the ranks."""
        return self is Op.HEAD_FORWARD or self is Op.HEAD_BACKWARD


_COLLECTIVES = frozenset((Op.BROADCAST_HIDDEN, Op.GATHER_STATISTICS, Op.REDUCE_GRADIENT))


class Action(NamedTuple):
    """One operation on one unit; all numbers start at 0. A message's stage is the stage that sends or receives it.

    A rank's share of a head that is spread has the number of the rank's last stage (``PipelineShape.head_stages``).
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
