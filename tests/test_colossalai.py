"""A Booster with Cuboid's plugin trains what DeepSpeed trains, and what one process of plain transformers does."""

import pytest

from boosting import CLOSE, EXACT, assert_alike, one_process, settings, under_booster, under_deepspeed
from cuboid.verify import SmallModel, WorkerPool

pytest.importorskip("colossalai", reason="ColossalAI isn't installed: `make colossalai` does it, or tells why it can't")

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=2)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(4) as workers:
        yield workers


@pytest.mark.parametrize(
    ("mesh", "stages"), [("2x2x1", None), ("1x2x2", None), ("1x1x2", 2)], ids=["2x2x1", "1x2x2", "2 stages of 1x1x2"]
)
def test_five_steps_equal_those_of_deepspeed_and_of_one_process(pool, checkpoint, mesh, stages):
    import torch

    path, config = checkpoint(LLAMA), settings(mesh, stages)
    reference = pool_run(pool, 1, one_process, path, torch.float64, by_tokens=stages is not None)
    found = pool.run(4, under_booster, path, config)[0]
    assert_alike(found, reference, EXACT)
    # DeepSpeed refuses gradients in float64.
    found = pool.run(4, under_booster, path, config, torch.float32)[0]
    assert_alike(found, pool.run(4, under_deepspeed, path, config, torch.float32)[0], CLOSE)


def pool_run(pool, ranks, function, *args, **kwargs):
    import functools

    return pool.run(ranks, functools.partial(function, **kwargs), *args)[0]
