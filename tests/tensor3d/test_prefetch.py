"""What happens while something else computes: gathers a layer ahead, gradients a layer behind, parts of a batch."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

import cuboid
from cuboid.config.schema import CuboidConfig
from cuboid.distributed import mesh as mesh_module
from cuboid.distributed.lone_rank import lone_rank
from cuboid.distributed.topology import MeshShape
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.optim.elementwise import CHECKED
from cuboid.planner.comm_formula import layer_bytes, stage_layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from cuboid.tensor3d.layers import input_gather, linear, linear_op
from cuboid.tensor3d.running_forward import begin_forward, end_forward
from cuboid.tensor3d.sharding import bucketing
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce, deferred_shards
from cuboid.tensor3d.sharding.optimizer_steps import OptimizerSteps
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.verify import SmallModel, WorkerPool
from live_bytes import LiveBytes

BATCH, LENGTH = 6, 12


def sharded(path, axes, **settings):
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True)), **settings}
    return cuboid.shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), {"tensor_parallel": section})


def tokens(shift=0):
    return (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 + shift) % 131


def train(path, axes, settings, options=()):
    """Losses of three steps of SGD with two micro-batches each, the last gradients, the weights, and bytes by axes."""
    model = sharded(path, axes, **settings).train()
    for name, value in options:
        getattr(model, name)(**value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    traffic = cuboid.mesh_of(model).comm_counter
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        traffic.reset()
        for part in range(2):
            ids = tokens(2 * step + part)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    params = [p for m in model.modules() if isinstance(m, ShardedModule) for p in m.sharded_params.values()]
    gc.collect()
    left = sum(p._copy is not None and p._copy() is not None for p in params)
    return losses, cuboid.full_gradients(model), left, traffic.snapshot()


def assert_same(alone, ranks):
    """Losses on all ranks, and the gradients, which the first one has whole."""
    for rank in ranks:
        assert rank[0] == pytest.approx(alone[0], rel=1e-12)
    gradients = ranks[0][1]
    assert gradients.keys() == alone[1].keys()
    for name, gradient in alone[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13)


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint(SmallModel("llama", heads=12, kv_heads=6, layers=3))


@pytest.fixture(scope="module")
def alone(pool, path):
    return pool.run(1, train, path, (1, 1, 1), {})[0]


# --- weights that are kept ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(6, 1, 1), (2, 3, 1), (3, 1, 2), (1, 2, 3)], ids=str)
def test_kept_weights_give_the_same_and_are_freed(pool, path, alone, axes):
    ranks = pool.run(6, train, path, axes, {"weight_gather": "step"})
    assert_same(alone, ranks)
    assert all(left == 0 for _, _, left, _ in ranks)


@pytest.mark.ci
def test_kept_weights_send_what_the_formula_says(pool, path):
    shape = MeshShape(6, 1, 1)
    deeper = AutoModelForCausalLM.from_pretrained(path)
    sizes = block_sizes(describe_modules(deeper), shape)
    sent = {}
    for mode in ("layer", "step"):
        sent[mode] = pool.run(6, train, path, (6, 1, 1), {"weight_gather": mode})[0][3]["batch"]
    by_formula = [
        layer_bytes(sizes, shape, BATCH, LENGTH, element_bytes=8, statistic_bytes=8, weight_gather=mode)["batch"]
        for mode in ("layer", "step")
    ]
    # Three layers, two micro-batches; the rest of the model sends alike. A collective's share is a whole byte.
    assert sent["layer"] - sent["step"] == pytest.approx(6 * (by_formula[0] - by_formula[1]), abs=200)


def outdated(path, axes):
    """Whether a forward sees what an optimizer did through ``.data``, while an older graph keeps gathered weights."""
    model = sharded(path, axes, weight_gather="step").train()
    held = model(input_ids=tokens(), labels=tokens()).loss
    parameters = list(model.parameters())

    class Flat(torch.optim.Optimizer):
        def __init__(self):
            super().__init__(parameters, {})

        def step(self, closure=None):
            for parameter in parameters:
                parameter.data.mul_(0.5)

    optimizer = Flat()
    # It can't be tried on other tensors.
    CHECKED.add(optimizer)
    optimizer.step()
    after = float(model(input_ids=tokens(), labels=tokens()).loss.detach())
    fresh = sharded(path, axes)
    for parameter, changed in zip(fresh.parameters(), parameters, strict=True):
        parameter.data.copy_(changed.data)
    wanted = float(fresh(input_ids=tokens(), labels=tokens()).loss.detach())
    return float(held.detach()), after, wanted


def test_kept_weights_are_forgotten_when_an_optimizer_steps(pool, path):
    for before, after, wanted in pool.run(6, outdated, path, (6, 1, 1)):
        assert after == pytest.approx(wanted, rel=1e-13)
        assert after != pytest.approx(before, rel=1e-3)


def sent_in_backward(path, autocast, mode):
    """Bytes over `batch` of a backward, and those of the layers' weights."""
    model = sharded(path, (6, 1, 1), weight_gather=mode).train().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.base_model(input_ids=tokens()).last_hidden_state
    traffic = cuboid.mesh_of(model).comm_counter
    traffic.reset()
    hidden.sum().backward()
    layers = [module for module in model.base_model.layers.modules() if isinstance(module, linear.ShardedLinear)]
    elements = sum(layer.weight.numel() for layer in layers)
    return traffic.snapshot()["batch"], 5 * elements * (2 if autocast else 4)


def sent_by_a_stage(path, settings):
    """Loss, gradients, bytes over `batch` of a step of a pipeline with two micro-batches of two segments, its segments'
    lengths, and the bytes of gathering the layers' weights, the embedding's or head's, and everything else once."""
    section = {"mode": "3d_tensor", "mesh": {"batch": 3}, **settings}
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 2, "partition": "even"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
    model = cuboid.shard(model, {"tensor_parallel": section, "pipeline": pipeline})
    runs = cuboid.Pipeline(model)
    cuboid.mesh_of(model).comm_counter.reset()
    loss = runs.train(iter([{"input_ids": tokens(n), "labels": tokens(n)} for n in range(2)]), 2)
    layers = [module for module in model.base_model.layers.modules() if isinstance(module, linear.ShardedLinear)]
    # Each of three ranks sends its shard to the two others.
    every = sum(2 * 8 * parameter.numel() for parameter in model.parameters())
    weights = sum(2 * 8 * layer.weight.numel() for layer in layers)
    ends = [weight for name, weight in model.named_parameters() if "embed_tokens" in name or "lm_head" in name]
    end = sum(2 * 8 * weight.numel() for weight in ends)
    sent = cuboid.mesh_of(model).comm_counter.snapshot()["batch"]
    return [float(loss)], cuboid.full_gradients(model), sent, weights, end, every


@pytest.mark.slow
def test_a_pipeline_gathers_each_weight_once_a_step_if_it_is_to_keep_them(pool, path):
    ranks = {mode: pool.run(6, sent_by_a_stage, path, {"weight_gather": mode}) for mode in ("layer", "step")}
    assert_same(ranks["layer"][0], ranks["step"])
    for every_unit, once in zip(ranks["layer"], ranks["step"], strict=True):
        _, _, sent, weights, end, _ = every_unit
        # Four units gather a layer's weights in forward and in backward, and those of embedding and head in forward.
        assert sent - once[2] == pytest.approx((2 * 4 - 1) * weights + (4 - 1) * end, abs=200)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("mode", ["layer", "step"])
def test_a_pipeline_reduces_each_gradient_once_a_step_if_it_is_to_wait(pool, path, mode):
    settings = {"weight_gather": mode}
    ranks = {sync: pool.run(6, sent_by_a_stage, path, {**settings, "gradient_sync": sync}) for sync in ("unit", "step")}
    assert_same(ranks["unit"][0], ranks["step"])
    for every_unit, once in zip(ranks["unit"], ranks["step"], strict=True):
        _, _, sent, _, _, every = every_unit
        assert sent - once[2] == pytest.approx((4 - 1) * every, abs=200)


def test_the_formula_has_what_a_stages_layer_sends_in_a_step(path):
    """Beside the one for a unit, which is compared with layers."""
    sizes = block_sizes(describe_modules(AutoModelForCausalLM.from_pretrained(path)), MeshShape(3, 1, 1))
    options = {"element_bytes": 8, "statistic_bytes": 8}

    def step(lengths, **modes):
        return stage_layer_bytes(sizes, MeshShape(3, 1, 1), BATCH, lengths, **options, **modes)["batch"]

    unit = layer_bytes(sizes, MeshShape(3, 1, 1), BATCH, 6, **options)["batch"]
    kept = layer_bytes(sizes, MeshShape(3, 1, 1), BATCH, 6, **options, weight_gather="step")["batch"]
    assert step([6] * 4) == 4 * unit
    assert step([6] * 4, weight_gather="step") == pytest.approx(4 * unit - 7 * (unit - kept), abs=20)
    reduced = 4 * unit - step([6] * 4, gradient_sync="step")
    # Weights, as one gather moves them, and norms and biases besides.
    assert 3 * (unit - kept) < reduced < 3.3 * (unit - kept)
    both = step([6] * 4, weight_gather="step", gradient_sync="step")
    assert both == pytest.approx(4 * unit - 7 * (unit - kept) - reduced, abs=20)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_that_autocast_casts_are_kept_too(threads, path, autocast):
    # A cast is a new tensor, but made of the same values.
    modes = [threads.run(6, sent_in_backward, path, autocast, mode) for mode in ("layer", "step")]
    for (again, weights), (kept, _) in zip(*modes, strict=True):
        assert again - kept == pytest.approx(weights, rel=0.01)


def test_updates_count_until_nobody_wants_to_know():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    gc.collect()  # those of other tests
    before = len(hooks)
    steps = OptimizerSteps()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert steps.count == 1
    assert len(hooks) == before + 1
    del steps
    gc.collect()
    assert len(hooks) == before


# --- with activation checkpointing, and parts ---------------------------------------------------------------------


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("mode", ["layer", "step"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_give_the_same(pool, path, alone, reentrant, mode):
    options = [("gradient_checkpointing_enable", {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}})]
    assert_same(alone, pool.run(6, train, path, (3, 2, 1), {"weight_gather": mode}, options))


def train_in_parts(path, axes, bucket_bytes):
    """As :func:`train`, of ranks that believe to be on different networks, with parts and buckets of any size."""
    mesh_module.host_identity = lambda _: str(torch.distributed.get_rank())
    linear_op._PART_BYTES, bucketing._BUCKET_BYTES = 1, bucket_bytes
    return train(path, axes, {})


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("axes", [(2, 1, 2), (1, 2, 3), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [0, 6000])
def test_parts_of_a_batch_one_behind_the_other_give_the_same(path, alone, bucket_bytes, axes):
    # Their modules are changed, so these processes serve no other test.
    with WorkerPool(math.prod(axes)) as workers:
        assert_same(alone, workers.run(math.prod(axes), train_in_parts, path, axes, bucket_bytes))


# --- inputs that are gathered again -------------------------------------------------------------------------------


def gathers_and_ways_out(path, axes, wanted, early_bytes=linear_op.EARLY_BYTES):
    """In backward: the gathers of the sequence, and the gradients at the ways out of attention and MLP, in order."""
    seen = []
    linear_op.EARLY_BYTES = early_bytes
    start = input_gather.GatherSequence.start

    def noted(self, x, **how):
        seen.append("gather")
        return start(self, x, **how)

    model = sharded(path, axes).train()
    for layer in model.model.layers:
        for block, way_out in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            getattr(block, way_out).register_forward_pre_hook(
                cuboid.local_hook(
                    lambda _, args, name=way_out: args[0].register_hook(lambda _: seen.append(name)) and None
                )
            )
    loss = model(input_ids=tokens(), labels=tokens()).loss
    input_gather.GatherSequence.start = noted
    try:
        weights = [model.get_parameter(name) for name in wanted]
        if weights:
            return seen, [g.norm().item() > 0 for g in torch.autograd.grad(loss, weights)]
        loss.backward()
    finally:
        input_gather.GatherSequence.start = start
    return seen, []


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("axes", [(1, 2, 3), (2, 3, 1)], ids=str)
def test_a_blocks_input_is_gathered_again_before_its_own_code_runs_backward(pool, path, axes):
    for seen, _ in pool.run(6, gathers_and_ways_out, path, axes, []):
        # One for each block, before the gradient has come through the block's way out.
        assert seen == ["gather", "down_proj", "gather", "o_proj"] * 3


@pytest.mark.ci
def test_a_long_input_is_gathered_again_when_it_is_needed(pool, path):
    for seen, _ in pool.run(6, gathers_and_ways_out, path, (1, 2, 3), [], 0):
        assert seen == ["down_proj", "gather", "o_proj", "gather"] * 3
    pool.run(6, gathers_and_ways_out, path, (1, 2, 3), [])  # Processes keep the limit.


def peak_of_a_backward(early_bytes, monkeypatch):
    """Bytes of a checkpointed MLP's backward at most, on a rank of 1×4×1 without the others, of 4,096 tokens."""
    monkeypatch.setattr(linear_op, "EARLY_BYTES", early_bytes)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    plan, mesh = make_parallel_plan(llama, MeshShape(1, 4, 1), MeshVerdict()), lone_rank(MeshShape(1, 4, 1))
    settings = CuboidConfig().tensor_parallel
    model = shard_modules(llama, plan, mesh, settings, lambda x, spec: take_shard(x, spec, mesh))
    x = torch.zeros(1, 1024, 64, requires_grad=True)
    token = begin_forward(True)
    with LiveBytes() as live:
        out = checkpoint(model.model.layers[0].mlp, x, use_reentrant=False)
        live.most = live.now
        out.sum().backward()
    end_forward(token)
    return live.most


def test_a_long_input_is_not_there_while_the_product_before_it_needs_its_own(monkeypatch):
    early, late = (peak_of_a_backward(size, monkeypatch) for size in (1 << 40, 0))
    assert early - late >= 0.9 * 4096 * 64 * 4


def test_nothing_is_gathered_again_for_what_has_no_backward(pool, path):
    wanted = ["model.layers.2.mlp.down_proj.weight"]
    for seen, has_gradient in pool.run(6, gathers_and_ways_out, path, (1, 2, 3), wanted):
        assert seen == []
        assert has_gradient == [True]


# --- gradients that are on their way ------------------------------------------------------------------------------


class Late:
    """Stands for a collective that ends when it is waited for."""

    def __init__(self, result):
        self.result, self.is_through = result, False

    def wait(self):
        self.result.fill_(2)
        self.is_through = True


class Use(torch.autograd.Function):
    """Leaves a gradient that isn't there yet."""

    @staticmethod
    def forward(ctx, x, shard, deferred, late):
        ctx.deferred, ctx.late = deferred, late
        return x + shard

    @staticmethod
    def backward(ctx, gradient):
        ctx.deferred.defer(ctx.late)
        return gradient, ctx.late.result, None, None


def test_a_gradient_is_waited_for_after_the_backward_of_the_layer_in_front():
    order = []
    x = torch.zeros(3, requires_grad=True)
    shard = torch.nn.Parameter(torch.ones(3))
    shard.register_post_accumulate_grad_hook(lambda p: order.append(("gradient", p.grad.tolist())))
    late = Late(torch.full((3,), torch.nan))
    # Before the layer in front runs, as its pre-hook does.
    (leaf,), deferred = deferred_shards([shard])
    front = x * 3
    front.register_hook(lambda _: order.append(("front", late.is_through)))
    Use.apply(front, leaf, deferred, late).sum().backward()
    assert order == [("front", False), ("gradient", [2.0, 2.0, 2.0])]
    assert isinstance(deferred, DeferredReduce)


def test_a_deferred_shard_is_the_parameter_for_checkpointing_too():
    shard = torch.nn.Parameter(torch.ones(3))
    (leaf,), _ = deferred_shards([shard])
    out = checkpoint(lambda x: (x * leaf).sum(), torch.arange(3.0, requires_grad=True), use_reentrant=False)
    out.backward()
    assert shard.grad.tolist() == [0.0, 1.0, 2.0]


def train_copy(path, axes):
    """As :func:`train` of a copied model, whose original is gone."""
    model = sharded(path, axes).train()
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loss = copied(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return [float(loss.detach())], cuboid.full_gradients(copied)


def test_a_copied_model_prefetches_its_own_layers(pool, path):
    alone = pool.run(1, train_copy, path, (1, 1, 1))[0]
    for axes in [(3, 2, 1), (1, 2, 3)]:
        assert_same(alone, pool.run(6, train_copy, path, axes))


def early_end(path, axes):
    """Gradients after a forward that broke off in the middle of the layers."""
    model = sharded(path, axes).train()
    broken = model.model.layers[1].mlp.register_forward_pre_hook(cuboid.local_hook(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        model(input_ids=tokens(), labels=tokens())
    broken.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return cuboid.full_gradients(model)


def test_what_was_gathered_for_a_forward_that_broke_off_is_forgotten(pool, path):
    wanted = pool.run(1, early_end, path, (1, 1, 1))[0]
    gradients = pool.run(6, early_end, path, (3, 2, 1))[0]
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-13)


# --- what backward holds ------------------------------------------------------------------------------------------


def inputs_alive_in_backward(path, axes, keep_graph):
    """For each way out, whether the rank's own part of its input is alive when its gradient is multiplied."""
    model = sharded(path, axes).train()
    storages, alive = {}, []
    for layer in model.model.layers:
        for way_out in (layer.self_attn.o_proj, layer.mlp.down_proj):

            def note(module, args):
                storages[module.product] = weakref.ref(args[0].untyped_storage())

            way_out.register_forward_pre_hook(cuboid.local_hook(note))
    input_gradient = linear_op.LinearOp.input_gradient

    def noted(self, *args):
        if self.products[0] in storages:
            alive.append(storages[self.products[0]]() is not None)
        return input_gradient(self, *args)

    linear_op.LinearOp.input_gradient = noted
    try:
        model(input_ids=tokens(), labels=tokens()).loss.backward(retain_graph=keep_graph)
    finally:
        linear_op.LinearOp.input_gradient = input_gradient
    return alive


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(1, 2, 3), (2, 1, 3)], ids=str)
def test_backward_frees_an_input_once_the_whole_is_on_its_way(pool, path, axes):
    for kept in (False, True):
        for alive in pool.run(6, inputs_alive_in_backward, path, axes, kept):
            # The attention's kernel has saved its own output, which the way out of attention was given.
            assert alive[::2] == [kept] * 3
