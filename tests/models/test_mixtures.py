"""Mixtures of experts on a mesh: who is split how, and the same loss and gradients as on one process."""

import copy
import gc
from unittest import mock

import pytest
import torch
from torch import nn

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.models.architectures.roles import blocks_computed_whole, find_roles
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import _Stage
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from cuboid.tensor3d.experts.sharded_experts import ShardedScaledExperts
from live_bytes import LiveBytes
from small_layers import MIXTURES as SIZES
from small_layers import mixture as small
from threaded import Threaded, assert_as_alone, sent_by_last_layer, step_of

ONE_AXIS = ("1x2x1", "1x1x2", "2x1x1")


def batch_of(rows=2, length=8, seed=0):
    ids = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


# --- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "router", "others"),
    [
        ("mixtral", "gate", set()),
        ("qwen3_moe", "gate", set()),
        ("qwen2_moe", "gate", {("shared_expert_gate", "router"), ("shared_expert.gate_proj", "up")}),
        ("gpt_oss", "router", set()),
        ("deepseek_v3", "gate", {("shared_experts.down_proj", "down")}),
    ],
)
def test_blocks_with_experts_are_split(architecture, router, others):
    model = small(architecture)
    roles = {name: role.kind for name, role in find_roles(model).items()}
    layer = "model.layers.1.mlp."
    assert {("experts", "experts"), (router, "router"), *others} <= {
        (name.removeprefix(layer), kind) for name, kind in roles.items() if name.startswith(layer)
    }
    assert "mlp" not in blocks_computed_whole(model)


def test_experts_that_are_given_all_tokens_are_split_too():
    model = small("llama4_text")
    roles = {name: role.kind for name, role in find_roles(model).items()}
    layer = "model.layers.1.feed_forward."
    expected = {"experts": "experts", "router": "router", "shared_expert.up_proj": "up"}
    assert {name: roles[f"{layer}{name}"] for name in expected} == expected
    assert blocks_computed_whole(model) == ()


def test_only_the_experts_that_a_token_is_sent_to_compute():
    model, batch = small("llama4_text"), batch_of()
    threaded, rows = Threaded(model, "1x1x2"), []
    first = [rank_model.model.layers[0].feed_forward.experts for rank_model in threaded.models]

    def noted(experts, features, gate=ShardedScaledExperts.gate):
        if any(experts is of_layer for of_layer in first):
            rows.append(len(features))
        return gate(experts, features)

    with mock.patch.object(ShardedScaledExperts, "gate", noted):
        threaded.run(step_of(**batch))
    assert rows == [2 * batch["input_ids"].numel()] * 2


def test_each_rank_has_its_share_of_every_expert():
    plan = make_parallel_plan(small("gpt_oss"), MeshShape(2, 2, 2))
    specs = plan.specs["model.layers.0.mlp.experts"]
    shapes = {name: spec.shard_shape(plan.mesh) for name, spec in specs.items()}
    # Of 4 experts with 24 features inside, in a residual stream of 32.
    assert shapes == {
        "gate_up_proj": (2, 16, 24),
        "gate_up_proj_bias": (2, 12),
        "down_proj": (2, 12, 16),
        # Whole blocks' rows are handed out over what is left: 4 rows of [16] over batch and sequence.
        "down_proj_bias": (1, 16),
    }
    for name, spec in specs.items():
        assert 8 * torch.Size(shapes[name]).numel() == torch.Size(spec.shape).numel()


def test_a_block_with_random_numbers_of_its_own_or_with_unknown_modules_is_whole():
    noisy = small("mixtral", router_jitter_noise=0.1)
    assert "mlp" in blocks_computed_whole(noisy)
    adapted = small("mixtral")
    adapted.model.layers[0].mlp.adapter = nn.Linear(4, 4)
    assert find_roles(adapted)["model.layers.0.mlp"].kind == "whole"
    changed = small("mixtral")
    changed.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(4))
    assert find_roles(changed)["model.layers.0.mlp"].kind == "whole"
    normed = small("mixtral")
    normed.model.layers[0].mlp.experts.has_post_expert_norm = True
    assert find_roles(normed)["model.layers.0.mlp"].kind == "whole"


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_features_that_the_axes_do_not_divide_are_named(architecture):
    model = small(architecture, intermediate_size=26)
    message = r"mlp\.experts: 26 features of each expert don't divide by sequence × hidden = 4 .*nearest meshes.*: "
    with pytest.raises(MeshError, match=message) as error:
        make_parallel_plan(model, MeshShape(1, 2, 2))
    make_parallel_plan(model, MeshShape.parse(str(error.value).rpartition(": ")[2].split(", ")[0]))


# --- the same as on one process ----------------------------------------------------------------------------------


@pytest.mark.sample(2, ci=4)
@pytest.mark.parametrize("mesh", [*ONE_AXIS, "2x2x2"])
@pytest.mark.parametrize("architecture", SIZES)
def test_loss_and_gradients_are_those_of_one_process(architecture, mesh):
    assert_as_alone(small(architecture), mesh, step_of(**batch_of()))


@pytest.mark.parametrize("mesh", ["2x1x2", "4x1x1"])
def test_experts_that_the_batch_axis_does_not_divide(mesh):
    threaded = assert_as_alone(small("mixtral", num_local_experts=5), mesh, step_of(**batch_of(rows=4)))
    held = [model.model.layers[0].mlp.experts.down_proj.shape[0] for model in threaded.models]
    # The last ranks fill theirs up with zeros.
    assert set(held) == {3 if mesh == "2x1x2" else 2}


@pytest.mark.parametrize("mesh", ["2x2x1", "1x2x2"])
def test_all_tokens_for_the_same_experts(mesh):
    model = small("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.tensor([0.0, 50.0, 0.0, 40.0]))
    threaded = assert_as_alone(model, mesh, step_of(**batch_of()))
    gradient = threaded.gradients()["model.layers.0.mlp.experts.down_proj"]
    assert [bool(expert.any()) for expert in gradient] == [False, True, False, True]


def chosen_by(model, batch):
    """Experts of each row of the batch, in the first layer."""
    choices = []
    hook = model.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, output: choices.append(output[2]))
    model(**batch)
    hook.remove()
    return [set(row.flatten().tolist()) for row in choices[0].unflatten(0, batch["input_ids"].shape)]


def test_an_expert_whose_tokens_are_all_on_one_rank():
    model = small("mixtral")
    ids = torch.stack([torch.randint(0, 30, (8,)), torch.randint(30, 61, (8,))])
    with torch.no_grad():
        # The two rows' tokens lie on either side of the origin, and so do the experts of two pairs.
        model.model.embed_tokens.weight[:30] += 3
        model.model.embed_tokens.weight[30:] -= 3
        side = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
        model.model.layers[0].mlp.gate.weight.add_(side.unsqueeze(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    assert chosen_by(copy.deepcopy(model), batch) == [{0, 1}, {2, 3}]
    assert_as_alone(model, "2x1x1", step_of(**batch))
    assert_as_alone(model, "2x1x2", step_of(**batch))


def test_ties_are_broken_alike_on_all_ranks():
    model = small("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            # Every token likes all experts as much.
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight[:1].clone().expand(4, -1))
    batch = batch_of()
    threaded = Threaded(model, "1x2x2")
    chosen = {}

    def note(rank):
        return lambda _, __, output: chosen.__setitem__(rank, output[2])

    for rank, rank_model in enumerate(threaded.models):
        rank_model.model.layers[0].mlp.gate.register_forward_hook(cuboid.local_hook(note(rank)))
    threaded.run(step_of(**batch))
    coordinates = [mesh.coordinate for mesh in threaded.ranks.meshes]
    for rank, at in enumerate(coordinates):
        # Along `hidden` the same tokens; all tokens' logits are equal, so that every rank's choices are.
        peers = [other for other, there in enumerate(coordinates) if there.sequence == at.sequence]
        assert all(torch.equal(chosen[rank], chosen[peer]) for peer in peers)
    assert_as_alone(model, "1x2x2", step_of(**batch))


# --- the routers' own loss -------------------------------------------------------------------------------------------


def with_router_loss(architecture):
    return small(architecture, output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", [*ONE_AXIS, "2x2x2"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_the_load_balancing_loss_is_that_of_the_whole_micro_batch(architecture, mesh):
    model, batch = with_router_loss(architecture), batch_of(rows=3, length=7)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 4:] = 0
    for micro_batch in (batch, {**batch, "attention_mask": mask}):
        assert_as_alone(model, mesh, step_of(**micro_batch))
    plain = copy.deepcopy(model)
    plain.config.output_router_logits = False
    with pytest.raises(AssertionError):
        torch.testing.assert_close(plain(**batch).loss, model(**batch).loss)


def test_what_is_scaled_by_the_labels_of_several_micro_batches_is_as_in_plain_transformers():
    first, second = batch_of(rows=2), batch_of(rows=2, seed=1)
    second["labels"][0, :5] = -100
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in (first, second))

    def step(model):
        return sum(step_of(**batch, num_items_in_batch=items)(model) for batch in (first, second))

    assert_as_alone(with_router_loss("mixtral"), "2x1x2", step)


def test_what_is_set_on_the_model_later_is_in_the_loss_of_segments_too():
    model, batch = with_router_loss("mixtral"), batch_of()
    stage = cuboid.shard(copy.deepcopy(model), {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}})
    for changed in (model, stage):
        changed.num_experts_per_tok, changed.router_aux_loss_coef = 1, 0.25
    with KeepFloat64():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(cuboid.Pipeline(stage).train(iter([batch]), 1), loss.detach())
    gradients = cuboid.full_gradients(stage)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_router_logits_and_their_loss_are_given_whole():
    model, batch = with_router_loss("qwen3_moe"), batch_of(rows=3, length=7)
    with torch.no_grad():
        with KeepFloat64():
            expected = model(**batch)
        outputs = Threaded(model, "2x2x1").run(lambda rank_model: rank_model(**batch, use_cache=False))
    for output in outputs:
        torch.testing.assert_close(output.aux_loss, expected.aux_loss)
        for logits, other in zip(output.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(logits, other)


def test_router_logits_of_blocks_that_are_whole_are_an_error():
    threaded = Threaded(small("mixtral", router_jitter_noise=0.1), "2x1x1")
    with pytest.raises(UnsupportedModelError, match="output_router_logits: the routers of MixtralModel are in blocks"):
        threaded.run(lambda rank_model: rank_model(**batch_of(), output_router_logits=True))


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [*ONE_AXIS, "2x2x2", "3x1x2"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe"])
def test_counted_bytes_of_experts_are_the_formula(architecture, mesh):
    shape, rows, length = MeshShape.parse(mesh), 6, 8
    # What three ranks divide, but for the four experts.
    sizes = {"hidden_size": 48, **({"shared_expert_intermediate_size": 48} if architecture == "qwen2_moe" else {})}

    def model_of(layers):
        return small(architecture, num_hidden_layers=layers, **sizes).float()

    expected = layer_bytes(block_sizes(describe_modules(model_of(3)), shape), shape, rows, length, element_bytes=4)
    for of_layer in sent_by_last_layer(model_of, mesh, step_of(**batch_of(rows, length))):
        # Each collective's share is rounded to a whole byte.
        assert of_layer == {axes: pytest.approx(count, abs=40) for axes, count in expected.items()}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x2x1"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_what_a_layer_with_experts_keeps_is_what_the_planner_counts(architecture, mesh):
    shape, rows, length = MeshShape.parse(mesh), 2, 32
    sizes = {"hidden_size": 96, "moe_intermediate_size": 48, "num_key_value_heads": 4}
    sizes["intermediate_size" if architecture == "mixtral" else "head_dim"] = 48 if architecture == "mixtral" else 24
    kept = []
    for layers in (2, 3):
        model = small(architecture, num_hidden_layers=layers, **sizes).to(torch.bfloat16)
        threaded = Threaded(model, mesh)
        kept.append(threaded.run(lambda rank_model: kept_bytes(rank_model, batch_of(rows, length))))
    described = describe_modules(model)
    layout = Layout(shape, micro_batch=rows)
    stage = _Stage(StepCost(described, layout, Cluster.parse(f"{shape.size}xH100"), length), 0)
    expected = stage._kept(described.kind_of_layers[-1], 0)
    for two, three in zip(*kept, strict=True):
        assert expected == pytest.approx(three - two, rel=0.05)


def test_checkpointing_drops_the_routing():
    def live_after_forward(rank_model):
        with LiveBytes([*rank_model.parameters(), *rank_model.buffers()]) as live:
            outputs = rank_model(**batch_of(2, 32), use_cache=False)
            gc.collect()
            return live.now, outputs.loss

    kept = []
    for per_token in (1, 3):
        model = small("mixtral", num_experts_per_tok=per_token).to(torch.bfloat16).train()
        model.gradient_checkpointing_enable()
        kept.append([size for size, _ in Threaded(model, "1x2x1").run(live_after_forward)])
    assert kept[0] == kept[1]


def kept_bytes(model, batch):
    """Bytes of the storages that a forward keeps for its backward, besides weights, each once."""
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            # Kept alive, so that no other tensor is allocated at its address.
            kept[x.untyped_storage().data_ptr()] = x.detach()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**batch, use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in kept.values())
