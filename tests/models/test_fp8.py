"""Linear layers in fp8: products beside an emulation of the recipe, in models, stages and graphs, and refusals."""

import copy
import functools
from collections import Counter
from contextlib import nullcontext
from types import MappingProxyType
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch.aot_autograd import make_boxed_func
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
)

import cuboid
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.sharded import fp8 as fp8_models
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.planner.comm_formula import layer_bytes, recomputed_bytes, stage_layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from cuboid.seq1f1b.schedule.choice import CHUNKED, NAMES
from cuboid.tensor3d.compiled import layers as compiled_layers
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.layers.fused_projections import FusedProjections
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.sharding.sharding_spec import put_shard, take_shard
from cuboid.verify import Plan, verify
from fp8_emulation import FP8, EmulatedLinear, Emulation, counted_products, distance

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LAYERS, ROWS, LENGTH = 2, 2, 32
#: Products in fp8 of a layer's forward: q, k, v and o, gate, up and down.
PRODUCTS = 7
NOTHING = MappingProxyType({})


# --- products ------------------------------------------------------------------------------------------------------


def test_scales_are_powers_of_two_that_let_the_largest_element_fit():
    largest = torch.tensor([448.0, 448.0 * 1.001, 447.9, 1.75, 1.76, 3.5, 2.0**-100, 3e38, 0.0])
    x = torch.stack([largest, -largest / 2, largest / 448], 1)
    q, scales = rowwise.quantize(x)
    assert q.dtype == torch.float8_e4m3fn
    assert scales[:6, 0].tolist() == [1.0, 2.0, 1.0, 2.0**-8, 2.0**-7, 2.0**-7]
    mantissas, _ = torch.frexp(scales)
    assert torch.equal(mantissas, torch.full_like(scales, 0.5))
    back = q.float() * scales
    torch.testing.assert_close(back, x, rtol=2.0**-4, atol=0)
    assert q.float().abs().max() <= 448


def test_what_is_not_finite_stays_undefined():
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    y = rowwise.multiply(x, torch.ones(16, 16, dtype=torch.bfloat16))
    assert y.isfinite().all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("in_first", [False, True])
def test_products_are_those_of_the_emulation(in_first):
    torch.manual_seed(0)
    x = (torch.randn(3, 24, 96) * torch.logspace(-2, 2, 24)[:, None]).bfloat16().requires_grad_()
    stored = torch.randn(*((96, 160) if in_first else (160, 96))).bfloat16().requires_grad_()
    bias, dy = torch.randn(160).bfloat16().requires_grad_(), torch.randn(3, 24, 160).bfloat16()
    weight = stored.T if in_first else stored
    results = []
    for product in (rowwise.linear, lambda x, weight, bias: Emulation.apply(x, weight) + bias):
        y = product(x, weight, bias)
        results.append((y, *torch.autograd.grad(y, (x, stored, bias), dy)))
    for actual, expected in zip(*results, strict=True):
        # Sums in another order may be rounded to bf16 otherwise.
        torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=2e-2)
        assert distance([actual], [expected]) < 1e-3


def test_other_dtypes_are_refused():
    x = torch.ones(16, 16)
    with pytest.raises(UnsupportedModelError, match=r"has torch\.bfloat16 and is given torch\.float32"):
        rowwise.linear(x, x.bfloat16())
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel\.fp8 is for weights and activations in bfloat16"):
        rowwise.linear(x.half(), x.half())


# --- models --------------------------------------------------------------------------------------------------------


def plain_model(dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).train()


def config_of(pipeline=None, mode="none", fp8=FP8, **section):
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}, "fp8": fp8, **section}}
    if pipeline is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": 1, "certification": "verified", **pipeline}
    return {**config, "activation_checkpointing": {"mode": mode}}


def micro_batch(shift=0):
    ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 + shift) % 89
    return {"input_ids": ids, "labels": ids}


def loss_and_gradients(model, pipeline):
    """Of two steps' second one."""
    for _ in range(2):
        model.zero_grad()
        if pipeline is None:
            loss = model(**micro_batch(), use_cache=False).loss
            loss.backward()
        else:
            loss = pipeline.train(iter([micro_batch(), micro_batch(3)]), 2)
    return loss.detach(), cuboid.full_gradients(model)


def train(pipeline=None, mode="none", fp8=FP8, emulated=False, **section):
    """The loss, the gradients and the shapes of products in fp8 of a model or this rank's stage."""
    model = cuboid.shard(plain_model(), config_of(pipeline, mode, fp8, **section)).train()
    runs = None if pipeline is None else cuboid.Pipeline(model)
    with counted_products(emulated) as shapes:
        return (*loss_and_gradients(model, runs), shapes)


@functools.cache
def plain_gradients(emulated, rows):
    """Of plain transformers, whose linear layers in layers are perhaps replaced by the emulation."""
    model = plain_model()
    for module in model.model.layers.modules():
        if emulated and type(module) is nn.Linear:
            module.__class__ = EmulatedLinear
    batches = [micro_batch(), micro_batch(3)][:rows]
    items = sum(batch["labels"][:, 1:].numel() for batch in batches)
    loss = sum(model(**batch, use_cache=False, num_items_in_batch=items).loss for batch in batches)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_emulated(loss, gradients, rows):
    expected_loss, expected = plain_gradients(True, rows)
    _, wide = plain_gradients(False, rows)
    assert gradients.keys() == expected.keys()
    torch.testing.assert_close(loss.float(), expected_loss.float(), rtol=1e-3, atol=0)
    # Norms and sums are rounded to bf16 otherwise than in plain transformers, after which elements next to the middle
    # between two numbers of fp8 are rounded to the other one.
    noise = distance(wide.values(), expected.values())
    assert distance([gradients[name] for name in expected], expected.values()) < 0.7 * noise


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("pipeline", [None, {"segments": 1}, {"segments": 4}], ids=["mesh", "stage", "segments"])
def test_a_model_trains_as_with_the_emulation(pipeline):
    rows = 1 if pipeline is None else 2
    loss, gradients, shapes = train(pipeline)
    emulated_loss, emulated, _ = train(pipeline, emulated=True)
    torch.testing.assert_close(loss, emulated_loss, rtol=1e-4, atol=0)
    assert distance(gradients.values(), emulated.values()) < 2e-2
    assert_as_emulated(loss, gradients, rows)
    # Each of the layers' linear layers, once in forward and once in backward, and nothing else.
    units = 1 if pipeline is None else 2 * pipeline["segments"]
    assert len(shapes) == 2 * units * LAYERS * 2 * PRODUCTS
    assert {*shapes} == {(64, 64), (64, 128), (128, 64)}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mode", ["layers", "attention"])
@pytest.mark.parametrize("pipeline", [None, {"segments": 4}], ids=["mesh", "segments"])
def test_checkpointing_computes_the_same_bits(pipeline, mode):
    loss, gradients, _ = train(pipeline)
    again, recomputed, _ = train(pipeline, mode)
    assert torch.equal(loss, again)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())


def test_split_backwards_keep_weight_gradients_in_bf16():
    loss, gradients, shapes = train({"segments": 4})
    again, split, split_shapes = train({"segments": 4, "schedule": "zero_bubble"})
    assert torch.equal(loss, again)
    assert sorted(split_shapes) == sorted(shapes)
    # Several segments' gradients are one product, whose sum is rounded once.
    assert distance([split[name] for name in gradients], gradients.values()) < 5e-3


def train_on_mesh(mesh, emulated, **changes):
    """The loss, the whole gradients and the shapes of products in fp8 of one step on ranks that are threads."""
    plain, settings = plain_model(**changes), CuboidConfig.model_validate(config_of()).tensor_parallel
    plan = make_parallel_plan(plain, MeshShape.parse(mesh), MeshVerdict())
    ranks = ThreadRanks(plan.mesh)
    models = [
        shard_modules(copy.deepcopy(plain), plan, own_mesh, settings, functools.partial(take_shard, mesh=own_mesh))
        for own_mesh in ranks.meshes
    ]

    def step(own_mesh):
        loss = models[own_mesh.rank](**micro_batch(), use_cache=False).loss
        loss.backward()
        return loss.detach()

    with counted_products(emulated) as shapes:
        losses = ranks.run(step)
    gradients = {}
    for own_mesh, model in zip(ranks.meshes, models, strict=True):
        for name, parameter in model.named_parameters():
            full = gradients.setdefault(name, parameter.new_zeros(plan.by_parameter[name].shape))
            put_shard(full, parameter.grad, plan.by_parameter[name], own_mesh.shape, own_mesh.coordinate)
    return losses[0], gradients, shapes


ONE_HEAD = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("mesh", "changes", "products"),
    [
        ("2x1x1", {}, 2 * PRODUCTS),
        # Rows of the batch aren't contiguous in what is reduced over the sequence: a product for each of two rows and
        # two ranks, of o and down in forward, and of the five others in backward.
        ("1x2x1", {}, 5 + 2 * 4 + 5 * 4 + 2),
        # Two target ranks of q, k, v, gate and up; two pieces of the inputs of o and down.
        ("1x1x2", {}, 2 * 2 * PRODUCTS),
        ("2x2x2", {}, 2 * 2 * PRODUCTS),
        # All ranks get the sums of the only key and value head.
        ("1x1x2", ONE_HEAD, 2 * 2 * PRODUCTS - 4),
        # Key and value have too few rows, and stay in bf16 beside the query.
        ("1x1x2", {"num_key_value_heads": 1}, 2 * 2 * (PRODUCTS - 2)),
    ],
    ids=str,
)
def test_a_mesh_trains_as_with_the_emulation(mesh, changes, products):
    loss, gradients, shapes = train_on_mesh(mesh, False, **changes)
    emulated_loss, emulated, _ = train_on_mesh(mesh, True, **changes)
    torch.testing.assert_close(loss, emulated_loss, rtol=1e-4, atol=0)
    assert distance(gradients.values(), emulated.values()) < 2e-2
    assert len(shapes) == MeshShape.parse(mesh).size * LAYERS * products
    if not changes:
        assert_as_emulated(loss, gradients, 1)


# --- what is sent ---------------------------------------------------------------------------------------------------


def gathers_as_they_are(model):
    """Let a model's products in fp8 gather everything in bf16, and round it then."""
    for module in model.modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, FusedProjections)]
        if isinstance(module, ShardedLinear):
            module.sharded_params["weight"].fp8 = None
            hooks.append(module)
        for hook in hooks:
            hook._linear_op.gathers_fp8 = hook._linear_op.is_fp8 = False


def sent_on_mesh(mesh, *, rounded_first=True, fp8=FP8, frozen=(), checkpointing=False, rows=6, steps=1, **changes):
    """Losses, the whole gradients, and the bytes that the first rank sent, of steps on ranks that are threads."""
    weight_gather = changes.pop("weight_gather", "layer")
    plain, config = plain_model(**changes), config_of(fp8=fp8, weight_gather=weight_gather)
    settings = CuboidConfig.model_validate(config).tensor_parallel
    plan = make_parallel_plan(plain, MeshShape.parse(mesh), MeshVerdict())
    ranks = ThreadRanks(plan.mesh)
    models = [
        shard_modules(copy.deepcopy(plain), plan, own_mesh, settings, functools.partial(take_shard, mesh=own_mesh))
        for own_mesh in ranks.meshes
    ]
    for model in models:
        if not rounded_first:
            gathers_as_they_are(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    ids = (torch.arange(rows * LENGTH).view(rows, LENGTH) * 7) % 89

    def step(own_mesh):
        losses = []
        for _ in range(steps):
            loss = models[own_mesh.rank](input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        return losses

    losses = ranks.run(step)[0]
    gradients = {}
    for own_mesh, model in zip(ranks.meshes, models, strict=True):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                full = gradients.setdefault(name, parameter.new_zeros(plan.by_parameter[name].shape))
                put_shard(full, parameter.grad, plan.by_parameter[name], own_mesh.shape, own_mesh.coordinate)
    return losses, gradients, ranks.meshes[0].comm_counter.snapshot()


#: Three shards of a block of 64 rows are padded, and cut pieces of its rows.
EIGHT_MESHES = ("2x1x1", "1x2x1", "1x1x2", "3x1x2", "1x2x2", "2x2x1", "2x2x2", "3x2x1")
FEW_HEADS = {"num_key_value_heads": 2}


@pytest.mark.sample(1, ci=4)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        *((mesh, {}) for mesh in EIGHT_MESHES),
        *(
            (mesh, options)
            for mesh in ("2x1x1", "1x2x2", "2x2x2")
            for options in (
                {"checkpointing": True},
                {"weight_gather": "step"},
                {"frozen": ("proj",)},
                # Keys and values in bf16 beside the query.
                {"fp8": {**FP8, "min_dimension": 32}, **FEW_HEADS, "checkpointing": True},
                {"num_key_value_heads": 1, "steps": 2},
            )
        ),
    ],
    ids=str,
)
def test_what_is_rounded_before_it_is_sent_has_the_bits_of_what_is_rounded_after(mesh, options):
    losses, gradients, sent = sent_on_mesh(mesh, **options)
    others, expected, sent_wide = sent_on_mesh(mesh, rounded_first=False, **options)
    assert all(map(torch.equal, losses, others))
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    assert sum(sent.values()) < sum(sent_wide.values()) or options.get("weight_gather") == "step"


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", [mesh for mesh in EIGHT_MESHES if "3" not in mesh])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_gather": "step"},
        {"checkpointing": True},
        {"checkpointing": True, "weight_gather": "step"},
        FEW_HEADS,
        # Fewer heads than ranks of `sequence` and `hidden`.
        {"num_key_value_heads": 1},
    ],
    ids=str,
)
def test_counted_bytes_are_the_formula(mesh, options):
    counts = [sent_on_mesh(mesh, num_hidden_layers=layers, **options)[2] for layers in (2, 3)]
    shape, model = MeshShape.parse(mesh), plain_model(**{k: v for k, v in options.items() if k in FEW_HEADS})
    sizes, options_of_formula = block_sizes(describe_modules(model), shape), {"fp8_min_dimension": 16}
    weight_gather = options.get("weight_gather", "layer")
    expected = layer_bytes(sizes, shape, 6, LENGTH, weight_gather=weight_gather, **options_of_formula)
    if options.get("checkpointing"):
        again = recomputed_bytes(sizes, shape, 6, LENGTH, weight_gather=weight_gather, **options_of_formula)
        expected = Counter(expected) + Counter(again)
    counted = {axes: counts[1][axes] - counts[0].get(axes, 0) for axes in counts[1]}
    assert {axes: n for axes, n in counted.items() if n} == {
        axes: pytest.approx(n, abs=40) for axes, n in expected.items() if n
    }


def train_stage(axes):
    """The losses, gradients and bytes that split backwards of two segments send, of what is rounded first and last."""
    runs = []
    for rounded_first in (True, False):
        mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
        config = config_of({"segments": 2, "partition": "even", "schedule": "zero_bubble"}, mesh=mesh)
        model = cuboid.shard(plain_model(), config).train()
        if not rounded_first:
            gathers_as_they_are(model)
        loss = cuboid.Pipeline(model).train(iter([micro_batch()]), 1)
        runs.append((loss, cuboid.full_gradients(model), cuboid.mesh_of(model).comm_counter.snapshot()))
    return runs


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(1, 1, 2), (1, 2, 1), (2, 1, 1)], ids=str)
def test_split_backwards_gather_gradients_in_fp8_for_the_inputs_gradients(pool, axes):
    shape = MeshShape(*axes)
    sizes = block_sizes(describe_modules(plain_model()), shape)
    by_formula = [
        stage_layer_bytes(sizes, shape, ROWS, [LENGTH // 2] * 2, splits=True, fp8_min_dimension=least)
        for least in (16, None)
    ]
    for (loss, gradients, sent), (other_loss, expected, sent_wide) in pool.run(2, train_stage, axes):
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
        for axis in sent:
            spared = LAYERS * (by_formula[1].get(axis, 0) - by_formula[0].get(axis, 0))
            assert sent_wide[axis] - sent[axis] == pytest.approx(spared, abs=40)


def test_mesh_blocks_that_are_too_small_are_refused():
    model, config = plain_model(), CuboidConfig.model_validate(config_of(fp8={**FP8, "min_dimension": 128}))
    plan = make_parallel_plan(model, MeshShape(1, 2, 1))
    with pytest.raises(UnsupportedModelError, match="no rank's block of a linear layer's weight has at least 128 rows"):
        fp8_models.check_fp8(model, type(model), config, plan)


def train_stages(schedule):
    loss, gradients, shapes = train({"stages": 2, "segments": 4, "schedule": schedule})
    return loss, gradients, len(shapes)


@pytest.mark.parametrize("schedule", ["seq1f1b", "zero_bubble"])
def test_two_stages_of_four_segments(pool, schedule):
    loss, gradients, count = pool.run(2, train_stages, schedule)[0]
    assert count == 2 * 2 * 4 * (LAYERS // 2) * 2 * PRODUCTS
    assert_as_emulated(loss, gradients, 2)


def train_stages_of_meshes(mesh, schedule):
    section = {"mesh": dict(zip(("batch", "sequence", "hidden"), mesh, strict=True))}
    loss, gradients, shapes = train({"stages": 2, "segments": 2, "schedule": schedule}, **section)
    return loss, gradients, len(shapes)


@pytest.mark.ci
@pytest.mark.parametrize(("mesh", "schedule"), [((1, 2, 1), "seq1f1b"), ((1, 1, 2), "zero_bubble")], ids=str)
def test_stages_that_are_meshes(pool, mesh, schedule):
    loss, gradients, count = pool.run(4, train_stages_of_meshes, mesh, schedule)[0]
    assert count > 0
    assert_as_emulated(loss, gradients, 2)


def test_small_blocks_and_those_that_kernels_do_not_take_stay_in_bf16():
    # Key and value have 32 outputs.
    fp8 = {**FP8, "min_dimension": 64}
    with mock.patch.dict(SIZES, num_key_value_heads=2):
        for pipeline in (None, {"segments": 1}):
            _, _, shapes = train(pipeline, fp8=fp8)
            assert len(shapes) % (2 * (PRODUCTS - 2)) == 0
            assert {*shapes} == {(64, 64), (64, 128), (128, 64)}
    with mock.patch.dict(SIZES, intermediate_size=120):
        _, _, shapes = train()
        assert {*shapes} == {(64, 64)}


def test_conv1d_of_gpt2():
    results = []
    for pipeline in (None, {"segments": 2}, {"segments": 2, "schedule": "zero_bubble"}):
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
        options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        plain = AutoModelForCausalLM.from_config(GPT2Config(**sizes, **options), dtype=torch.float32).bfloat16().train()
        model = cuboid.shard(plain, config_of(pipeline)).train()
        runs = None if pipeline is None else cuboid.Pipeline(model)
        with counted_products(False) as shapes:
            batches = [micro_batch()]
            loss = runs.train(iter(batches), 1) if runs else model(**batches[0], use_cache=False).loss
            if runs is None:
                loss.backward()
        assert len(shapes) == 2 * 4 * 2 * (1 if pipeline is None else 2)
        results.append((loss.detach(), cuboid.full_gradients(model)))
    (loss, gradients), *others = results
    for other_loss, other_gradients in others:
        torch.testing.assert_close(other_loss.float(), loss.float(), rtol=1e-3, atol=0)
        assert distance([other_gradients[name] for name in gradients], gradients.values()) < 0.1


@pytest.mark.parametrize("pipeline", [None, {"segments": 2}], ids=["mesh", "segments"])
def test_adapters_around_layers_in_fp8(pipeline):
    results = []
    for fp8 in (FP8, None):
        model = cuboid.shard(plain_model(), config_of(pipeline, fp8=fp8)).train()
        torch.manual_seed(1)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        with counted_products(False) as shapes:
            if pipeline is None:
                peft(**micro_batch(), use_cache=False).loss.backward()
            else:
                cuboid.Pipeline(peft).train(iter([micro_batch()]), 1)
        units = 1 if pipeline is None else 2
        # The first layer's input needs no gradient, but that of its q has an adapter, beside k and v.
        assert len(shapes) in range(units * 20, units * 29) if fp8 else not shapes
        results.append([p.grad for p in peft.parameters() if p.requires_grad])
    assert len(results[0]) == LAYERS * 2 * 2
    assert 1e-3 < distance(*results) < 0.2


# --- compiled layers -----------------------------------------------------------------------------------------------


def fp8_in(nodes):
    return [node for node in nodes if getattr(node.meta.get("val"), "dtype", None) == torch.float8_e4m3fn]


EVEN = {"segments": 4, "partition": "even"}
ZERO_BUBBLE = {**EVEN, "schedule": "zero_bubble"}


@pytest.mark.ci
@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(None, id="mesh"),
        # The split backward's forwards are those of segments.
        pytest.param(EVEN, id="segments", marks=pytest.mark.slow),
        pytest.param(ZERO_BUBBLE, id="split backward"),
    ],
)
def test_a_compiled_layer_is_one_graph_with_its_products_in_fp8(pipeline):
    graphs = []

    def compile_graph(graph, _, **__):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with mock.patch.object(compiled_layers, "compile_graph", compile_graph):
        model = cuboid.shard(plain_model(), config_of(pipeline, compile=True)).train()
        runs = None if pipeline is None else cuboid.Pipeline(model)
        loss, gradients = loss_and_gradients(model, runs)
    assert (model.cuboid.state.compiled.graphs, model.cuboid.state.compiled.reason) == (1, None)
    assert_as_emulated(loss, gradients, 1 if pipeline is None else 2)
    forward, backward = graphs
    for graph, products, inputs in ((forward, PRODUCTS, 4), (backward, PRODUCTS, PRODUCTS)):
        names = [node.target for node in graph.nodes]
        assert names.count(torch.ops.aten._scaled_mm.default) == products
        # q, k and v share their rounded input, and so do gate and up.
        casts = [node for node in fp8_in(graph.nodes) if node.target is torch.ops.prims.convert_element_type.default]
        assert len(casts) == inputs + PRODUCTS
        # Nothing in fp8 is kept for backward, which rounds weights anew.
        output = next(node for node in graph.nodes if node.op == "output")
        assert fp8_in(output.all_input_nodes) == []


def train_compiled_mesh(axes, pipeline):
    """The loss, the gradients, graphs, their products, and what is saved in fp8 or larger than the rank's part."""
    torch._dynamo.reset()
    graphs = []

    def compile_graph(graph, _, **__):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    with mock.patch.object(compiled_layers, "compile_graph", compile_graph):
        model = cuboid.shard(plain_model(), config_of(pipeline, mesh=mesh, compile=True)).train()
        loss, gradients = loss_and_gradients(model, None if pipeline is None else cuboid.Pipeline(model))
    assert model.cuboid.state.compiled.reason is None
    products = [sum(node.target == torch.ops.aten._scaled_mm.default for node in graph.nodes) for graph in graphs]
    output = next(node for node in graphs[0].nodes if node.op == "output")
    return loss, gradients, products, len(fp8_in(output.all_input_nodes))


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(
    ("axes", "pipeline"),
    [((1, 2, 1), None), ((2, 1, 1), None), ((1, 2, 1), ZERO_BUBBLE), ((2, 1, 1), ZERO_BUBBLE)],
    ids=str,
)
def test_a_compiled_layer_of_a_mesh_has_its_products_in_fp8(pool, axes, pipeline):
    ranks = pool.run(2, train_compiled_mesh, axes, pipeline)
    for _, _, products, saved in ranks:
        assert (products, saved) == ([PRODUCTS, PRODUCTS], 0)
    # Whole gradients are put together on the first rank.
    loss, gradients, _, _ = ranks[0]
    assert_as_emulated(loss, gradients, 1 if pipeline is None else 2)


AXES = ("batch", "sequence", "hidden")
SPLIT = {"segments": 2, "partition": "even", "schedule": "zero_bubble"}
V_SCHEDULE = {**SPLIT, "schedule": "zero_bubble-v", "stages": 2, "chunks": 2}


def train_uncompiled_and_compiled(axes, pipeline, mode, sections, compiler, steps):
    """Of both: the loss, gradients, and bytes sent in the last pair of steps; graphs after each pair, and breaks."""
    runs = []
    uncompiled = mock.patch.object(
        compiled_layers, "compile_graph", lambda graph, _, **__: make_boxed_func(graph.forward)
    )
    for compiles in (False, True):
        torch._dynamo.reset()
        dynamo_counters.clear()
        options, after_step = dict(sections), []
        config = config_of(
            pipeline, mode, mesh=dict(zip(AXES, axes, strict=True)), compile=compiles, fp8=options.pop("fp8", FP8),
            weight_gather=options.pop("weight_gather", "layer"),
        )  # fmt: skip
        model = cuboid.shard(plain_model(**options), config).train()
        pipelined = None if pipeline is None else cuboid.Pipeline(model)
        sent = cuboid.mesh_of(model).comm_counter
        with uncompiled if compiler == PARTITION_ONLY else nullcontext():
            for _ in range(steps):
                sent.reset()
                loss, gradients = loss_and_gradients(model, pipelined)
                if compiles:
                    assert model.cuboid.state.compiled.reason is None
                    after_step.append(model.cuboid.state.compiled.graphs)
        breaks = sum(dynamo_counters["graph_break"].values())
        runs.append((loss, gradients, sent.snapshot(), after_step, breaks))
    return runs


def sent_by_graphs(sent, axes, mode, weight_gather="layer"):
    """What compiled layers send in two steps without a pipeline, by what uncompiled ones do."""
    if mode == "none":
        return sent
    shape = MeshShape(*axes)
    options = {"weight_gather": weight_gather, "fp8_min_dimension": 16}
    sizes = block_sizes(describe_modules(plain_model()), shape)
    graphs, layers = (
        Counter(recomputed_bytes(sizes, shape, ROWS, LENGTH, compiled=compiled, **options))
        for compiled in (True, False)
    )
    return {axis: count + 2 * LAYERS * (graphs[axis] - layers[axis]) for axis, count in sent.items()}


#: As Inductor, with its partition into forward and backward, but what is in them runs uncompiled.
PARTITION_ONLY = "partition only"


# The first and the last one: of the three axes, the test above has the other.
@pytest.mark.sample(0, ci=2)
@pytest.mark.parametrize(
    ("axes", "pipeline", "mode", "sections"),
    [
        ((1, 1, 2), None, "none", {}),
        ((1, 2, 1), SPLIT, "none", {}),
        ((1, 1, 2), SPLIT, "none", {**FEW_HEADS, "fp8": {**FP8, "min_dimension": 32}}),
        ((2, 1, 1), SPLIT, "none", {}),
        ((1, 2, 1), None, "none", {}),
        ((1, 2, 1), None, "none", {"num_key_value_heads": 1}),
        ((2, 1, 1), None, "none", {}),
        ((1, 1, 2), SPLIT, "none", {}),
        ((1, 1, 2), None, "layers", {}),
        ((1, 2, 1), None, "layers", {}),
        ((2, 1, 1), None, "layers", {}),
        ((1, 1, 2), None, "none", {"num_key_value_heads": 1}),
        ((2, 1, 1), {"segments": 2, "partition": "even"}, "none", {}),
        ((2, 1, 1), None, "none", {"weight_gather": "step"}),
        ((2, 1, 1), None, "layers", {"weight_gather": "step"}),
        ((2, 1, 1), None, "none", {**FEW_HEADS, "fp8": {**FP8, "min_dimension": 64}}),
        ((1, 2, 1), V_SCHEDULE, "none", {"num_hidden_layers": 4}),
        ((2, 1, 1), V_SCHEDULE, "none", {"num_hidden_layers": 4, "fp8": None}),
        ((2, 1, 1), V_SCHEDULE, "none", {"num_hidden_layers": 4}),
    ],
    ids=str,
)
def test_compiled_layers_send_in_fp8_what_uncompiled_ones_do(pool, axes, pipeline, mode, sections):
    size = MeshShape(*axes).size * (pipeline or {}).get("stages", 1)
    ranks = pool.run(size, train_uncompiled_and_compiled, axes, pipeline, mode, sections, PARTITION_ONLY, 1)
    for (loss, _, sent, _, _), (other_loss, _, other_sent, graphs, _) in ranks:
        assert sum(sent.values()) > 0
        assert other_sent == sent_by_graphs(sent, axes, mode, sections.get("weight_gather", "layer"))
        assert graphs == [1]
        assert torch.equal(loss, other_loss)
    (_, gradients, *_), (_, compiled, *_) = ranks[0]
    # dx of projections that share an input are added up in another order.
    assert distance([compiled[name] for name in gradients], gradients.values()) < 2e-2


def options_of(schedule):
    """The pipeline's section of two stages, or of two on each of two ranks."""
    chunks = 2 if schedule in CHUNKED else 1
    segments = 1 if schedule in ("gpipe", "1f1b") else 2
    return {"segments": segments, "partition": "even", "schedule": schedule, "stages": 2, "chunks": chunks}


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [FP8, None], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("schedule", "axes", "compiler"),
    [
        *((schedule, (1, 1, 1), PARTITION_ONLY) for schedule in NAMES),
        ("zero_bubble-v", (1, 1, 1), "inductor"),
        ("zero_bubble-v", (1, 2, 1), "inductor"),
        ("seq1f1b-interleaved", (2, 1, 1), "inductor"),
    ],
    ids=str,
)
def test_every_schedule_runs_compiled_layers_as_uncompiled_ones(pool, schedule, axes, compiler, fp8):
    pipeline, sections = options_of(schedule), {"num_hidden_layers": 4, "fp8": fp8}
    size, steps = MeshShape(*axes).size * 2, 1 if compiler == PARTITION_ONLY else 3
    ranks = pool.run(
        size, train_uncompiled_and_compiled, axes, pipeline, "none", sections, compiler, steps, timeout_s=900
    )
    for (loss, _, _, _, _), (other_loss, _, _, graphs, breaks) in ranks:
        assert (graphs, breaks) == ([1] * steps, 0)
        torch.testing.assert_close(other_loss, loss, rtol=1e-3, atol=0)
    (_, gradients, *_), (_, compiled, *_) = ranks[0]
    assert gradients.keys() == compiled.keys()
    assert distance([compiled[name] for name in gradients], gradients.values()) < (2e-2 if fp8 is None else 4e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "pipeline", "mode"),
    [
        ((1, 2, 1), None, "none"),
        ((1, 1, 2), None, "none"),
        ((2, 1, 1), None, "none"),
        ((2, 1, 1), None, "layers"),
        ((2, 1, 1), SPLIT, "none"),
        ((1, 2, 1), SPLIT, "none"),
        ((1, 1, 2), SPLIT, "none"),
        ((2, 2, 2), None, "none"),
        ((2, 2, 2), SPLIT, "none"),
    ],
    ids=str,
)
def test_inductor_sends_in_fp8_and_computes_what_uncompiled_layers_do(pool, axes, pipeline, mode):
    size = MeshShape(*axes).size
    ranks = pool.run(size, train_uncompiled_and_compiled, axes, pipeline, mode, {}, "inductor", 5, timeout_s=900)
    for (_, _, sent, _, _), (_, _, other_sent, graphs, breaks) in ranks:
        # After two, four, … ten steps.
        assert (graphs, breaks) == ([1] * 5, 0)
        assert other_sent == sent_by_graphs(sent, axes, mode)
    (loss, gradients, *_), (compiled_loss, compiled, *_) = ranks[0]
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-3, atol=0)
    _, wide = plain_gradients(False, 1 if pipeline is None else 2)
    # One by one, since a wrong gradient of one weight would be lost among all others.
    for name, gradient in gradients.items():
        noise = distance([wide[name]], [gradient])
        assert distance([compiled[name]], [gradient]) < 0.9 * noise, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "attention"])
def test_inductor_computes_what_uncompiled_layers_do(mode):
    torch._dynamo.reset()
    loss, gradients, _ = train(mode=mode)
    model = cuboid.shard(plain_model(), config_of(mode=mode, compile=True)).train()
    again, compiled = loss_and_gradients(model, None)
    assert (model.cuboid.state.compiled.graphs, model.cuboid.state.compiled.reason) == (1, None)
    torch.testing.assert_close(again, loss, rtol=1e-3, atol=0)
    _, wide = plain_gradients(False, 1)
    noise = distance([wide[name] for name in gradients], gradients.values())
    assert distance([compiled[name] for name in gradients], gradients.values()) < 0.7 * noise


# --- convergence ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_hundred_steps_end_where_bf16_does():
    """A small Llama learns a Markov chain; the mean loss of the last steps is that of bf16 within 0.5 %."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, 64, generator=generator).mul(3).softmax(-1)
    ends = []
    for fp8 in (None, FP8):
        generator.manual_seed(1)
        model = plain_model()
        model = cuboid.shard(model, config_of(fp8=fp8)).train()
        # Masters in float32: bf16 has too few bits for small steps.
        masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=2e-3)
        losses = []
        for step in range(300):
            ids = torch.randint(0, 64, (8, 64), generator=generator)
            for at in range(1, 64):
                ids[:, at] = torch.multinomial(table[ids[:, at - 1]], 1, generator=generator)[:, 0]
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 20, (300 - step) / 100)
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    master.grad = parameter.grad.float()
                optimizer.step()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            losses.append(float(loss.detach()))
        ends.append(sum(losses[-50:]) / 50)
        assert ends[-1] < losses[0] / 1.5
    print(f"bf16 {ends[0]:.4f}, fp8 {ends[1]:.4f}")
    assert ends[1] == pytest.approx(ends[0], rel=5e-3)


# --- refusals ------------------------------------------------------------------------------------------------------


def refusal(make, config):
    with pytest.raises((ConfigError, UnsupportedModelError)) as error:
        cuboid.shard(make(), config)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_weights_are_refused(dtype):
    message = refusal(lambda: plain_model(dtype), config_of())
    assert f"its weights are in {dtype}; load them in torch.bfloat16; or leave fp8 out" in message


def test_weights_that_deepspeed_converts_are_taken():
    config = {**config_of(), "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    assert cuboid.shard(plain_model(torch.float32), config).cuboid.config.fp8.min_dimension == 16
    config = {**config, "bf16": {"enabled": False}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert "fp16 is enabled; enable bf16 instead" in refusal(plain_model, config)


def test_other_models_are_refused():
    sizes = {**SIZES, "num_hidden_layers": 1}

    def classifier():
        config = LlamaConfig(**sizes, pad_token_id=0)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)

    def mixture():
        config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    assert "was compared with bf16 for causal language modelling, not for" in refusal(classifier, config_of())
    for pipeline in (None, {"segments": 2}):
        assert "a mixture's experts have no form in fp8" in refusal(mixture, config_of(pipeline))
        text = refusal(plain_model, config_of(pipeline, fp8={"recipe": "rowwise_with_gw_hp"}))
        assert "no rank's block of a linear layer's weight has at least 2048 rows and columns" in text
        assert "lower tensor_parallel.fp8.min_dimension" in text


def test_devices_without_the_product_are_refused():
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 9)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA L4"),
    ):
        assert "NVIDIA L4 has compute capability 8.9" in fp8_models._obstacle_of_device()
    with mock.patch.object(torch, "_scaled_mm", side_effect=RuntimeError("only per-tensor scaling")):
        assert "has no product with a scale for each row on a CPU" in fp8_models._obstacle_of_device()


def test_keys_are_checked():
    text = refusal(plain_model, config_of(fp8={"recipe": "tensorwise"}))
    assert text.startswith("tensor_parallel.fp8.recipe: Input should be 'rowwise_with_gw_hp'")
    text = refusal(plain_model, config_of(fp8={**FP8, "min_dim": 5}))
    assert text == 'tensor_parallel.fp8.min_dim is not a known key; did you mean "min_dimension"?'
    text = refusal(plain_model, config_of(fp8=True))
    assert "tensor_parallel.fp8: it is a section of keys" in text


def test_verify_has_nothing_to_compare_it_with():
    with pytest.raises(ConfigError, match=r"tensor_parallel\.fp8 rounds what plain transformers doesn't round"):
        verify(Plan("nowhere"), config_of())


def test_a_model_that_was_sharded_by_another_config_is_refused():
    deepspeed = pytest.importorskip("deepspeed")
    model = cuboid.shard(plain_model(), config_of(fp8=None))
    config = {**config_of(), "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match=r"was sharded with tensor_parallel\.fp8 null, but the config has"):
        deepspeed.initialize(model=model, config=config)
