"""Attention of other kinds than Llama's on a mesh: the same loss and gradients as on one process."""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.roles import blocks_computed_whole, find_roles
from cuboid.models.batch.local_batch import take_local_batch
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from small_layers import CHECKPOINTING, EXPERTS, LATENT
from small_layers import with_attention as small
from threaded import Threaded, assert_as_alone, sent_by_last_layer, step_of

#: Query heads and key/value heads, of which the latter divide by no, by some or by all of the meshes' ranks.
HEADS = [(12, 12), (12, 6), (12, 3), (12, 1)]


def batch_of(rows=2, length=8):
    ids = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


@pytest.mark.sample(4)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "1x2x2", "2x1x2", "1x3x1"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("architecture", ["olmo2", "minimax_m2"])
def test_norms_over_all_heads(architecture, heads, mesh):
    options = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    if architecture == "minimax_m2":
        options |= {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}
    model, batch = small(architecture, **options), batch_of()
    threaded = assert_as_alone(model, mesh, step_of(**batch))
    assert not blocks_computed_whole(model)
    # Each has its own share of the norms' weights too.
    local_count = sum(p.numel() for name, p in threaded.models[0].named_parameters() if name.endswith("_norm.weight"))
    total_count = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_norm.weight"))
    assert local_count == pytest.approx(total_count / threaded.plan.mesh.size, rel=0.35)


def test_sequences_are_not_filled_beyond_the_masks_that_layers_keep():
    sizes = {"hidden_size": 48, "num_heads": 3, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    config = AutoConfig.for_model("gpt_neo", **sizes, vocab_size=61, window_size=3, max_position_embeddings=8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    verdict, ids = MeshVerdict(splits_late=True), batch_of()["input_ids"]
    threaded = assert_as_alone(model, "1x3x1", step_of(input_ids=ids[:, :6], labels=ids[:, :6]), verdict)
    with pytest.raises(CuboidError, match=r"8 tokens, which are filled up to 9 .* has masks of 8 positions"):
        threaded.run(step_of(input_ids=ids, labels=ids))


def test_sequences_are_not_filled_beyond_a_table_that_the_model_counts_in():
    # The vocabulary is about as large as the table of positions, and begins behind none of its rows.
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    tokens = {"vocab_size": 13, "pad_token_id": 11, "decoder_start_token_id": 2, "eos_token_id": 3}
    config = AutoConfig.for_model("bart", **sizes, **heads, **tokens, d_model=48, max_position_embeddings=8)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).eval()
    verdict, ids = MeshVerdict(inputs="only ids", splits_late=True), batch_of()["input_ids"] % 11
    step = step_of(input_ids=ids[:, :6], labels=ids[:, :5].contiguous())
    threaded = assert_as_alone(model, "1x3x1", step, verdict)
    for source, target in ((8, 6), (6, 8)):
        with pytest.raises(CuboidError, match=r"8 tokens, which are filled up to 9 .* has a table of 8 positions"):
            threaded.run(step_of(input_ids=ids[:, :source], labels=ids[:, :target].contiguous()))


def test_nor_is_a_decoder_alone_that_counts_by_itself():
    tokens = {"vocab_size": 61, "pad_token_id": 1, "max_position_embeddings": 8}
    sizes = {"d_model": 48, "decoder_layers": 1, "decoder_attention_heads": 3, "encoder_attention_heads": 3}
    config = AutoConfig.for_model("mbart", **tokens, **sizes, decoder_ffn_dim=48, is_decoder=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    verdict, ids = MeshVerdict(splits_late=True, gathers_logits=True), batch_of()["input_ids"]
    threaded = assert_as_alone(model, "1x3x1", step_of(input_ids=ids[:, :6], labels=ids[:, :6].contiguous()), verdict)
    with pytest.raises(CuboidError, match=r"8 tokens, which are filled up to 9 .* has a table of 8 positions"):
        threaded.run(step_of(input_ids=ids, labels=ids))


LONGER = {"long_factor": [4.0, 3.0], "short_factor": [1.0, 1.2], "original_max_position_embeddings": 8, "factor": 2.0}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **LONGER}])
@pytest.mark.parametrize(
    ("mesh", "packed"),
    [
        # One rank's rows have a longer sequence than the other's.
        ("2x1x1", [(8, 7), (15,)]),
        ("2x1x2", [(15,), (8, 7)]),
        # No sequence is too long for the short factors, unless it is counted on in what fills the row up.
        ("1x3x1", [(5, 8), (5, 8)]),
    ],
)
def test_rotary_embeddings_that_look_at_the_highest_position_of_all_rows(mesh, packed, rope):
    positions = torch.stack([torch.cat([torch.arange(count) for count in row]) for row in packed])
    ids = batch_of(length=positions.shape[1])["input_ids"]
    options = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 8}
    model = small("llama", rope_parameters={**rope, "rope_theta": 100.0}, **options)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    assert_as_alone(model, mesh, step_of(**batch))
    if packed[0] != packed[1]:
        # A pipeline records rotary embeddings of a rank's own rows.
        rank = ThreadRanks(MeshShape.parse(mesh)).meshes[0]
        with pytest.raises(
            UnsupportedModelError, match=r"position_ids reach 14 in some rows, but only 7 .* type (dynamic|longrope) "
        ):
            take_local_batch(batch, model.config, rank, at_least=16)


@pytest.mark.parametrize("mesh", ["1x2x2", pytest.param("2x1x2", marks=pytest.mark.slow)])
def test_sinks(mesh):
    options = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "layer_types": None}
    model = small("gpt_oss", **options, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    threaded = assert_as_alone(model, mesh, step_of(**batch_of()))
    assert not blocks_computed_whole(model)
    attention = threaded.models[0].model.layers[0].self_attn
    assert attention.sinks.numel() == 8 // threaded.plan.mesh.size
    # Under activation checkpointing, the forward that repeats it needs the rank's own heads too.
    model.gradient_checkpointing_enable(CHECKPOINTING)
    assert_as_alone(model, mesh, step_of(**batch_of()))


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "1x2x2", "2x2x1", "1x4x2"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("deepseek_v3", {**LATENT, **EXPERTS, "first_k_dense_replace": 1}),
        ("deepseek_v3", {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "attention_bias": True}),
        # Queries without latents.
        ("deepseek_v2", {**LATENT, **EXPERTS, "first_k_dense_replace": 2, "q_lora_rank": None}),
        ("minicpm3", LATENT),
    ],
    ids=["deepseek_v3", "biases", "deepseek_v2", "minicpm3"],
)
def test_latents(architecture, options, mesh):
    model, batch = small(architecture, **options), batch_of()
    assert not blocks_computed_whole(model)
    assert_as_alone(model, mesh, step_of(**batch))


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2", "3x1x2"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 3, "attention_bias": True}),
        ("deepseek_v3", {"first_k_dense_replace": 0}),
        ("deepseek_v2", {"first_k_dense_replace": 3, "q_lora_rank": None}),
        ("minicpm3", {}),
    ],
    ids=["biases", "experts", "whole queries", "minicpm3"],
)
def test_counted_bytes_of_latents_are_the_formula(architecture, options, mesh):
    shape, rows, length = MeshShape.parse(mesh), 6, 8
    # What three ranks divide, but for latents and experts.
    sizes = LATENT | {"num_attention_heads": 12, "num_key_value_heads": 12}
    sizes |= EXPERTS if architecture != "minicpm3" else {}

    def model_of(layers):
        return small(architecture, **{**sizes, **options, "num_hidden_layers": layers}).float()

    model, sent = model_of(3), sent_by_last_layer(model_of, mesh, step_of(**batch_of(rows, length)))
    expected = layer_bytes(block_sizes(describe_modules(model), shape), shape, rows, length, element_bytes=4)
    for of_layer in sent:
        # Each collective's share is rounded to a whole byte.
        assert of_layer == {axes: pytest.approx(count, abs=40) for axes, count in expected.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x1"])
@pytest.mark.parametrize("lora_rank", [14, None], ids=["latent queries", "whole queries"])
def test_a_forward_without_backward_leaves_no_tensors(lora_rank, mesh):
    options = {**LATENT, **EXPERTS, "first_k_dense_replace": 2, "q_lora_rank": lora_rank}
    threaded, batch = Threaded(small("deepseek_v2", **options), mesh), batch_of()
    counts = []
    for _ in range(3):
        threaded.run(lambda model: model(**batch, use_cache=False).loss.item())
        gc.collect()
        counts.append(sum(issubclass(type(candidate), torch.Tensor) for candidate in gc.get_objects()))
    assert counts[1] == counts[2]


@pytest.mark.slow
def test_latents_under_activation_checkpointing():
    model = small("deepseek_v3", **LATENT, **EXPERTS, first_k_dense_replace=1)
    model.gradient_checkpointing_enable(CHECKPOINTING)
    assert_as_alone(model, "1x2x2", step_of(**batch_of()))


@pytest.mark.ci
@pytest.mark.parametrize("mesh", ["1x2x2", pytest.param("1x2x1", marks=pytest.mark.slow)])
def test_a_layer_with_other_numbers_of_heads_than_the_config_is_computed_whole(mesh):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_attention_heads_per_layer": [4, 8], "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = small("laguna", **heads, **experts, shared_expert_intermediate_size=24, attn_implementation="eager")
    computed_whole = {name for name, role in find_roles(model).items() if role.kind == "whole"}
    assert computed_whole == {"model.layers.1.self_attn"}
    assert_as_alone(model, mesh, step_of(**batch_of()))
