"""``"stage_balance": "schedule"``: stages that are chosen together with the order of their actions."""

import dataclasses
import logging
import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comparing import describe
from conftest import TIMEOUT_S
from cuboid import ConfigError
from cuboid.models.pipeline.stage_search import StageSearch
from cuboid.seq1f1b.schedule.choice import MemoryLimit, ModelPipeline, Request, compare_schedules
from cuboid.seq1f1b.schedule.partition import balance_by_flops, balance_halves, cut_sequence, segment_cost
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes
from cuboid.verify import Plan, SmallModel, verify

LAYER = LayerSizes.decoder(4096, 4096, 1024, 14336)
#: Llama 3 8B, whose layers can be cut between attention and MLP.
LAYER = dataclasses.replace(LAYER, second_weights=3 * 4096 * 14336, second_kept=LAYER.kept // 2)
LLAMA = ModelSizes((LAYER,) * 32, 4096 * 128256)


def search_of(
    sizes: ModelSizes, name: str, ranks: int, chunks: int = 1, *, length: int = 64, micro_batches: int = 1,
    segments: int = 4, limit: float | None = None, spreads_head: bool = False, **options: Any,
) -> StageSearch:  # fmt: skip
    lengths = cut_sequence(length, segments, cost=segment_cost(sizes))

    def costs(rank_of: tuple[int, ...], layers: tuple[float, ...]) -> Any:
        return ModelPipeline("auto", ranks, 1, layers, lengths, spreads_head=spreads_head).costs(sizes, rank_of)

    memory = None if limit is None else MemoryLimit(sequences=limit)
    request = Request(ranks, micro_batches, segments, pytest.fail, memory, chunks, spreads_head=spreads_head)
    return StageSearch(name, request, sizes, length, costs, **options)


def step_s(search: StageSearch, halves: bool) -> float:
    """The step's time with stages that are balanced by their cost."""
    has_head = not search.request.spreads_head

    def costs(rank_of: tuple[int, ...]) -> Any:
        if halves:
            return search.costs(rank_of, balance_halves(search.sizes, rank_of, search.length, has_head=has_head))
        return search.costs(rank_of, balance_by_flops(search.sizes, len(rank_of), search.length, has_head=has_head))

    request = dataclasses.replace(search.request, costs=costs)
    return compare_schedules(search.name, request).best.timeline.makespan_s


layers = st.builds(
    lambda weights, share, query, cuts: LayerSizes(
        weights, query, query, kept=weights, second_weights=weights * share // 4 if cuts else None, second_kept=weights
    ),
    st.integers(1, 20), st.integers(1, 3), st.integers(0, 2), st.booleans(),
)  # fmt: skip
names = st.sampled_from([
    ("seq1f1b", 1), ("zero_bubble", 1), ("auto", 1), ("auto", 2), ("zero_bubble-v", 2), ("seq1f1b-interleaved", 2),
    ("auto-interleaved", 2), ("gpipe", 1),
])  # fmt: skip


@pytest.mark.ci
@settings(max_examples=25)
@given(
    st.lists(layers, min_size=6, max_size=10), st.integers(0, 60), names, st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 4), st.sampled_from([None, 1.0, 2.0]), st.booleans(), st.sampled_from([1, 2000, 20000]),
)  # fmt: skip
def test_stages_are_valid_the_same_each_time_and_no_slower_than_those_balanced_by_cost(
    layers, head, schedule, ranks, micro_batches, segments, limit, spreads, actions
):
    (name, chunks), sizes = schedule, ModelSizes(tuple(layers), head)
    keys = {"micro_batches": micro_batches, "segments": segments, "limit": limit, "searched_actions": actions}
    search = search_of(sizes, name, ranks, chunks, spreads_head=spreads and name in ("zero_bubble", "auto"), **keys)
    try:
        before = min(step_s(search, halves=False), step_s(search, halves=True))
    except ConfigError:
        return  # A fixed schedule beyond the limit, with any stages of one rank.
    compared, chosen = search.compare()
    best = compared.best
    assert best.timeline.makespan_s <= before * (1 + 1e-9)
    assert search.compare()[1] == chosen
    for rank_of, counts in chosen.items():
        assert (len(counts), sum(counts)) == (len(rank_of), len(layers))
        assert min(counts) >= 1
        for stage, end in enumerate(list(accumulate(counts))[:-1]):
            if end != math.floor(end):
                assert sizes.layers[math.floor(end)].second_weights is not None
                assert rank_of[stage] != rank_of[stage + 1]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches", "head", "gain"),
    [
        ("zero_bubble", 4, 1, 1, "last", 1.03),
        pytest.param("zero_bubble", 8, 1, 1, "spread", 1.03, marks=pytest.mark.slow),
        pytest.param("auto", 4, 2, 1, "last", 1.03, marks=pytest.mark.slow),
        pytest.param("seq1f1b", 8, 1, 2, "last", 1.02, marks=pytest.mark.slow),
    ],
)
def test_few_micro_batches_of_llama_take_less_time(name, ranks, chunks, micro_batches, head, gain):
    keys = {"length": 32768, "segments": 8, "micro_batches": micro_batches, "spreads_head": head == "spread"}
    search = search_of(LLAMA, name, ranks, chunks, **keys)
    assert step_s(search, halves=False) > gain * search.compare()[0].best.timeline.makespan_s


def test_many_micro_batches_are_balanced_by_cost():
    """Only the first are simulated; each further one takes the busiest rank's time."""
    search = search_of(ModelSizes(LLAMA.layers, 0), "seq1f1b", 4, length=32768, segments=2, micro_batches=64)
    assert search.compare()[1] == {(0, 1, 2, 3): (8, 8, 8, 8)}


def test_parity_with_the_stages_that_were_found(pool, checkpoint, caplog):
    """On two ranks whose layers were chosen for one micro-batch; ``verify`` chooses them as training does."""
    plan = Plan(checkpoint(SmallModel("llama", layers=5)), batch=2)
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 3, "schedule": "zero_bubble", "stage_balance": "schedule"}
    config = {"pipeline": pipeline, "sequence_length": 32}
    with caplog.at_level(logging.WARNING):
        report = verify(plan, config, passes=("core",), pool=pool, timeout_s=TIMEOUT_S).passes[0]
    assert report.passed, describe(report)
    assert report.tolerance == 1e-9
    assert '"stage_balance": "schedule" is [' in caplog.text
