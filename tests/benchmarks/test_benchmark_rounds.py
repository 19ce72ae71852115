"""Whose turn it is in a round, and what is measured again."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.rounds import Record, Sample, check_equal, in_turn, run_rounds, undisturbed_sample
from harness.watch import QUIET

from cuboid.errors import CuboidError


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
    record, patience = Record("one", "one"), Patience(times)
    sample = undisturbed_sample(lambda _: Sample(1.0, 1.0, next(shares)), patience, record)
    quiet = [place for place, share in enumerate([*foreign, 0.0]) if share <= QUIET]
    assert record.rejected == min(quiet[0], times - 1)
    assert patience.waited == record.rejected + 1
    assert sample.foreign == [*foreign, 0.0][record.rejected]


@given(st.lists(st.floats(1, 9), min_size=2, max_size=5), st.integers(1, 4))
def test_ratios_are_of_rounds_in_which_both_were_undisturbed(times, repeats):
    records = [Record(number, str(number)) for number in range(len(times))]
    done = []

    def measure(record):
        # The first round is disturbed for everybody, and takes any time.
        is_first = not record.samples
        return Sample(99.0 if is_first else times[record.entry], 1.0, 1.0 if is_first else 0.0)

    run_rounds(records, repeats + 1, Patience(0), measure, lambda: done.append(len(records[0].samples)))
    assert done == list(range(1, repeats + 2))
    first, second = records[:2]
    numbers = first.numbers([("second", second)])
    assert numbers["undisturbed"] == repeats
    assert numbers["step_s"]["median"] == times[0]
    assert abs(numbers["ratios"]["second"]["median"] - times[1] / times[0]) < 1e-9


@given(st.floats(1, 9), st.floats(-0.1, 0.1))
def test_numbers_that_are_too_far_apart_are_refused_by_name(right, difference):
    actual, expected = {"loss": right * (1 + difference), "other": 1.0}, {"loss": right}
    if abs(difference) < 0.01:
        assert check_equal("A", actual, "B", expected, 0.0101) == pytest.approx(abs(difference), abs=1e-9)
    elif abs(difference) > 0.011:
        with pytest.raises(CuboidError, match=r"A has loss .*, but B has .*: they don't compute the same"):
            check_equal("A", actual, "B", expected, 0.0101)


def test_what_is_no_number_is_refused():
    with pytest.raises(CuboidError, match=r"A has loss nan, but B has 1\.0"):
        check_equal("A", {"loss": float("nan")}, "B", {"loss": 1.0}, 0.1)
