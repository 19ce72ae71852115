"""float16 under DeepSpeed's loss scaling: the scale and the losses are those of plain DeepSpeed with a process for each
replica, and an overflow on any rank is one on all of them.
"""

import functools
from itertools import pairwise
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.config.schema import require_config
from cuboid.optim.grad_buffer import gradient_of
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import cuboid_software, layout_of_config
from cuboid.verify import SmallModel, WorkerPool
from planning import LLAMA_8B, description_of
from training import _batches, _step, make_engine, ranks_of, settings, train

TIMEOUT_S = 90.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
#: The first steps overflow, and the scale grows after every two that don't.
DYNAMIC = {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
STEPS, AFTER = 8, 3
LAYOUTS = [("1x1x2", None, 1, 1), ("1x1x1", 2, 1, 1)]
MORE = [("1x2x1", None, 2, 2), ("2x1x1", None, 1, 1), ("1x1x2", 2, 1, 1), ("1x1x1", 2, 1, 2), ("1x2x2", None, 1, 1)]


def _on_any_cpu():
    """torch multiplies float16 on every CPU; DeepSpeed wants one that is fast at it."""
    return mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True)


def _after(engine, loss):
    return loss, float(engine.optimizer.loss_scale), engine.skipped_steps


def _steps(engine, count, skip=0):
    return [_after(engine, *train(engine, 1, skip=skip + step)) for step in range(count)]


def plain(path, fp16, replicas):
    """Loss, scale and skipped steps after each step of DeepSpeed without Cuboid."""
    config = settings(fp16=fp16, data=replicas)
    del config["tensor_parallel"]
    # A collective that would have to be compiled first.
    without_build = mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False)
    with _on_any_cpu(), without_build:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        batches = _batches(dist.get_rank(), replicas)
        return [_after(engine, _step(engine, batches, 2)) for _ in range(STEPS + AFTER)]


def split(path, config, root):
    """The same with Cuboid; the last steps are those of another engine, from a checkpoint."""
    with _on_any_cpu():
        engine = make_engine(path, config)
        steps = _steps(engine, STEPS)
        engine.save_checkpoint(root)
        fresh = make_engine(path, config)
        fresh.load_checkpoint(root)
        return [*steps, *_steps(fresh, AFTER, skip=STEPS)]


def overflow_on_one(path, config, rank):
    """Skipped steps, the scale's change, and which of two steps moved this rank's weights: the first has a gradient
    that isn't finite on one rank."""

    def weights():
        return [parameter.detach().clone() for parameter in engine.module.parameters()]

    def moved(step):
        before = weights()
        train(engine, 1, skip=step)
        return not all(map(torch.equal, before, weights()))

    with _on_any_cpu():
        engine = make_engine(path, config)
        train(engine, 1)
        scale = engine.optimizer.loss_scale
        factor = float("inf") if cuboid.mesh_of(engine).rank == rank else 1.0
        handle = next(engine.module.parameters()).register_hook(cuboid.local_hook(lambda gradient: gradient * factor))
        first = moved(1)
        handle.remove()
        return engine.skipped_steps, float(engine.optimizer.loss_scale / scale), first, moved(2)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """By the number of replicas: one that sees fewer rows has larger gradients, which overflow sooner."""

    @functools.cache
    def of(replicas):
        # Processes that have had no engine yet: DeepSpeed keeps the groups of the first one.
        with WorkerPool(replicas) as fresh:
            steps, *_ = fresh.run(replicas, plain, checkpoint(SMALL), DYNAMIC, replicas, timeout_s=TIMEOUT_S)
        scales = [scale for _, scale, _ in steps]
        assert 0 < steps[-1][2] < STEPS
        assert any(later > earlier for earlier, later in pairwise(scales))
        return steps

    return of


def check(pool, path, expected, root, mesh, stages, zero, data):
    config = settings(mesh, stages, zero=zero, data=data, fp16=DYNAMIC)
    for steps in pool.run(ranks_of(config, data), split, path, config, root, timeout_s=TIMEOUT_S):
        assert [rest for _, *rest in steps] == [rest for _, *rest in expected(data)]
        assert [loss for loss, *_ in steps] == pytest.approx([loss for loss, *_ in expected(data)], rel=2e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "stages", "zero", "data"), LAYOUTS)
def test_the_scale_takes_the_path_of_plain_deepspeed(pool, checkpoint, expected, tmp_path, mesh, stages, zero, data):
    check(pool, checkpoint(SMALL), expected, str(tmp_path), mesh, stages, zero, data)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stages", "zero", "data"), MORE)
def test_it_does_so_on_every_layout(pool, checkpoint, expected, tmp_path, mesh, stages, zero, data):
    check(pool, checkpoint(SMALL), expected, str(tmp_path), mesh, stages, zero, data)


@pytest.mark.parametrize(("mesh", "stages", "rank"), [("1x1x2", None, 1), ("1x1x1", 2, 0)])
def test_an_overflow_on_one_rank_is_one_on_all(pool, checkpoint, mesh, stages, rank):
    config = settings(mesh, stages, fp16={"initial_scale_power": 6, "hysteresis": 1}, learning_rate=1e-2)
    del config["scheduler"]
    for result in pool.run(2, overflow_on_one, checkpoint(SMALL), config, rank, timeout_s=TIMEOUT_S):
        assert result == (1, 0.5, False, True)


def gradients_held(path, config):
    """Bytes of each weight's gradient, with its sum, when all units of a step have run."""
    held = set()

    def look(_):
        for parameter in engine.module.parameters():
            sums = {id(x): x for x in (parameter.grad, gradient_of(parameter)) if x is not None}
            held.add(sum(x.element_size() for x in sums.values()))

    with _on_any_cpu():
        engine = make_engine(path, config)
        engine.pipeline.observe_outputs = look
        train(engine, 1)
    return held


#: Whether it is bf16, ``data_types.grad_accum_dtype``, and the bytes of a gradient.
SUMS = [(False, None, 2), (False, "float32", 4), (True, None, 4), (True, "bf16", 2)]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("bf16", "sums", "size"), SUMS)
def test_a_pipeline_holds_the_gradients_that_plans_count(pool, checkpoint, bf16, sums, size):
    config = settings(stages=2, **({"bf16": True} if bf16 else {"fp16": {}}))
    config |= {"data_types": {"grad_accum_dtype": sums}} if sums else {}
    assert pool.run(2, gradients_held, checkpoint(SMALL), config) == [{size}, {size}]
    planned = layout_of_config(*require_config(config), description_of(LLAMA_8B), Cluster.parse("2xH100"), 4096)
    assert cuboid_software(planned).gradient_bytes == size
