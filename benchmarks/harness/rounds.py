"""Rounds in which every contestant has a turn, so that what changes slowly on the machine touches all alike; and what
many rounds say: those that count, and one number with its spread for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuboid.errors import CuboidError
from harness.tables import Row
from harness.watch import QUIET, Watch


@dataclass(frozen=True)
class Sample:
    """One step of one contestant."""

    step_s: float  # of the slowest rank
    computing_s: float  # processor time of all ranks together
    foreign: float  # part of the cores that other processes took meanwhile
    figures: Row = field(default_factory=dict)  # whatever else the case wants to know of a step

    @property
    def is_quiet(self) -> bool:
        """Whether the step counts."""
        return self.foreign <= QUIET

    def numbers(self) -> Row:
        return {"step_s": self.step_s, "computing_s": self.computing_s, "foreign": self.foreign, **self.figures}


@dataclass
class Record:
    """All that was measured of one contestant; ``floor`` are samples on links without a limit, if others have one."""

    entry: Any  # which one it is; what ranks know it by
    name: str  # for people
    error: float = 0.0  # how far it was from what is right, relatively
    facts: Row = field(default_factory=dict)  # what else was found before the rounds
    samples: list[Sample] = field(default_factory=list)  # by round
    floor: list[Sample] = field(default_factory=list)
    rejected: int = 0  # steps that were measured again

    def numbers(self, ratio_to: Iterable[tuple[str, Record]] = ()) -> Row:
        """For the record; by the names of ``ratio_to``, how many times as fast this one is as others."""
        quiet = undisturbed(self.samples)
        return {
            "step_s": spread([sample.step_s for sample in quiet]),
            "computing_s": statistics.median(sample.computing_s for sample in quiet),
            "floor_s": spread([sample.step_s for sample in undisturbed(self.floor)]) if self.floor else None,
            "ratios": {
                key: spread([theirs.step_s / ours.step_s for ours, theirs in undisturbed_rounds([self, other])])
                for key, other in ratio_to
            },
            **count_disturbed([self]),
            "samples": [sample.numbers() for sample in self.samples],
        }


def run_rounds(
    records: Sequence[Record],
    repeats: int,
    watch: Watch,
    measure: Callable[[Record], Sample],
    after_round: Callable[[], None] = lambda: None,
    *,
    floor: bool = False,
) -> None:
    """Rounds with a step of every contestant each. With ``floor`` these are the samples on links without a limit."""
    for number in range(repeats):
        for record in in_turn(records, number):
            samples = record.floor if floor else record.samples
            samples.append(undisturbed_sample(measure, watch, record))
        after_round()


def in_turn(members: Sequence[Any], number: int) -> Sequence[Any]:
    """The order of round ``number``: another one each time, so that nobody always comes behind the same one."""
    first = number % len(members)
    return [*members[first:], *members[:first]]


def undisturbed_sample(measure: Callable[[Record], Sample], watch: Watch, record: Record) -> Sample:
    """A sample during which nobody else computed; once the time for waiting is over, any."""
    while True:
        watch.wait()
        sample = measure(record)
        if sample.is_quiet or watch.is_over():
            return sample
        record.rejected += 1


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """Those that count; all where none does, for numbers that are marked as doubtful are better than none."""
    return [sample for sample in samples if sample.is_quiet] or list(samples)


def undisturbed_rounds(records: Sequence[Record]) -> list[tuple[Sample, ...]]:
    """The rounds in which everybody's sample counts; all where none is such a round."""
    rounds = list(zip(*(record.samples for record in records), strict=True))
    return [samples for samples in rounds if all(sample.is_quiet for sample in samples)] or rounds


def count_disturbed(records: Sequence[Record]) -> Row:
    """For the record: rounds that count for all of these, and steps that were measured again."""
    rounds = zip(*(record.samples for record in records), strict=True)
    return {
        "undisturbed": sum(all(sample.is_quiet for sample in samples) for samples in rounds),
        "rejected": sum(record.rejected for record in records),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and how many values there are."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high, "count": len(values)}


def check_equal(name: str, actual: Row, of: str, expected: Row, allowed: float) -> float:
    """How far the numbers are that a contestant found; refused with a CuboidError where that is more than allowed."""
    worst = 0.0
    for what, right in expected.items():
        difference = abs(actual[what] / right - 1)
        if not difference <= allowed:
            raise CuboidError(f"{name} has {what} {actual[what]}, but {of} has {right}: they don't compute the same")
        worst = max(worst, difference)
    return worst
