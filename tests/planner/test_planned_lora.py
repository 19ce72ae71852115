"""Plans of a frozen model with LoRA: what is counted, against PEFT's factors and the tensors of models whose ranks are
threads."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError
from cuboid.models.stages.model_costs import decoder_layers
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import _Stage, states_bytes
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.kept import CountedAs, _Saved, count_kept
from cuboid.planner.description.meta_model import describe
from cuboid.planner.description.trunk import QUANTIZED_BYTES, LaterAdapters, Trunk
from cuboid.planner.estimate import cuboid_software, estimate
from cuboid.planner.search import search
from cuboid.seq1f1b.runtime.memory import MeteredPool
from cuboid.tensor3d.sharding import bucketing
from live_bytes import fullest_moment, uncounted_exchanges
from planning import LLAMA_8B, on_meta, small
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, get_peft_model

from cuboid.planner.description.planned_lora import PlannedLora

ROWS, LENGTH = 4, 512
SIZES = {"hidden_size": 96, "intermediate_size": 384, "head_dim": 8, "vocab_size": 64, "moe_intermediate_size": 96}
SIZES |= {"n_embd": 96, "n_inner": 384, "attn_pdrop": 0.0, "n_positions": 1024, "max_position_embeddings": 1024}
#: What the shipped tables know, so that nothing is probed.
MODELS = {
    "llama": {},
    "gpt2": {"n_inner": None},
    "qwen3": {"pad_token_id": None},
    "mixtral": {"head_dim": None},
    "deepseek_v3": {
        **{"num_key_value_heads": 12, "v_head_dim": 12, "head_dim": 4, "pad_token_id": None},
        **{"n_shared_experts": 1, "n_group": 2, "topk_group": 2},
    },
    "phi3": {"num_key_value_heads": 12, "eos_token_id": None, "bos_token_id": None},
}
MESHES = ["1x2x1", "1x1x2", "2x1x1", "1x2x2", "2x2x1"]
PAIR = ("q_proj", "v_proj")


def frozen(r=4, targets="all-linear", **options):
    return Trunk(PlannedLora(r, targets), **options)


def described_small(name, trunk, **sizes):
    return describe(small(name, **{**SIZES, **MODELS.get(name, {}), **sizes}), trunk=trunk)


def llama_8b(trunk):
    return describe(AutoConfig.for_model(**LLAMA_8B), trunk=trunk)


def adapted(model, targets="all-linear"):
    config = LoraConfig(r=4, target_modules=targets if isinstance(targets, str) else list(targets))
    return get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.parametrize("targets", ["all-linear", PAIR])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_trained_is_what_peft_trains(name, targets):
    if targets == PAIR and name not in ("llama", "qwen3", "mixtral"):
        pytest.skip("it has other layers")
    described = described_small(name, frozen(targets=targets))
    plain = adapted(on_meta(described.config), targets)
    assert described.trained_parameters == plain.get_nb_trainable_parameters()[0]
    layout = Layout(MeshShape(2, 1, 1), 2, micro_batch=2, segments=2)
    cost = StepCost(described, layout, Cluster.parse("4xH100"), LENGTH)
    assert 2 * sum(map(sum, cost.own_trained)) == pytest.approx(described.trained_parameters)


def saved_by_layer(model, verdict, mesh, targets):
    threaded = Threaded(model, mesh, verdict)
    ranks = [adapted(rank, targets) for rank in threaded.models]
    records = [_Saved(rank, list(decoder_layers(rank.get_base_model()).values())) for rank in ranks]
    ids = torch.randint(2, 60, (ROWS, LENGTH))

    def step(rank):
        number = threaded.models.index(rank)
        with records[number].hooks():
            ranks[number](input_ids=ids, labels=ids, use_cache=False)
        return records[number].bytes_by_place(MeteredPool())

    return threaded.run(step)


@pytest.mark.sample(2, ci=10)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("targets", ["all-linear", PAIR])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_counted(name, targets, mesh):
    if targets == PAIR and name not in ("llama", "qwen3", "mixtral"):
        pytest.skip("it has other layers")
    torch.manual_seed(0)
    described, shape = described_small(name, frozen(targets=targets)), MeshShape.parse(mesh)
    counted = count_kept(described, CountedAs(shape))
    assert not counted.obstacle
    model = AutoModelForCausalLM.from_config(described.config, dtype=torch.bfloat16).train()
    ranks = saved_by_layer(model, described.verdict, mesh, targets)
    last = described.kind_of_layers[-1]
    expected = counted.layers[last].kept.of(ROWS // shape.batch, LENGTH, LENGTH)
    # Norms of latents share a message with factors, whose buffer is kept as one.
    tolerance = 2e-2 if name == "deepseek_v3" else 1e-3
    assert max(rank[len(described.layers) - 1] for rank in ranks) == pytest.approx(expected, rel=tolerance)


@pytest.mark.sample(1, ci=5)
@pytest.mark.parametrize("checkpointing", ["none", "layers", "attention"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_step_has_no_more_alive_than_predicted(name, mesh, checkpointing):
    described = described_small(name, frozen())
    layout = Layout(MeshShape.parse(mesh), micro_batch=ROWS, checkpointing=checkpointing)
    stage = _Stage(
        StepCost(described, layout, Cluster.parse(f"{layout.ranks}xH100"), LENGTH, cuboid_software(layout)), 0
    )
    memory = stage.memory()
    predicted = stage.counted_bytes() - memory.parameters - memory.gradients - memory.optimizer - memory.framework
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described.config, dtype=torch.bfloat16).train()
    threaded = Threaded(model, mesh, described.verdict)
    ranks = [adapted(rank) for rank in threaded.models]
    ids = torch.randint(2, 60, (ROWS, LENGTH))

    def step(rank):
        peft = ranks[threaded.models.index(rank)]
        if checkpointing != "none":
            peft.enable_input_require_grads()
            kept = {"kept": "attention"} if checkpointing == "attention" else {}
            rank.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kept})
        return fullest_moment(rank, lambda: peft(input_ids=ids, labels=ids, use_cache=False).loss)

    with uncounted_exchanges(), mock.patch.object(bucketing, "_BUCKET_BYTES", 0):
        alive = max(threaded.run(step))
    assert 0.8 < alive / predicted < 1.05


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(2, 2, 1)])
def test_only_factors_have_gradients_and_states(mesh, stages):
    described = llama_8b(frozen(16))
    layout = Layout(mesh, stages, micro_batch=2, segments=stages)
    one = estimate(described, layout, Cluster.parse(f"{layout.ranks}xH100"), 4096)
    ranks = layout.ranks
    assert sum(memory.parameters for memory in one.stages) == pytest.approx(
        2 * (described.parameters + described.trained_parameters) * stages / ranks
    )
    held = sum(memory.gradients for memory in one.stages)
    size = cuboid_software(layout).gradient_bytes
    assert held == pytest.approx(size * described.trained_parameters * stages / ranks)
    held = sum(memory.optimizer for memory in one.stages)
    assert held == pytest.approx(12 * described.trained_parameters * stages / ranks)
    assert states_bytes(one.cost) <= one.memory_bytes


def test_four_bits_hold_a_quarter_of_the_layers_and_are_restored():
    half, full = (llama_8b(frozen(16, four_bits=bits)) for bits in (True, False))
    # So many that the device isn't faster than the host.
    layout, cluster, length = Layout(MeshShape(2, 1, 1), micro_batch=2), Cluster.parse("2xH100"), 16384
    packed, unpacked = (estimate(model, layout, cluster, length) for model in (half, full))
    in_layers = sum(projection.weights for layer in half.layers for projection in layer.projections)
    spared = in_layers * (2 - QUANTIZED_BYTES) / 2
    assert unpacked.stages[0].parameters - packed.stages[0].parameters == pytest.approx(spared)
    assert packed.memory_bytes < unpacked.memory_bytes
    # Restoring takes time, and gathers over `batch` move fewer bytes.
    assert packed.time.compute_s > unpacked.time.compute_s
    slow = replace(cluster, gpu=replace(cluster.gpu, link_bytes_per_s=1e9))
    assert estimate(half, layout, slow, length).time.total_s < estimate(full, layout, slow, length).time.total_s


def test_a_step_of_lora_takes_no_time_for_gradients_of_frozen_weights():
    # So many that the device isn't faster than the host.
    full, lora, length = llama_8b(None), llama_8b(frozen(16)), 16384
    layout, cluster = Layout(MeshShape(1, 2, 1), micro_batch=1, replicas=4), Cluster.parse("8xH100")
    slow, fast = (estimate(model, layout, cluster, length).time for model in (full, lora))
    assert 0.6 < fast.compute_s / slow.compute_s < 0.9
    assert fast.reduce_s < 0.02 * slow.reduce_s
    assert fast.optimizer_s < 0.02 * slow.optimizer_s
    tokens = layout.rows * length
    assert (
        full.step_flops(layout.rows, length) - lora.step_flops(layout.rows, length)
        == (2 * full.active_parameters - 6 * lora.trained_parameters) * tokens
    )


#: Host time of a layer's forward and backward with LoRA ÷ that of training all of it, by mesh and number of adapters:
#: the least of 18 steps of 2×8 tokens, thread time of a rank on a CPU, meshes over gloo.
MEASURED_ON_HOST = {
    ("1x1x1", 2): 1.33, ("1x2x1", 2): 0.98, ("1x1x2", 2): 0.93, ("2x1x1", 2): 1.05,
    ("1x1x1", 7): 2.44, ("1x2x1", 7): 1.62, ("1x1x2", 7): 1.34, ("2x1x1", 7): 1.40,
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "adapters"), MEASURED_ON_HOST)
def test_the_host_launches_adapters_in_about_the_time_that_was_measured(mesh, adapters):
    layout = Layout(MeshShape.parse(mesh), micro_batch=2)
    cluster, targets = Cluster.parse(f"{layout.ranks}xH100"), PAIR if adapters == 2 else "all-linear"

    def layer_s(trunk, tokens, **software):
        described = llama_8b(trunk)
        assert described.layers[0].updates == (0 if trunk is None else adapters)
        software = replace(cuboid_software(layout), **software)
        units = StepCost(described, layout, cluster, tokens, software).units
        parts = (units.layer_forward, units.layer_backward)
        return sum(part(described.layers[0], 0, tokens).total for part in parts)

    ratio = layer_s(frozen(8, targets), 64) / layer_s(None, 64)
    assert ratio == pytest.approx(MEASURED_ON_HOST[mesh, adapters], rel=0.3)
    # The device hides it where there is more to compute.
    assert layer_s(frozen(8, targets), 1 << 17) == layer_s(frozen(8, targets), 1 << 17, host_update_s=0.0)


def test_only_adapters_of_a_split_backward_wait_for_nothing():
    described = llama_8b(frozen(16))
    layout = Layout(MeshShape(1, 2, 1), 2, 1, 8, segments=2, schedule="zero_bubble")
    cost = StepCost(described, layout, Cluster.parse("4xH100"), 8192)
    _, later = cost.units.layer_split_backward(described.layers[0], 0, 4096)
    assert later.total == 0


@pytest.mark.ci
def test_a_search_has_room_for_adapters_where_a_full_training_moves_its_optimizer_to_the_host():
    cluster = Cluster.parse("1xH100-80GB")
    full, lora, packed = (
        search(llama_8b(trunk), cluster, 4096, 4, count=1).best[0]
        for trunk in (None, frozen(16), frozen(16, four_bits=True))
    )
    assert full.layout.optimizer_on_host
    assert not lora.layout.optimizer_on_host
    assert lora.time.total_s < 0.7 * full.time.total_s
    assert packed.memory_bytes < lora.memory_bytes


def test_rows_of_four_bits_are_cut_between_scales_only():
    described = described_small("llama", frozen(four_bits=True), hidden_size=384, intermediate_size=768, head_dim=32)
    assert described.limits.reason_against(MeshShape(1, 2, 2)) is None
    assert "96 of 384 elements, and 64 neighbours share a scale" in described.limits.reason_against(MeshShape(1, 1, 4))


def test_refusals():
    with pytest.raises(ConfigError, match=r"LoRA of rank 4 on nothing: .*nothing"):
        described_small("llama", frozen(targets=("nothing",)))
    with pytest.raises(ConfigError, match="embed_tokens is one of the adapter's target_modules"):
        described_small("llama", frozen(targets=("q_proj", "embed_tokens")))
    described = described_small("llama", frozen(four_bits=True), hidden_size=384, intermediate_size=768, head_dim=32)
    for key in ("compiled", "fp8_min_dimension"):
        layout = Layout(MeshShape(), **{key: 1})
        with pytest.raises(ConfigError, match=r"tensor_parallel\.(compile|fp8) has no rule for weights of 4 bits"):
            estimate(described, layout, Cluster.parse("1xH100"), 512)


def test_blocks_that_are_computed_whole_are_kept_in_4_bits_too():
    half, packed = (
        described_small("phi3", frozen(four_bits=bits), hidden_size=384, intermediate_size=768, head_dim=32)
        for bits in (False, True)
    )
    cluster, layout = Cluster.parse("2xH100"), Layout(MeshShape(2, 1, 1), micro_batch=2)
    held = [estimate(described, layout, cluster, 512).stages[0].parameters for described in (half, packed)]
    kept = sum(layer.quantized for layer in packed.layers) // 2
    assert held[0] - held[1] == pytest.approx((2 - QUANTIZED_BYTES) * kept, rel=0.01)


def test_adapters_that_come_later_are_left_out():
    trunk = Trunk(LaterAdapters(), four_bits=True)
    described = described_small("llama", trunk, hidden_size=384, intermediate_size=768, head_dim=32)
    assert described.trained_parameters == 0
    one = estimate(described, Layout(MeshShape(1, 2, 1)), Cluster.parse("2xH100"), 512)
    assert one.stages[0].gradients == one.stages[0].optimizer == 0
    assert "adapters, which aren't counted" in str(trunk)
