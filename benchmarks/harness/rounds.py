"""Rounds in which every contestant has a turn, so that what changes slowly on the machine touches all alike; and what
many rounds say: those that count, and one number with its spread for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from harness.watch import QUIET

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One step of one contestant.

    Args:
        step_s: of the slowest rank.
        computing_s: processor time of all ranks together.
        foreign: part of the cores that other processes took meanwhile.
        figures: whatever else the case wants to know of a step.
    """

    step_s: float
    computing_s: float
    foreign: float
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_quiet(self) -> bool:
        """Whether the step counts."""
        return self.foreign <= QUIET

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        common = {"step_s": self.step_s, "computing_s": self.computing_s, "foreign": self.foreign}
        return {**common, **self.figures}


@dataclass
class Record:
    """All that was measured of one contestant.

    Args:
        entry: which one it is; what ranks know it by.
        name: for people.
        error: how far it was from what is right, relatively.
        facts: what else was found before the rounds.
        samples: by round.
        floor: samples on links without a limit; empty where all samples are that.
        rejected: steps that were measured again.
    """

    entry: Any
    name: str
    error: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    floor: list[Sample] = field(default_factory=list)
    rejected: int = 0

    def numbers(self, ratio_to: Iterable[tuple[str, Record]] = ()) -> dict[str, Any]:
        """What the samples say, as plain values for the record.

        Args:
            ratio_to: the others by the name under which ``ratios`` has how many times as fast this one is.
        """
        quiet = undisturbed(self.samples)
        return {
            "step_s": spread([sample.step_s for sample in quiet]),
            "computing_s": statistics.median(sample.computing_s for sample in quiet),
            "floor_s": spread([sample.step_s for sample in undisturbed(self.floor)]) if self.floor else None,
            "ratios": {key: times_as_fast(self.samples, other.samples) for key, other in ratio_to},
            "undisturbed": sum(sample.is_quiet for sample in self.samples),
            "rejected": self.rejected,
            "samples": [sample.numbers() for sample in self.samples],
            "floor_samples": [sample.numbers() for sample in self.floor],
        }


class Calm(Protocol):
    """Says when to measure; see :class:`harness.watch.Watch`."""

    def wait(self) -> None: ...

    def is_over(self) -> bool: ...


def in_turn(members: Sequence[T], number: int) -> Sequence[T]:
    """The order of round ``number``: another one each time, so that nobody always comes behind the same one."""
    first = number % len(members)
    return [*members[first:], *members[:first]]


def undisturbed_sample(measure: Callable[[], Sample], calm: Calm, record: Record) -> Sample:
    """A sample during which nobody else computed; once the time for waiting is over, any."""
    while True:
        calm.wait()
        sample = measure()
        if sample.is_quiet or calm.is_over():
            return sample
        record.rejected += 1


def run_rounds(
    records: Sequence[Record],
    repeats: int,
    calm: Calm,
    measure: Callable[[Record], Sample],
    after_round: Callable[[], None] = lambda: None,
    *,
    floor: bool = False,
) -> None:
    """Rounds with a step of every contestant each.

    Args:
        records: get the samples.
        repeats: number of rounds.
        calm: tells when to measure.
        measure: has one contestant do a step.
        after_round: called when a round is complete.
        floor: whether these are the samples on links without a limit.
    """
    for number in range(repeats):
        for record in in_turn(records, number):
            own = record.floor if floor else record.samples
            own.append(undisturbed_sample(lambda record=record: measure(record), calm, record))
        after_round()


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """Those that count; all where none does, for numbers that are marked as doubtful are better than none."""
    return [sample for sample in samples if sample.is_quiet] or list(samples)


def undisturbed_rounds(records: Sequence[Record]) -> list[tuple[Sample, ...]]:
    """The rounds in which everybody's sample counts; all where none is such a round. One that was left out after some
    rounds has fewer."""
    rounds = list(zip(*(record.samples for record in records), strict=False))
    return [samples for samples in rounds if all(sample.is_quiet for sample in samples)] or rounds


def times_as_fast(own: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, float]:
    """How many times as long their steps take, round by round; over the rounds in which both were undisturbed."""
    rounds = list(zip(own, theirs, strict=True))
    quiet = [each for each in rounds if each[0].is_quiet and each[1].is_quiet] or rounds
    return spread([their.step_s / our.step_s for our, their in quiet])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and how many values there are."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high, "count": len(values)}
