"""DoRA by PEFT on meshes and in pipelines: gradients, initial magnitudes, PEFT's folder, merging."""

import copy
import re

import pytest
import torch
from test_lora import DENSE, LATENTS, Adapted, assert_losses, assert_step, batch, built, inner_names
from test_lora import adapted as lora_adapted
from test_lora_dtypes import Expected
from test_lora_stages import Staged, assert_as_plain

from cuboid.errors import MeshError, UnsupportedModelError
from small_layers import LATENT
from small_layers import with_attention as latent_model
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel, get_peft_model


def adapted(model, **options):
    """Plain PEFT's, with magnitudes that aren't the norms."""
    plain = lora_adapted(model, use_dora=True, **options)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter *= torch.linspace(0.5, 1.5, len(parameter))
    return plain


class Read(Adapted):
    """A model on a mesh, with an adapter from a folder."""

    def __init__(self, model, mesh, folder):
        Threaded.__init__(self, model, mesh)
        self.models = [PeftModel.from_pretrained(rank_model, folder, is_trainable=True) for rank_model in self.models]


CASES = [
    ("llama", {"kv_heads": 2}, "1x2x1", {"target_modules": "all-linear"}),
    ("llama", {"kv_heads": 2}, "1x1x2", {"use_rslora": True}),
    ("llama", {"kv_heads": 2}, "2x1x1", {"target_modules": ["q_proj", "down_proj"]}),
    ("qwen2", {"kv_heads": 2}, "2x2x2", {"bias": "all", "r": 5}),
    ("llama", {"kv_heads": 1}, "1x2x2", {}),
    ("gpt2", {}, "1x2x2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    ("deepseek_v3", None, "2x2x1", {"target_modules": LATENTS}),
]


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(("architecture", "sizes", "mesh", "options"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(tmp_path, architecture, sizes, mesh, options):
    model = latent_model(architecture, **LATENT) if sizes is None else built(architecture, **sizes)
    micro_batch = batch(vocabulary=model.config.vocab_size)
    plain = adapted(copy.deepcopy(model), **options)
    plain.save_pretrained(tmp_path)
    threaded = Read(model, mesh, tmp_path)
    trained = assert_step(plain, threaded, micro_batch)
    assert any("lora_magnitude_vector" in name for name in trained)
    # Every element has one owner; those of few latents are padded.
    owned = sum(x.numel() for rank in threaded.models for name, x in rank.named_parameters() if "magnitude" in name)
    elements = sum(gradient.numel() for name, gradient in trained.items() if "magnitude" in name)
    assert owned == elements or architecture == "deepseek_v3"


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
def test_gradients_in_segments(tmp_path, mesh):
    model, micro_batch = built("llama", kv_heads=2), batch()
    micro_batch["labels"][:, -1] = -100
    trained = assert_as_plain(model, adapted(copy.deepcopy(model)), Staged(model, mesh), micro_batch, (8, 4), tmp_path)
    assert any("lora_magnitude_vector" in name for name in trained)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_new_adapter_begins_with_the_norms_and_changes_nothing(architecture):
    model = built(architecture)
    targets = ["c_attn", "c_proj"] if architecture == "gpt2" else DENSE
    config = LoraConfig(use_dora=True, target_modules=targets)
    plain, threaded = get_peft_model(copy.deepcopy(model), copy.deepcopy(config)), Threaded(model, "1x2x2")

    def with_adapter(rank_model):
        torch.manual_seed(7)
        return get_peft_model(rank_model, copy.deepcopy(config))

    threaded.models = threaded.run(with_adapter)
    magnitudes = Adapted.whole(threaded, lambda parameter: parameter.detach())
    for name, parameter in inner_names(plain).items():
        if "lora_magnitude_vector" in name:
            torch.testing.assert_close(magnitudes[name], parameter, rtol=1e-12, atol=0)
    loss = assert_losses(plain, threaded)
    with plain.disable_adapter():
        assert loss == pytest.approx(float(plain(**batch(), use_cache=False).loss), rel=1e-6)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_merged_is_unmerged(tmp_path, architecture):
    targets = ["c_attn", "c_proj"] if architecture == "gpt2" else DENSE
    model = built(architecture)
    plain = adapted(copy.deepcopy(model), target_modules=targets)
    plain.save_pretrained(tmp_path)
    threaded = Read(model, "2x2x1", tmp_path)
    first = assert_losses(plain, threaded)
    before = threaded.whole(lambda parameter: parameter.detach().clone())
    threaded.run(lambda rank_model: rank_model.merge_adapter())
    plain.merge_adapter()
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-9)
    for name, merged in threaded.whole(lambda parameter: parameter.detach()).items():
        torch.testing.assert_close(merged, inner_names(plain)[name], rtol=1e-9, atol=1e-9, msg=name)
    threaded.run(lambda rank_model: rank_model.unmerge_adapter())
    for name, value in threaded.whole(lambda parameter: parameter.detach()).items():
        torch.testing.assert_close(value, before[name], rtol=1e-9, atol=1e-9, msg=name)
    threaded.models = threaded.run(lambda rank_model: rank_model.merge_and_unload())
    assert assert_losses(plain.merge_and_unload(), threaded) == pytest.approx(first, abs=1e-9)


def test_it_isnt_merged_after_another_adapter(tmp_path):
    adapted(built("llama")).save_pretrained(tmp_path)
    threaded = Read(built("llama"), "1x2x1", tmp_path)

    def merge_both(rank_model):
        rank_model.load_adapter(str(tmp_path), "other")
        rank_model.merge_adapter(["default", "other"])

    with pytest.raises(UnsupportedModelError, match="'other' is a DoRA adapter and can't be merged after 'default'"):
        threaded.run(merge_both)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("dtype", "mesh"), [(torch.bfloat16, "1x2x1"), (torch.float16, "2x1x1")], ids=str)
def test_factors_in_float32_beside_16_bits(tmp_path, dtype, mesh):
    expected = Expected(dtype, use_dora=True)
    expected.plain.save_pretrained(tmp_path)
    threaded = Read(expected.model, mesh, tmp_path)
    losses = threaded.run(expected.step)
    gradients = threaded.whole(lambda parameter: parameter.grad)
    expected.check(losses[0], gradients, same_operations=mesh == "2x1x1")


def test_what_has_no_rule_is_refused_before_the_model_is_changed():
    rank_model = Threaded(built("llama"), "1x2x1").models[0]
    before = [name for name, _ in rank_model.named_modules()]
    for options, error, named in (
        ({"lora_dropout": 0.1}, UnsupportedModelError, "LoraConfig(use_dora=True, lora_dropout=0.1)"),
        ({}, MeshError, "LoraConfig(use_dora=True) begins with the norms of the weights"),
    ):
        if error is MeshError:
            # As before deepspeed.initialize.
            rank_model.cuboid.mesh._connected = False
        with pytest.raises(error, match=re.escape(named)):
            get_peft_model(rank_model, LoraConfig(use_dora=True, target_modules=DENSE, **options))
        assert [name for name, _ in rank_model.named_modules()] == before
