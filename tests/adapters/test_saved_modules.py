"""Modules of the model that an adapter trains whole (``modules_to_save``): embeddings, heads and norms."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, adapted, assert_losses, assert_step, batch, built, in_both
from test_lora_ends import assert_outputs, ended, saved_by_ranks
from test_lora_stages import Staged, assert_as_plain, unwrap

from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel

ENDS = ["embed_tokens", "lm_head"]


def options_of(architecture, names):
    targets = ["c_attn"] if architecture == "gpt2" else ["q_proj"]
    return {"target_modules": targets, "modules_to_save": names, "task_type": "CAUSAL_LM"}


CASES = [
    ("llama", "1x2x1", False, ENDS),
    ("llama", "1x1x2", True, ["lm_head"]),
    ("llama", "2x2x2", False, [*ENDS, "norm"]),
    ("gemma", "3x1x2", True, [*ENDS, "input_layernorm"]),
    ("gpt2", "1x2x2", True, ["wte", "wpe", "lm_head", "ln_1"]),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "mesh", "tied", "names"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, tied, names):
    model, micro_batch = ended(architecture, tied=tied), batch(rows=6, vocabulary=101)
    options = options_of(architecture, names)
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, mesh, **options)
    trained = assert_step(plain, threaded, micro_batch)
    assert sum(".modules_to_save." in name for name in trained) >= len(names)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("2x1x2", (8, 4))])
def test_gradients_in_segments(tmp_path, mesh, lengths, tied):
    model, micro_batch = ended(tied=tied), batch(vocabulary=101)
    micro_batch["labels"][:, -1] = -100
    staged, options = Staged(model, mesh), options_of("llama", [*ENDS, "norm"])
    plain = adapted(copy.deepcopy(model), **options)
    with torch.no_grad():
        for name in ("model.embed_tokens", "lm_head"):
            plain.get_submodule(f"base_model.model.{name}").modules_to_save["default"].weight.mul_(1.5)
    before = staged.whole(lambda parameter: parameter.detach().clone())
    trained = assert_as_plain(model, plain, staged, micro_batch, lengths, tmp_path)
    weights = staged.whole(lambda parameter: parameter.detach())
    plain_names = {name.replace(".original_module.", ".").replace(".base_layer.", "."): name for name in weights}
    for name, value in before.items():
        torch.testing.assert_close(weights[plain_names[name]], value, rtol=0, atol=0, msg=name)
    # The last stage has a tied embedding's table for its head, and trains no copy of it.
    kept = [name for x in staged.models for name, p in unwrap(x).named_parameters() if p.requires_grad]
    assert sorted(set(kept)) == sorted(trained)
    assert len(kept) == len(trained) * staged.shape.size


def test_they_are_switched_disabled_and_unloaded():
    model, options = ended(), options_of("llama", [*ENDS, "norm"])
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, "1x2x2", **options)
    both = in_both(plain, threaded)

    def change(peft_model):
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if ".modules_to_save." in name:
                    parameter.mul_(1.5)

    changed = both(change)
    with plain.disable_adapter(), KeepFloat64():
        expected = float(plain(**batch(), use_cache=False).loss)
    assert abs(expected - changed) > 1e-3

    def disabled(peft_model):
        with peft_model.disable_adapter():
            return peft_model(**batch(), use_cache=False).loss.detach()

    assert [float(x) for x in threaded.run(disabled)] == pytest.approx([expected] * 4, abs=1e-12)

    def add(peft_model):
        torch.manual_seed(5)
        other = LoraConfig(r=2, init_lora_weights=False, target_modules=["k_proj"], modules_to_save=["lm_head"])
        peft_model.add_adapter("other", other)
        peft_model.set_adapter("other")

    both(add)
    both(lambda peft_model: peft_model.set_adapter("default"))
    both(lambda peft_model: peft_model.delete_adapter("other"))
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(changed, abs=1e-9)
    assert {name for name, _ in threaded.models[0].named_parameters()} == {name for name, _ in model.named_parameters()}


def test_logits_tokens_and_the_whole_head_are_the_copys():
    def change(peft_model):
        peft_model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(-1.5)

    model, options = ended().eval(), options_of("llama", ENDS)
    assert_outputs(adapted(copy.deepcopy(model), **options), Adapted(model, "2x2x1", **options), change)


@pytest.mark.parametrize("name", ENDS)
def test_copies_of_tied_weights_do_not_replace_them(name):
    options = options_of("llama", [name])
    for models in (Adapted(ended(tied=True), "1x2x1", **options).models, Staged(ended(tied=True)).models):
        for model in models:
            peft_model = model if isinstance(model, PeftModel) else adapted(model, **options)
            with pytest.raises(UnsupportedModelError, match=f"{name}.*tie_word_embeddings"):
                peft_model.merge_and_unload()


@pytest.mark.parametrize("name", ["q_proj", "mlp"])
def test_other_modules_are_refused_by_name(name):
    for sharded in (*Threaded(built("llama", kv_heads=2), "1x2x1").models, *Staged(built("llama")).models):
        before = [name for name, _ in sharded.named_modules()]
        with pytest.raises(UnsupportedModelError, match=rf"modules_to_save=\['{name}'\]: .*{name}"):
            adapted(sharded, modules_to_save=[name], target_modules=["v_proj"])
        assert [name for name, _ in sharded.named_modules()] == before


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_they_are_in_pefts_folder(pool, tmp_path, tied):
    model = ended(tied=tied).eval()
    model.save_pretrained(tmp_path / "start")
    options = options_of("llama", [*ENDS, "norm"])
    results = pool.run(2, saved_by_ranks, tmp_path / "start", tmp_path / "adapter", options, timeout_s=TIMEOUT_S)
    written = adapted(copy.deepcopy(model), **options)
    written.save_pretrained(tmp_path / "plain")
    by_plain, saved = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "adapter"))
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in by_plain.items()}
    plain = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    with torch.no_grad(), KeepFloat64():
        expected = plain(**batch(vocabulary=101)).logits
    for logits, read in results:
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-9)
