"""How many steps this process has begun of the models of each set of ranks, which other threads may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass
class StepProgress:
    """What ranks that hold a copy of a model together do alike: parts of steps, such as a forward or a backward.

    Attributes:
        begun: how many this process has begun.
        running: the one that runs, or the last one.
        is_inside: whether it still runs.
        is_broken: whether one failed, so that ranks may have begun different numbers.
    """

    begun: int = 0
    running: str = ""
    is_inside: bool = False
    is_broken: bool = False


#: Of a process group of all ranks, by those that hold a copy together.
_by_group: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], StepProgress]] = WeakKeyDictionary()


def progress_of(ranks: Sequence[int]) -> StepProgress:
    """The progress of models that these ranks hold together: the same object for all of them."""
    world = dist.group.WORLD
    return StepProgress() if world is None else _by_group.setdefault(world, {}).setdefault(tuple(ranks), StepProgress())


def progress_by_copy(rank: int) -> dict[tuple[int, ...], StepProgress]:
    """What several ranks, of which ``rank`` is one, have begun together, by these ranks."""
    world = dist.group.WORLD
    by_copy = {} if world is None else _by_group.get(world, {})
    return {ranks: progress for ranks, progress in list(by_copy.items()) if len(ranks) > 1 and rank in ranks}
