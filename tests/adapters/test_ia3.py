"""IA³ by PEFT: vectors that features are multiplied with have plain PEFT's gradients, on meshes and in stages."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, assert_losses, assert_step, batch, built, in_both
from test_lora_stages import Staged, assert_as_plain
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import IA3Config, PeftModel, get_peft_model

LLAMA = {"target_modules": ["k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
GPT2 = {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}


def scaled(model, **options):
    torch.manual_seed(7)
    return get_peft_model(model, IA3Config(**{**LLAMA, "init_ia3_weights": False, **options}))


class Scaled(Adapted):
    def __init__(self, model, mesh, **options):
        Threaded.__init__(self, model, mesh)
        self.models = [scaled(rank_model, **options) for rank_model in self.models]


CASES = [
    ("llama", {"kv_heads": 2}, "1x2x1", {}),
    ("llama", {"kv_heads": 2}, "1x1x2", {}),
    ("llama", {"kv_heads": 2}, "2x1x1", {}),
    ("llama", {"kv_heads": 2}, "2x2x2", {}),
    ("qwen2", {"kv_heads": 1}, "1x2x2", {}),
    ("gpt2", {}, "3x1x2", GPT2),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "sizes", "mesh", "options"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, sizes, mesh, options):
    model, micro_batch = built(architecture, **sizes), batch(rows=6)
    plain, threaded = scaled(copy.deepcopy(model), **options), Scaled(model, mesh, **options)
    assert_step(plain, threaded, micro_batch)


@pytest.mark.parametrize(("architecture", "options"), [("qwen2", {}), ("gpt2", GPT2)])
def test_vectors_are_disabled_merged_and_unloaded(architecture, options):
    model = built(architecture)
    plain, threaded = scaled(copy.deepcopy(model), **options), Scaled(model, "1x2x2", **options)
    first = assert_losses(plain, threaded)
    both = in_both(plain, threaded)
    disabled = both(lambda peft_model: peft_model.base_model.disable_adapter_layers())
    assert abs(disabled - first) > 1e-4
    both(lambda peft_model: peft_model.base_model.enable_adapter_layers())
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    # PEFT adds 1e-8 to what it divides by.
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-4)
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("1x2x1", (8, 4))])
def test_gradients_in_segments(tmp_path, mesh, lengths):
    model, micro_batch = built("llama", kv_heads=2), batch()
    micro_batch["labels"][:, -1] = -100
    assert_as_plain(model, scaled(copy.deepcopy(model)), Staged(model, mesh), micro_batch, lengths, tmp_path)


@pytest.mark.parametrize("name", ["up_proj", "q_proj", "embed_tokens", "lm_head"])
def test_what_has_no_rule_is_refused_by_name(name):
    model = Threaded(built("llama", kv_heads=2), "1x2x1").models[0]
    feedforward = [name] if name.endswith("proj") else []
    with pytest.raises(UnsupportedModelError, match=rf"IA3Config.*{name}|{name}.*IA3Config"):
        scaled(model, target_modules=[name], feedforward_modules=feedforward)


def saved_by_ranks(start, folder):
    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = scaled(on("1x2x1")), on("2x1x1")
    with precision(keep_float64=True):
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**batch()).logits.detach() for either in (model, read)]


def test_they_are_in_pefts_folder(pool, tmp_path):
    model = built("llama", kv_heads=2).eval()
    model.save_pretrained(tmp_path / "start")
    results = pool.run(2, saved_by_ranks, tmp_path / "start", tmp_path / "adapter", timeout_s=TIMEOUT_S)
    scaled(copy.deepcopy(model)).save_pretrained(tmp_path / "plain")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert saved.keys() == expected.keys()
    plain = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad(), KeepFloat64():
        logits = plain(**batch()).logits
    for rank_logits in results:
        for either in rank_logits:
            torch.testing.assert_close(either, logits, rtol=1e-9, atol=1e-9)
