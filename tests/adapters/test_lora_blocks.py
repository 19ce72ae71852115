"""LoRA on linear layers of blocks that each rank computes whole: as plain PEFT's, on meshes and in stages."""

import copy

import pytest
import torch
from test_dora import Read
from test_dora import adapted as decomposed
from test_lora import Adapted, adapted, assert_losses, assert_step, assert_switched_and_merged, batch, inner_names
from test_lora_experts import assert_in_pefts_folder
from test_lora_stages import Staged, assert_as_plain
from torch import nn
from transformers import AutoModelForCausalLM

from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.verify import SmallModel
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import PeftModel, get_peft_model

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
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, options):
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
def test_gradients_in_segments(tmp_path, mesh, lengths):
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
def test_they_are_in_pefts_folder(pool, tmp_path):
    model = built("phi3").eval()
    assert_in_pefts_folder(pool, tmp_path, model, {**LINEAR, "target_parameters": None}, micro_batch(model))
