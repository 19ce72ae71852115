"""`cuboid verify` finds mistakes: each of :mod:`mutations`, with the batches that it takes by default."""

import re
from collections.abc import Callable, Iterator

import pytest

from comparing import describe
from conftest import TIMEOUT_S
from cuboid import CuboidError
from cuboid.verify import PassReport, Plan, SmallModel, verify
from launching import ROOT
from mutations import BY_NAME, MUTATIONS
from mutations.mutation import Layout, Mutation
from mutations.pool import MutatedPool
from mutations.reported import PUBLISHED, published_table

#: A few that once went unnoticed; `-m slow` has all.
SAMPLE = (
    "padding_idx ignored",
    "labels wrong in the second chunk",
    "all gradients × 1.02",
    "the last layer's gradients × 1.02",
)
#: Of the checks that look at Cuboid alone, the quickest to find.
ALONE = ("dropout alike in every call", "gradients in bf16 from rank to rank", "random states of the first rank")
Run = Callable[..., PassReport]


@pytest.fixture(scope="module")
def mutated() -> Iterator[MutatedPool]:
    with MutatedPool(4) as pool:
        yield pool


@pytest.fixture
def run(mutated: MutatedPool, checkpoint: Callable[[SmallModel], str]) -> Run:
    """Verifies as the command does by default, in the pass that is to find a mutation."""

    def with_mistake(mutation: Mutation, *, healthy: bool = False) -> PassReport:
        mutated.mutation = "" if healthy else mutation.name
        plan = Plan(
            checkpoint(mutation.small),
            dtype=mutation.dtype,
            keep_float64=mutation.dtype == "float64",
            batch=4,
            accumulate=2,
            data_parallel=mutation.layout.replicas,
        )
        options = {"passes": (mutation.name_of_pass,), "pool": mutated, "timeout_s": TIMEOUT_S}
        return verify(plan, mutation.layout.config, **options).passes[0]

    return with_mistake


def check(run: Run, mutation: Mutation) -> None:
    if mutation.stops_with:
        with pytest.raises(CuboidError, match=mutation.stops_with):
            run(mutation)
        return
    report = run(mutation)
    kinds = dict.fromkeys(check.kind for check in report.checks if not check.passed)
    print(f"| {mutation.name} | {mutation.name_of_pass} | {', '.join(kinds)} | {report.first_difference} |")
    assert not report.passed
    assert set(mutation.found_by) & set(kinds)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("name", SAMPLE)
def test_mistakes_that_were_missed_are_found(run: Run, name: str) -> None:
    check(run, BY_NAME[name])


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("name", ALONE)
def test_what_plain_transformers_does_not_show_is_found(run: Run, name: str) -> None:
    check(run, BY_NAME[name])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mistake_can_be_made(mutation: Mutation) -> None:
    """What it replaces is still there, so that the slow tests find a mistake and not a name that is gone."""
    with mutation.mutate():
        pass


def test_the_page_says_of_each_published_kind_what_sees_it() -> None:
    assert {mutation.published for mutation in MUTATIONS} - {None} == set(PUBLISHED)
    page = (ROOT / "docs" / "silent_bugs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \|.*", page.partition("## Reproduced")[0], re.MULTILINE)
    # One more column has the threads.
    begins = [row.startswith(begin) for row, begin in zip(rows, published_table(), strict=True)]
    assert all(begins), "docs/silent_bugs.md has to have these rows:\n" + "\n".join(published_table())


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mistake_is_found(run: Run, mutation: Mutation) -> None:
    check(run, mutation)


def where(mutation: Mutation) -> tuple[Layout, SmallModel, str, str]:
    return mutation.layout, mutation.small, mutation.dtype, mutation.name_of_pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", {where(mutation): mutation for mutation in MUTATIONS}.values(), ids=lambda mutation: mutation.name
)
def test_without_a_mistake_nothing_is_found(run: Run, mutation: Mutation) -> None:
    report = run(mutation, healthy=True)
    assert report.passed, describe(report)
