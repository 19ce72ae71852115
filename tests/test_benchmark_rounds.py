"""Whose turn it is in a round, and what is measured again."""

import sys
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from quiet import QUIET, Judged
from rounds import in_turn, undisturbed_sample


@dataclass
class Sample(Judged):
    foreign: float


@dataclass
class Record:
    rejected: int = 0


class Patience:
    """Waits for quiet times so often."""

    def __init__(self, times):
        self.times, self.waited = times, 0

    def wait(self):
        self.waited += 1

    def is_over(self):
        return self.waited >= self.times


@given(st.lists(st.integers(), min_size=1, max_size=9, unique=True))
def test_everybody_is_in_every_place_once(members):
    rounds = [in_turn(members, number) for number in range(len(members))]
    for in_one_place in [*rounds, *zip(*rounds, strict=True)]:
        assert sorted(in_one_place) == sorted(members)
    # Somebody else comes first each time, and everything begins anew after as many rounds.
    assert in_turn(members, len(members)) == members


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 9))
def test_the_first_quiet_sample_counts_and_any_once_patience_is_over(foreign, times):
    shares = iter([*foreign, *[0.0] * times])
    record, patience = Record(), Patience(times)
    sample = undisturbed_sample(lambda: Sample(next(shares)), patience, record)
    quiet = [place for place, share in enumerate([*foreign, 0.0]) if share <= QUIET]
    assert record.rejected == min(quiet[0], times - 1)
    assert patience.waited == record.rejected + 1
    assert sample.foreign == [*foreign, 0.0][record.rejected]
