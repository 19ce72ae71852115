"""What DeepSpeed's optimizer step takes, as the planner's formulas say, and that it leaves float32 gradients alone."""

import gc
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.optim import piecewise_step
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import fullest
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import estimate
from cuboid.verify import WorkerPool
from live_bytes import LiveBytes
from planning import description_of

SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
#: The part of the parameters that the largest tensor has.
LARGEST = 512 * 256 / 2_000_640
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
#: As on CUDA, where torch takes this way by itself.
FOREACH = {"lr": 1e-3, "foreach": True}
FUSED = {"lr": 1e-3, "fused": True}
MODES = {
    "mesh": {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}}},
    "pipeline": {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}},
}


def take_steps(engine, mode):
    """Three of two micro-batches."""
    ids = torch.arange(16).view(1, 16)
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(3):
        if mode == "pipeline":
            engine.train_batch(iter([batch] * 2))
            continue
        for _ in range(2):
            engine.backward(engine(**batch).loss)
            engine.step()


def step_after_the_first(mode, params, zero=1, summed_in=None):
    """Peak bytes of an optimizer step for each parameter, and whether its gradients are all bfloat16 numbers."""
    import deepspeed

    config = {**CONFIG, **MODES[mode], "optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True}}}
    config["zero_optimization"] = {"stage": zero}
    if summed_in is not None:
        config["data_types"] = {"grad_accum_dtype": summed_in}
    with LiveBytes() as live, mock.patch.object(piecewise_step, "PIECE", 1 << 12):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **SIZES), dtype=torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        engine, *_ = deepspeed.initialize(model=cuboid.shard(model.train(), config), config=config)
        step, peaks = engine.optimizer.step, []

        def watched(*args, **kwargs):
            gradients = [x for group in getattr(engine.optimizer, "fp32_groups_gradients", []) for x in group]
            rounded = all(torch.equal(x.bfloat16().float(), x) for x in gradients)
            # What is garbage in cycles isn't the step's, and when it goes is chance.
            gc.collect()
            live.most = live.now
            result = step(*args, **kwargs)
            peaks.append((live.most / count, rounded))
            return result

        with mock.patch.object(engine.optimizer, "step", watched):
            take_steps(engine, mode)
    # The first one makes the states.
    return min(peaks[1:])


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("params", [FOREACH, FUSED], ids=["foreach", "fused"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_what_an_optimizer_step_takes(mode, replicas, params):
    with WorkerPool(replicas) as pool:
        took, rounded = pool.run(replicas, step_after_the_first, mode, params)[0]
    # docs/planner.md: weights and states, and gradients: on a mesh in 16 bits, of which a piece at a time is copied, in
    # a pipeline in float32. The norm of 16-bit gradients has one of them in float64.
    wanted = 2 + 14 / replicas + 8 * LARGEST if mode == "mesh" else 6 + 12 / replicas
    assert took == pytest.approx(wanted, rel=0.02)
    if mode == "pipeline":
        # Between replicas DeepSpeed sums in bfloat16, its default.
        assert rounded == (replicas > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "wanted"), [(2, 16 + 8 * LARGEST), (0, 20)])
def test_what_a_step_takes_by_the_stage_of_zero(zero, wanted):
    with WorkerPool(1) as pool:
        took, _ = pool.run(1, step_after_the_first, "mesh", FOREACH, zero)[0]
    assert took == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    # On a mesh, the gradient in 16 bits stays beside the sum.
    ("mode", "summed_in", "wanted"),
    [("pipeline", "bf16", 16 + 8 * LARGEST), ("mesh", "fp32", 20)],
)
def test_what_a_step_takes_by_the_type_that_gradients_are_summed_in(mode, summed_in, wanted):
    with WorkerPool(1) as pool:
        took, _ = pool.run(1, step_after_the_first, mode, FOREACH, 1, summed_in)[0]
    assert took == pytest.approx(wanted, rel=0.02)


def trained(mode, pieces, params):
    """Weights and the optimizer's state after three steps."""
    import deepspeed

    optimizer = {"type": "AdamW", "params": {**params, "weight_decay": 0.1, "torch_adam": True}}
    config = {**CONFIG, **MODES[mode], "gradient_clipping": 0.05, "optimizer": optimizer}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **SIZES), dtype=torch.bfloat16)
    sharded = cuboid.shard(model.train(), config)
    # In parts of tensors, and over their ends.
    with mock.patch.object(piecewise_step, "PIECE", pieces):
        engine, *_ = deepspeed.initialize(model=sharded, config=config)
        take_steps(engine, mode)
    norm = engine.get_global_grad_norm()
    state = [value for values in engine.optimizer.optimizer.state.values() for value in values.values()]
    return [*engine.module.parameters(), *state, torch.as_tensor(norm)]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mode", "params"),
    [
        ("mesh", FOREACH),
        ("pipeline", FOREACH),
        pytest.param("mesh", FUSED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_in_pieces_has_the_bits_of_a_whole_one(mode, params):
    runs = []
    for count in (1 << 30, 1 << 16):
        # DeepSpeed keeps the first engine's groups.
        with WorkerPool(1) as pool:
            runs += pool.run(1, trained, mode, count, params)
    expected, stepped = runs
    assert len(stepped) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(stepped, expected, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True, "maximize": True}], ids=str
)
def test_pieces_of_long_parameters(options):
    steps = []
    for count in (1 << 30, 1 << 6):
        torch.manual_seed(0)
        long, short, matrix = (torch.nn.Parameter(torch.randn(shape)) for shape in (300, 5, (3, 5)))
        groups = [{"params": [long, matrix]}, {"params": [short], "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **options)
        with mock.patch.object(piecewise_step, "PIECE", count):
            assert piecewise_step.PiecewiseStep.of(optimizer) is not None
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for _ in range(3):
                for parameter in (long, short, matrix):
                    parameter.grad = torch.randn(parameter.shape)
                optimizer.step()
                schedule.step()
        state = [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
        steps.append([long, short, matrix, *state])
    expected, stepped = steps
    assert len(stepped) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(stepped, expected, strict=True))


def test_a_rule_that_is_not_known_steps_whole():
    assert piecewise_step.PiecewiseStep.of(torch.optim.NAdam([torch.nn.Parameter(torch.zeros(3))])) is None
    assert piecewise_step.PiecewiseStep.of(None) is None


def test_the_formulas_of_the_planner_are_these():
    model = description_of(LlamaConfig(num_attention_heads=4, **{**SIZES, "num_hidden_layers": 64}))
    for replicas in (1, 2):
        for segments, wanted in ((1, 4 + 12 / replicas), (2, 6 + 12 / replicas)):
            layout = Layout(MeshShape(1, 1, 1), 1, 1, 1, replicas, segments=segments)
            memory = fullest(estimate(model, layout, Cluster.parse(f"{replicas}xH100"), 128).cost)
            states = memory.parameters + memory.gradients + memory.optimizer
            assert states / model.parameters == pytest.approx(wanted, rel=0.01)
