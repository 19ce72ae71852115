"""LoRA of what isn't a sharded linear layer: experts, routers, and layers of blocks that each rank computes whole."""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file
from test_dora import Read
from test_dora import adapted as decomposed
from test_lora import (
    Adapted,
    adapted,
    assert_losses,
    assert_step,
    assert_switched_and_merged,
    batch,
    inner_names,
    sent_for_gradients,
)
from test_lora_stages import Staged, assert_as_plain
from torch import nn
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.verify import SmallModel
from small_layers import CHECKPOINTING, mixture
from threaded import Threaded, step_of

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel, get_peft_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: PEFT takes experts and routers for the linear layers that they were in older transformers.
ALL = {"target_modules": "all-linear", "target_parameters": None}


def adapted_experts(model, **options):
    torch.manual_seed(7)
    options = {"r": 3, "init_lora_weights": False, "target_modules": ["q_proj"], **options}
    return get_peft_model(model, LoraConfig(**{"target_parameters": EXPERTS, **options}))


class AdaptedExperts(Adapted):
    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh)
        self.models = [adapted_experts(rank_model, **options) for rank_model in self.models]


EXPERT_CASES = [
    ("qwen3_moe", "1x2x1", {}),
    ("mixtral", "1x1x2", {"target_parameters": EXPERTS[:1], "target_modules": []}),
    ("gpt_oss", "2x1x1", {}),
    ("qwen3_moe", "2x2x2", {"use_rslora": True}),
    ("gpt_oss", "1x2x2", {"target_parameters": EXPERTS[1:]}),
    ("deepseek_v3", "3x1x2", {"target_modules": ["o_proj"]}),
    ("qwen3_moe", "1x2x2", ALL),
    ("deepseek_v3", "2x1x1", ALL),
    ("mixtral", "1x2x1", {"target_modules": ["q_proj", "gate", "w1", "w2", "w3"], "target_parameters": None}),
    ("gpt_oss", "1x1x2", {"target_parameters": ["mlp.router.weight", *EXPERTS[:1]]}),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "mesh", "options"), EXPERT_CASES)
def test_experts_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, options):
    assert_as_plain_peft(mixture(architecture), mesh, **options)


def test_activation_checkpointing_changes_nothing():
    model = mixture("qwen3_moe")
    model.gradient_checkpointing_enable(CHECKPOINTING)
    model.enable_input_require_grads()
    assert_as_plain_peft(model, "1x2x1")


def test_gradients_of_the_factors_are_sent_and_none_of_the_experts_weights():
    threaded = AdaptedExperts(mixture("qwen3_moe"), "2x1x1")
    threaded.run(step_of(**batch(rows=6, vocabulary=61)))
    mesh, inner = threaded.ranks.meshes[0], threaded.models[0].get_base_model()
    sent = sent_for_gradients(mesh)
    # Each rank sends the blocks of the factors' gradients, of which two ranks keep a half each.
    assert sent == sum(2 * p.nbytes for name, p in inner.named_parameters() if ".lora_" in name)


def assert_as_plain_peft(model, mesh, **options):
    micro_batch = batch(rows=6, vocabulary=61)
    plain, threaded = adapted_experts(copy.deepcopy(model), **options), AdaptedExperts(model, mesh, **options)
    assert any("experts" in name for name in assert_step(plain, threaded, micro_batch))


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("architecture", "options"), [("qwen3_moe", ALL), ("gpt_oss", {})])
def test_experts_are_disabled_merged_and_unloaded(architecture, options):
    model = mixture(architecture)
    plain, threaded = adapted_experts(copy.deepcopy(model), **options), AdaptedExperts(model, "1x2x2", **options)
    assert_switched_and_merged(plain, threaded, batch(vocabulary=61))


@pytest.mark.parametrize(("mesh", "lengths", "options"), [("1x1x1", (5, 4, 3), {}), ("1x2x1", (8, 4), ALL)])
def test_experts_gradients_in_segments(tmp_path, mesh, lengths, options):
    model, micro_batch = mixture("qwen3_moe"), batch(vocabulary=61)
    micro_batch["labels"][:, -1] = -100
    plain = adapted_experts(copy.deepcopy(model), **options)
    trained = assert_as_plain(model, plain, Staged(model, mesh), micro_batch, lengths, tmp_path)
    assert any("experts" in name for name in trained)


@pytest.mark.parametrize("name", ["input_layernorm.weight", "self_attn.q_norm.weight"])
def test_other_parameters_are_refused_by_name(name):
    model = Threaded(mixture("qwen3_moe"), "1x2x1").models[0]
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(UnsupportedModelError, match=rf"target_parameters=.*{re.escape(name)}"):
        adapted_experts(model, target_parameters=[name])
    assert [name for name, _ in model.named_modules()] == before


def saved_by_ranks(start, folder, options, micro_batch):
    """Logits of each rank's model with an adapter, and of one on another mesh that has read its folder."""

    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        model.config._experts_implementation = "eager"  # grouped products have no float64
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = adapted_experts(on("1x2x1"), **options), on("2x1x1")
    with precision(keep_float64=True):
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**micro_batch).logits.detach() for either in (model, read)]


def assert_in_pefts_folder(pool, folder, model, options, micro_batch):
    """A folder that ranks have written has the tensors of plain PEFT's, which reads it, as other ranks do."""
    model.save_pretrained(folder / "start")
    arguments = folder / "start", folder / "adapter", options, micro_batch
    results = pool.run(2, saved_by_ranks, *arguments, timeout_s=TIMEOUT_S)
    adapted_experts(copy.deepcopy(model), **options).save_pretrained(folder / "plain")
    saved, expected = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert saved.keys() == expected.keys()
    plain = PeftModel.from_pretrained(model, folder / "adapter")
    with torch.no_grad(), KeepFloat64():
        logits = plain(**micro_batch).logits
    for rank_logits in results:
        for either in rank_logits:
            torch.testing.assert_close(either, logits, rtol=1e-9, atol=1e-9)


def test_experts_are_in_pefts_folder(pool, tmp_path):
    assert_in_pefts_folder(pool, tmp_path, mixture("qwen3_moe", pad_token_id=0).eval(), ALL, batch(vocabulary=61))


LINEAR = {"target_modules": "all-linear"}


def built(architecture):
    torch.manual_seed(0)
    config = SmallModel.fitting(architecture, 8, layers=2).config()
    config._experts_implementation = "eager"  # grouped products have no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def micro_batch(model):
    """Without padding, with which not all types are right on a mesh."""
    ids = batch(vocabulary=model.config.vocab_size)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


class AdaptedBlocks(Adapted):
    """A model on a mesh as its type's verdict says, with an adapter."""

    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh, mesh_verdict(type(model), model.config))
        self.models = [adapted(rank_model, **options) for rank_model in self.models]


CASES = [
    ("phi3", "1x2x2", {"bias": "all"}),
    ("falcon", "2x1x2", {"lora_bias": True}),
    ("jamba", "1x2x1", {"use_rslora": True}),
    ("qwen2_moe", "2x2x2", {"target_modules": ["shared_expert_gate", "down_proj"]}),
]
OTHERS = (
    *("apertus", "bamba", "biogpt", "bloom", "codegen", "diffllama", "gpt_bigcode", "gpt_neo", "lfm2"),
    *("minimax", "modernbert-decoder", "mpt", "phi3"),
)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("architecture", "mesh", "options"),
    [
        *CASES,
        *(
            pytest.param(architecture, mesh, {"r": 5}, marks=pytest.mark.slow)
            for architecture in OTHERS
            for mesh in ("1x2x1", "1x1x2", "2x1x1", "2x2x2")
        ),
    ],
)
def test_blocks_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, options):
    model, options = built(architecture), {**LINEAR, **options}
    plain, threaded = adapted(copy.deepcopy(model), **options), AdaptedBlocks(model, mesh, **options)
    if architecture == "jamba":
        # Its code reads this weight without calling the layer: the adapter has no effect, nor a gradient.
        for name, parameter in inner_names(plain).items():
            parameter.requires_grad_(parameter.requires_grad and ".dt_proj." not in name)
    assert any(".lora_B." in name for name in assert_step(plain, threaded, micro_batch(model)))


def test_frozen_weights_of_a_block_have_no_gradients_and_send_none():
    model = built("phi3")
    sent = []
    for trains in (True, False):
        threaded = Threaded(model, "2x1x1", mesh_verdict(type(model), model.config))
        for rank_model in threaded.models:
            rank_model.requires_grad_(trains)
            rank_model.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
        threaded.run(lambda rank_model: rank_model(**micro_batch(model), use_cache=False).loss.backward())
        named = dict(threaded.models[0].named_parameters())
        assert {name for name, x in named.items() if x.grad is not None} == {
            name for name, x in named.items() if x.requires_grad
        }
        sent.append(sum(threaded.ranks.meshes[0].comm_counter.snapshot().values()))
    # Forward and backward gather the weights in both; only gradients of trained weights are sent.
    gradients = sum(x.numel() for x in model.parameters()) - model.model.layers[0].self_attn.o_proj.weight.numel()
    assert sent[0] - sent[1] >= 0.9 * gradients * 8 / 2


def test_blocks_adapters_are_disabled_merged_and_unloaded():
    model = built("phi3")
    plain, threaded = adapted(copy.deepcopy(model), **LINEAR), AdaptedBlocks(model, "1x2x2", **LINEAR)
    assert_switched_and_merged(plain, threaded, micro_batch(model))


@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("1x2x1", (8, 4))])
def test_blocks_gradients_in_segments(tmp_path, mesh, lengths):
    model = built("phi3")
    data = micro_batch(model)
    data["labels"][:, -1] = -100
    staged = Staged(model, mesh, verdict=mesh_verdict(type(model), model.config))
    assert_as_plain(model, adapted(copy.deepcopy(model), **LINEAR), staged, data, lengths, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize(("architecture", "mesh"), [("phi3", "1x2x2"), ("falcon", "2x2x1")])
def test_dora_in_blocks(tmp_path, architecture, mesh):
    model = built(architecture)
    plain = decomposed(copy.deepcopy(model), **LINEAR)
    plain.save_pretrained(tmp_path)
    read = Read.__new__(Read)
    Threaded.__init__(read, model, mesh, mesh_verdict(type(model), model.config))
    read.models = [PeftModel.from_pretrained(rank_model, tmp_path, is_trainable=True) for rank_model in read.models]
    assert any("lora_magnitude_vector" in name for name in assert_step(plain, read, micro_batch(model)))
    assert_switched_and_merged(plain, read, micro_batch(model))


def test_a_new_dora_in_blocks_changes_nothing():
    model = built("phi3")
    threaded = Threaded(model, "1x2x2", mesh_verdict(type(model), model.config))
    options = {"use_dora": True, "init_lora_weights": True, **LINEAR}
    plain = adapted(copy.deepcopy(model), **options)
    torch.manual_seed(7)
    config = copy.deepcopy(plain.peft_config["default"])
    threaded.models = threaded.run(lambda rank_model: get_peft_model(rank_model, copy.deepcopy(config)))
    magnitudes = Adapted.whole(threaded, lambda parameter: parameter.detach())
    for name, parameter in inner_names(plain).items():
        if "lora_magnitude_vector" in name:
            torch.testing.assert_close(magnitudes[name], parameter, rtol=1e-12, atol=0)
    assert_losses(plain, threaded, micro_batch(model))


def test_gates_of_shared_experts_are_switched_and_merged_and_not_decomposed():
    model, targets = built("qwen2_moe"), {"target_modules": ["shared_expert_gate"], "lora_alpha": 60}
    plain, threaded = adapted(copy.deepcopy(model), **targets), AdaptedBlocks(model, "1x2x2", **targets)
    assert_switched_and_merged(plain, threaded, micro_batch(model))
    with pytest.raises(UnsupportedModelError, match=r"shared_expert_gate .*\(without DoRA"):
        AdaptedBlocks(model, "1x2x1", use_dora=True, **targets)


@pytest.mark.ci
def test_blocks_are_in_pefts_folder(pool, tmp_path):
    model = built("phi3").eval()
    assert_in_pefts_folder(pool, tmp_path, model, {**LINEAR, "target_parameters": None}, micro_batch(model))
