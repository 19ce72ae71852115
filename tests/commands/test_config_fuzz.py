"""Random mistakes in configs: each is rejected by the same error on all ranks, which names the key, or trains."""

from collections.abc import Callable
from pathlib import Path

import pytest

import fuzzing
from cuboid.verify import SmallModel, WorkerPool

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)


def run(checkpoint: Callable[[SmallModel], str], folder: Path, ranks: int, count: int, seed: int):
    """Try cases on that many ranks and assert that those that don't train are rejected; returns how many train."""
    cases = list(fuzzing.cases(count, seed, ranks))
    sources = [fuzzing.source_of(case, folder) for case in cases]
    # DeepSpeed keeps its world size in module variables, so that a process can only be used for one.
    with WorkerPool(ranks) as pool:
        by_rank = pool.run(ranks, fuzzing.attempt_all, sources, checkpoint(SMALL), timeout_s=120 + 3 * count)
    wrong = [fault for case, *results in zip(cases, *by_rank, strict=True) if (fault := fuzzing.faults(case, results))]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    return sum(status == "trained" for status, _ in by_rank[0])


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "count"), [pytest.param(1, 40, marks=pytest.mark.slow), (2, 20)])
def test_a_sample_of_invalid_configs(checkpoint, tmp_path, ranks, count):
    run(checkpoint, tmp_path, ranks, count, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(1, 400), (2, 120)])
def test_many_invalid_configs(checkpoint, tmp_path, ranks, count):
    trained = run(checkpoint, tmp_path, ranks, count, seed=100 + ranks)
    # If none trained, one and the same error might have rejected all.
    assert trained > count // 20
