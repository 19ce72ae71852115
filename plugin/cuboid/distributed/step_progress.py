"""How many steps this process has begun of the models of each set of ranks, which other threads may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


#: By the ranks of the world that hold a copy together.
_by_copy: dict[tuple[int, ...], StepProgress] = {}


def progress_of(ranks: Sequence[int]) -> StepProgress:
    """The progress of models that these ranks hold together: the same object for all of them."""
    return _by_copy.setdefault(tuple(ranks), StepProgress())


def progress_by_copy(rank: int) -> dict[tuple[int, ...], StepProgress]:
    """What several ranks, of which ``rank`` is one, have begun together, by these ranks."""
    return {ranks: progress for ranks, progress in list(_by_copy.items()) if len(ranks) > 1 and rank in ranks}
