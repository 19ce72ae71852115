"""Rounds in which everybody has a turn, so that what changes slowly on the machine touches all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from quiet import Judged

T = TypeVar("T")
SampleT = TypeVar("SampleT", bound=Judged)


class Calm(Protocol):
    """Says when to measure."""

    def wait(self) -> None:
        """Until nobody else computes, or the time for waiting is over."""
        ...

    def is_over(self) -> bool:
        """Whether it is."""
        ...


class Repeated(Protocol):
    """A record of what is measured again where it was disturbed.

    Attributes:
        rejected: how often that was.
    """

    rejected: int


def in_turn(members: Sequence[T], number: int) -> Sequence[T]:
    """The order of round ``number``: another one each time, so that nobody always comes behind the same one."""
    first = number % len(members)
    return [*members[first:], *members[:first]]


def undisturbed_sample(measure: Callable[[], SampleT], calm: Calm, record: Repeated) -> SampleT:
    """A sample during which nobody else computed; once the time for waiting is over, any."""
    while True:
        calm.wait()
        sample = measure()
        if sample.is_quiet or calm.is_over():
            return sample
        record.rejected += 1
