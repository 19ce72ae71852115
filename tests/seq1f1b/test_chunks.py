"""Several stages on each rank of a pipeline compute what one process computes, and what the plain schedules do."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

import cuboid
from conftest import TIMEOUT_S
from cuboid.verify import Architecture, PassReport, SmallModel, WorkerPool
from test_pipeline_parity import ALONE, Compare, compare, name_of
from test_split_backward import trained_gradients

SCHEDULES = ("seq1f1b-interleaved", "zero_bubble-interleaved", "zero_bubble-v")
LLAMA = SmallModel("llama", layers=4)
TIED = SmallModel("llama", layers=4, tied=True)


@pytest.fixture
def parity(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> Compare:
    """Verifies a small model on two ranks of two chunks and asserts that it passed."""

    def run(
        schedule: str, small: SmallModel = LLAMA, changes: dict[str, Any] | None = None, **options: Any
    ) -> PassReport:
        keys = {"stages": 2, "chunks": 2, "schedule": schedule, "stage_balance": "layers", **(changes or {})}
        return compare(pool, checkpoint, keys, small, **options)

    return run


# Whole pipelines beside one process


@pytest.mark.sample(3)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_gradients_norms_and_weights_are_those_of_one_process(
    parity: Compare, schedule: str, segments: int, micro_batches: int, tied: bool
) -> None:
    small = TIED if tied else LLAMA
    report = parity(schedule, small, {"segments": segments}, accumulate=micro_batches)
    assert report.tolerance == 1e-9
    names = {check.name for check in report.checks if check.kind == "activation"}
    assert {f"model.layers.{layer}" for layer in range(4)} <= names
    assert {check.kind for check in report.checks} == {"activation", "loss", "gradient", "norm", "weight"}
