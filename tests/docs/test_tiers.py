"""Each case of a test is for one of `make test`, `make test-ci` and `make test-slow`, and CI runs the first two."""

import re
import shlex
from collections import Counter

import pytest

from launching import ROOT

pytest_plugins = ["pytester"]

CONFTEST = """
    from tiers import mark_tiers

    def pytest_collection_modifyitems(items):
        mark_tiers(items)
"""
#: Its last cases have marks of their own.
MARKED = """
{decorator}
@pytest.mark.parametrize("case", [
    *range(10),
    pytest.param("ci", marks=pytest.mark.ci),
    pytest.param("slow", marks=pytest.mark.slow),
    pytest.param("both", marks=[pytest.mark.ci, pytest.mark.slow]),
])
def test_{number}(case):
    pass
"""


def expression_of(target):
    """What a target of the Makefile tells pytest to choose by."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(rf"^{target}: install .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    words = shlex.split(recipe.partition("-m pytest ")[2])
    return words[words.index("-m") + 1]


@pytest.fixture
def chosen(pytester):
    """By each target, the cases that it runs of tests with these decorators, and their number."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\naddopts = --strict-markers\nmarkers =\n    ci\n    slow\n    sample\n")

    def choose(decorators):
        tests = [MARKED.format(decorator=decorator, number=number) for number, decorator in enumerate(decorators)]
        path = pytester.makepyfile("import pytest\n" + "".join(tests))
        by_target = []
        for target in ("test", "test-ci", "test-slow"):
            run = pytester.inline_run("--collect-only", path, "-m", expression_of(target))
            (finished,) = run.getcalls("pytest_collection_finish")
            by_target.append([(item.originalname, item.callspec.params["case"]) for item in finished.session.items])
        return by_target

    return choose


def test_each_case_has_one_tier(chosen):
    decorators = ["", *(f"@pytest.mark.{mark}" for mark in ("ci", "slow", "sample(1)", "sample(1, ci=3)"))]
    times = Counter(case for cases in chosen(decorators) for case in cases)
    assert len(times) == 13 * len(decorators)
    assert {*times.values()} == {1}


def test_a_sample_is_evenly_spread_over_the_cases_without_a_mark_of_their_own(chosen):
    samples = {
        "2": [[0, 9], []],
        "1, ci=2": [[0], [4, 9]],
        "2, ci=2": [[0, 9], [3, 6]],
        "0, ci=1": [[], [0]],
        "2, ci='others'": [[0, 9], [*range(1, 9)]],
        "20": [[*range(10)], []],
    }
    first, beside, _ = chosen([f"@pytest.mark.sample({arguments})" for arguments in samples])
    for number, tiers in enumerate(samples.values()):
        name = f"test_{number}"
        assert [[case for test, case in cases if test == name] for cases in (first, beside)] == [
            tiers[0],
            [*tiers[1], "ci"],
        ]


def test_continuous_integration_runs_the_first_two():
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [command for command in commands if command.startswith("make test")] == ["make test", "make test-ci"]
