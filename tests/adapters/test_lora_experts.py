"""LoRA on the weights of experts and routers (``target_parameters``): as plain PEFT's, on meshes and in stages."""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, assert_step, assert_switched_and_merged, batch, sent_for_gradients
from test_lora_stages import Staged, assert_as_plain
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from small_layers import CHECKPOINTING
from small_layers import mixture as small
from threaded import Threaded, step_of

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel, get_peft_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: PEFT takes experts and routers for the linear layers that they were in older transformers.
ALL = {"target_modules": "all-linear", "target_parameters": None}


def adapted(model, **options):
    torch.manual_seed(7)
    options = {"r": 3, "init_lora_weights": False, "target_modules": ["q_proj"], **options}
    return get_peft_model(model, LoraConfig(**{"target_parameters": EXPERTS, **options}))


class AdaptedExperts(Adapted):
    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh)
        self.models = [adapted(rank_model, **options) for rank_model in self.models]


CASES = [
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
@pytest.mark.parametrize(("architecture", "mesh", "options"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, options):
    assert_as_plain_peft(small(architecture), mesh, **options)


def test_activation_checkpointing_changes_nothing():
    model = small("qwen3_moe")
    model.gradient_checkpointing_enable(CHECKPOINTING)
    model.enable_input_require_grads()
    assert_as_plain_peft(model, "1x2x1")


def test_gradients_of_the_factors_are_sent_and_none_of_the_experts_weights():
    threaded = AdaptedExperts(small("qwen3_moe"), "2x1x1")
    threaded.run(step_of(**batch(rows=6, vocabulary=61)))
    mesh, inner = threaded.ranks.meshes[0], threaded.models[0].get_base_model()
    sent = sent_for_gradients(mesh)
    # Each rank sends the blocks of the factors' gradients, of which two ranks keep a half each.
    assert sent == sum(2 * p.nbytes for name, p in inner.named_parameters() if ".lora_" in name)


def assert_as_plain_peft(model, mesh, **options):
    micro_batch = batch(rows=6, vocabulary=61)
    plain, threaded = adapted(copy.deepcopy(model), **options), AdaptedExperts(model, mesh, **options)
    assert any("experts" in name for name in assert_step(plain, threaded, micro_batch))


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("architecture", "options"), [("qwen3_moe", ALL), ("gpt_oss", {})])
def test_experts_are_disabled_merged_and_unloaded(architecture, options):
    model = small(architecture)
    plain, threaded = adapted(copy.deepcopy(model), **options), AdaptedExperts(model, "1x2x2", **options)
    assert_switched_and_merged(plain, threaded, batch(vocabulary=61))


@pytest.mark.parametrize(("mesh", "lengths", "options"), [("1x1x1", (5, 4, 3), {}), ("1x2x1", (8, 4), ALL)])
def test_gradients_in_segments(tmp_path, mesh, lengths, options):
    model, micro_batch = small("qwen3_moe"), batch(vocabulary=61)
    micro_batch["labels"][:, -1] = -100
    plain = adapted(copy.deepcopy(model), **options)
    trained = assert_as_plain(model, plain, Staged(model, mesh), micro_batch, lengths, tmp_path)
    assert any("experts" in name for name in trained)


@pytest.mark.parametrize("name", ["input_layernorm.weight", "self_attn.q_norm.weight"])
def test_other_parameters_are_refused_by_name(name):
    model = Threaded(small("qwen3_moe"), "1x2x1").models[0]
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(UnsupportedModelError, match=rf"target_parameters=.*{re.escape(name)}"):
        adapted(model, target_parameters=[name])
    assert [name for name, _ in model.named_modules()] == before


def saved_by_ranks(start, folder, options, micro_batch):
    """Logits of each rank's model with an adapter, and of one on another mesh that has read its folder."""

    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        model.config._experts_implementation = "eager"  # grouped products have no float64
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = adapted(on("1x2x1"), **options), on("2x1x1")
    with precision(keep_float64=True):
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**micro_batch).logits.detach() for either in (model, read)]


def assert_in_pefts_folder(pool, folder, model, options, micro_batch):
    """A folder that ranks have written has the tensors of plain PEFT's, which reads it, as other ranks do."""
    model.save_pretrained(folder / "start")
    arguments = folder / "start", folder / "adapter", options, micro_batch
    results = pool.run(2, saved_by_ranks, *arguments, timeout_s=TIMEOUT_S)
    adapted(copy.deepcopy(model), **options).save_pretrained(folder / "plain")
    saved, expected = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert saved.keys() == expected.keys()
    plain = PeftModel.from_pretrained(model, folder / "adapter")
    with torch.no_grad(), KeepFloat64():
        logits = plain(**micro_batch).logits
    for rank_logits in results:
        for either in rank_logits:
            torch.testing.assert_close(either, logits, rtol=1e-9, atol=1e-9)


def test_they_are_in_pefts_folder(pool, tmp_path):
    assert_in_pefts_folder(pool, tmp_path, small("qwen3_moe").eval(), ALL, batch(vocabulary=61))
