"""Several stages on each rank of a pipeline compute what one process computes, and what the plain schedules do."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "mesh", "small", "weight_gather"),
    [
        ("seq1f1b-interleaved", "1x1x2", LLAMA, "layer"),
        ("zero_bubble-v", "1x1x2", TIED, "layer"),
        ("zero_bubble-v", "2x1x1", LLAMA, "layer"),
        ("zero_bubble-interleaved", "1x1x2", SmallModel("gpt2", layers=4), "layer"),
        ("seq1f1b-interleaved", "2x1x1", TIED, "step"),
        ("zero_bubble-v", "2x2x1", SmallModel("qwen3", layers=5), "step"),
    ],
    ids=name_of,
)
def test_each_rank_may_be_a_mesh(
    parity: Compare, schedule: str, mesh: str, small: SmallModel, weight_gather: Literal["layer", "step"]
) -> None:
    parity(schedule, small, {"segments": 2}, mesh=mesh, weight_gather=weight_gather, accumulate=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [ALONE, "1x1x2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_with_zero_and_clipping(parity: Compare, schedule: str, zero: int, tied: bool, mesh: str) -> None:
    settings = {"zero_optimization": {"stage": zero}, "gradient_clipping": 0.25}
    report = parity(schedule, TIED if tied else LLAMA, mesh=mesh, name="engine", settings=settings, data_parallel=2)
    assert min(report.norms[0]) > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("schedule", ["seq1f1b-interleaved", "zero_bubble-v"])
def test_other_architectures(parity: Compare, schedule: str, architecture: Architecture) -> None:
    for tied in (True, False):
        parity(schedule, SmallModel(architecture, layers=6, tied=tied), checkpointing=tied, shard_in_memory=not tied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("seq1f1b-interleaved", {"stages": 3, "segments": 2, "stage_balance": [1, 2, 1, 1, 1, 1]}),
        ("zero_bubble-v", {"stages": 1, "chunks": 3}),
        ("zero_bubble-v", {"stages": 2, "chunks": 3, "memory_limit": 1}),
        ("zero_bubble-interleaved", {"stages": 2, "chunks": 3, "memory_limit": 1.5}),
        ("zero_bubble-v", {"stages": 3, "segments": 5, "stage_balance": "flops"}),
        ("zero_bubble-v", {"segments": "auto", "partition": "measured"}),
    ],
    ids=str,
)
def test_other_shapes(parity: Compare, schedule: str, changes: dict[str, Any]) -> None:
    small = SmallModel("qwen2", layers=6, tied=True)
    parity(schedule, small, changes, accumulate=3, steps=4, varying=True, data_parallel=2, sequence_length=29)


def test_activation_checkpointing(parity: Compare) -> None:
    parity("zero_bubble-v", SmallModel("mistral", layers=4, sliding_window=8), checkpointing=True)


# Beside the schedules of one stage a rank


def test_gradients_have_the_bits_of_whole_stages(pool: WorkerPool, checkpoint: Callable[[SmallModel], str]) -> None:
    path = checkpoint(LLAMA)

    def train(schedule: str, chunks: int, segments: int) -> tuple[float, dict[str, torch.Tensor]]:
        pipeline = {"engine": "seq1f1b", "stages": 2, "chunks": chunks, "segments": segments, "schedule": schedule}
        settings = {"train_micro_batch_size_per_gpu": 2, "pipeline": {**pipeline, "partition": "even"}}
        (loss, first), (same, second) = pool.run(2, trained_gradients, path, settings, timeout_s=TIMEOUT_S)
        assert loss == same
        assert not first.keys() & second.keys()
        return loss, {**first, **second}

    # A run of W as one product adds segments up in another order, so split backwards are compared with whole sequences.
    for segments, schedules in ((3, SCHEDULES[:1]), (1, SCHEDULES)):
        loss, expected = train("seq1f1b", 1, segments)
        for schedule in schedules:
            other, found = train(schedule, 2, segments)
            assert loss == other
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
