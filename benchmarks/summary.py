"""What many rounds say: those that count, and one number with its spread for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

from quiet import Judged, Timed

SampleT = TypeVar("SampleT", bound=Judged)


def undisturbed(samples: Sequence[SampleT]) -> list[SampleT]:
    """Those that count; all where none does, for numbers that are marked as doubtful are better than none."""
    return [sample for sample in samples if sample.is_quiet] or list(samples)


def is_quiet_round(samples: Iterable[Judged]) -> bool:
    """Whether all of a round's samples count."""
    return all(sample.is_quiet for sample in samples)


def undisturbed_rounds(rounds: Iterable[tuple[SampleT, ...]]) -> list[tuple[SampleT, ...]]:
    """The rounds in which everybody's sample counts; all where none is such a round."""
    rounds = list(rounds)
    return list(filter(is_quiet_round, rounds)) or rounds


def times_as_fast(own: Sequence[Timed], theirs: Sequence[Timed]) -> dict[str, float]:
    """How many times as long their steps take, round by round; over the rounds in which both were undisturbed."""
    rounds = undisturbed_rounds(zip(own, theirs, strict=True))
    return spread([their.step_s / our.step_s for our, their in rounds])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and how many values there are."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high, "count": len(values)}
