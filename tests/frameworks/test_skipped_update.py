"""A step that an engine is told to leave out changes no bit of weights and optimizer state, under each optimizer."""

from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from cuboid.verify import SmallModel
from training import make_engine, ranks_of, settings, train

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
SCALE = {"initial_scale_power": 4}
#: Mesh, stages, replicas, and options of the config.
CASES = [
    ("1x2x1", None, 1, {"zero": 2}),
    ("1x1x1", 2, 1, {"zero": 1, "bf16": True}),
    ("1x1x2", None, 1, {"zero": 0}),
    ("1x1x1", None, 2, {"zero": 1, "bf16": True}),
    ("1x1x1", None, 2, {"zero": 2}),
    ("1x2x1", None, 1, {"zero": 1, "fp16": SCALE}),
    ("1x1x1", 2, 1, {"zero": 0}),
    ("1x1x1", 2, 2, {"zero": 1}),
    ("1x1x2", None, 1, {"zero": 1, "offload": True}),
]


def config_of(mesh, stages, replicas, offload=False, **options):
    config = settings(mesh, stages, data=replicas, **options)
    # Another number of steps would be another learning rate.
    del config["scheduler"]
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return config


def bits(engine):
    """All weights, master weights and states of this rank."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [x.detach().clone() for x in [*engine.module.parameters(), *masters, *states]]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def leave_out(path, config):
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        engine = make_engine(path, config)
        train(engine, 1)
        parts = []
        engine.before_update = parts.extend  # None: no update
        before = bits(engine)
        (loss,) = train(engine, 1, skip=1)
        kept = same(bits(engine), before)
        engine.before_update = None
        losses = train(engine, 2, skip=2)
        other = make_engine(path, config)
        train(other, 1)
        expected = train(other, 2, skip=2)
        counts = (engine.global_steps, engine.skipped_steps, other.global_steps, other.skipped_steps)
        is_same = same(bits(engine), bits(other))
    return kept, losses == expected, is_same, counts, loss, [float(part) for part in parts]


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(("mesh", "stages", "replicas", "options"), CASES)
def test_a_step_that_is_left_out_changes_nothing(pool, checkpoint, mesh, stages, replicas, options):
    config = config_of(mesh, stages, replicas, **options)
    results = pool.run(ranks_of(config, replicas), leave_out, checkpoint(SMALL), config, timeout_s=120.0)
    for kept, continues, is_same, counts, _, _ in results:
        assert (kept, continues, is_same, counts) == (True, True, True, (4, 1, 3, 0))
    # The replicas' mean of the micro-batches' parts is the loss.
    told = [(loss, parts) for *_, loss, parts in results if parts]
    assert all(len(parts) == 2 for _, parts in told)
    assert len(told) == len(results) // (stages or 1)
    mean = sum(sum(parts) for _, parts in told) / len(told)
    assert mean == pytest.approx(told[0][0], rel=1e-2 if "fp16" in options else 1e-5)
