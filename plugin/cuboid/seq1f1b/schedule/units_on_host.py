"""Which units of a pipeline's step wait in host memory between their forward and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from cuboid.seq1f1b.schedule.actions import Action, Op

#: (stage, micro-batch, segment)
UnitOnRank = tuple[int, int, int]
#: A unit without hold time stays on the device if it is at most this part of what the rank holds at its peak.
_LARGEST_STAYING = 1 / 4


def unit_of(action: Action) -> UnitOnRank:
    """The unit of an action."""
    return action.stage, action.micro_batch, action.segment


def units_on_host(actions: Sequence[Action], kept_bytes: Callable[[Action], float]) -> frozenset[UnitOnRank]:
    """The units that one rank moves to the host.

    What moving a unit saves is its hold time (the computations between its forward and its backward) times its bytes.
    A unit whose backward is the rank's next computation therefore stays, unless it is a large part of what the rank
    holds: then its own backward needs the room, in which its layers come back one by one.

    Args:
        actions: the rank's, in order.
        kept_bytes: what the unit of a forward keeps, in any measure.
    """
    computations = [action for action in actions if action.op.computes]
    sizes = {unit_of(action): kept_bytes(action) for action in computations if action.op is Op.FORWARD}
    held = peak = 0.0
    for action in computations:
        if action.op is Op.FORWARD:
            held += sizes[unit_of(action)]
            peak = max(peak, held)
        elif _frees(action):
            held -= sizes[unit_of(action)]
    stays = {
        unit_of(action)
        for action, after in pairwise(computations)
        if action.op is Op.FORWARD and _frees(after) and unit_of(after) == unit_of(action)
    }
    return frozenset(unit for unit, size in sizes.items() if unit not in stays or size > peak * _LARGEST_STAYING)


def fetched_before(actions: Sequence[Action]) -> dict[Action, UnitOnRank]:
    """By a rank's computations: the unit that begins to come back with it, whose backward is the next one."""
    computations = [action for action in actions if action.op.computes]
    return {action: unit_of(after) for action, after in pairwise(computations) if _frees(after)}


def _frees(action: Action) -> bool:
    return action.op in (Op.BACKWARD, Op.INPUT_GRADIENT)
