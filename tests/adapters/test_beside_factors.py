"""What adapters train beside factors, as in plain PEFT: rows of tokens, and whole modules (``modules_to_save``)."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, adapted, assert_losses, assert_step, batch, built, in_both
from test_lora_ends import assert_outputs, ended, saved_by_ranks
from test_lora_stages import Staged, assert_as_plain, unwrap
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel

#: Some that the micro-batch has, and one that it hasn't. On two ranks of `sequence`, rows from 51 on are another's.
TOKENS = [3, 60, 7, 100, 52]


def tokens_batch():
    micro_batch = batch(rows=6, vocabulary=101)
    micro_batch["input_ids"][:, 4:8] = torch.tensor(TOKENS[:4])
    micro_batch["labels"][:, 4:8] = torch.tensor(TOKENS[:4])
    return micro_batch


def with_tokens(model, tokens=TOKENS, **options):
    """The rows begin as the embedding's, so they are moved; alike on all ranks."""
    return adapted(model, **{"target_modules": ["q_proj"], "trainable_token_indices": tokens, **options})


class WithTokens(Adapted):
    def __init__(self, model, mesh, tokens=TOKENS):
        Threaded.__init__(self, model, mesh)
        self.models = self.run(lambda rank_model: with_tokens(rank_model, tokens))


def moved(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.mul_(-2)


ROW_CASES = [
    ("llama", "1x2x1", False, TOKENS),
    ("llama", "1x1x2", True, TOKENS),
    ("llama", "2x1x1", True, TOKENS),
    ("llama", "2x2x2", True, TOKENS),
    ("llama", "3x2x1", False, {"lm_head": [1, 60, 100], "embed_tokens": [3, 52]}),
    ("gemma", "1x2x2", True, TOKENS),
    ("gpt2", "1x2x1", True, TOKENS),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "mesh", "tied", "tokens"), ROW_CASES)
def test_rows_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, tied, tokens):
    model = ended(architecture, tied=tied)
    if architecture == "gpt2":
        options = {"target_modules": ["c_fc"]}
        plain = with_tokens(copy.deepcopy(model), tokens, **options)
        threaded = Adapted.__new__(Adapted)
        Threaded.__init__(threaded, model, mesh)
        threaded.models = threaded.run(lambda rank_model: with_tokens(rank_model, tokens, **options))
    else:
        plain, threaded = with_tokens(copy.deepcopy(model), tokens), WithTokens(model, mesh, tokens)
    for either in (plain, *threaded.models):
        moved(either)
    trained = assert_step(plain, threaded, tokens_batch())
    assert any("trainable_tokens_delta" in name and gradient.any() for name, gradient in trained.items())


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_rows_are_disabled_merged_and_unloaded(tied):
    model = ended(tied=tied)
    plain, threaded = with_tokens(copy.deepcopy(model)), WithTokens(model, "1x2x2")
    untouched = assert_losses(plain, threaded)
    for either in (plain, *threaded.models):
        moved(either)
    first = assert_losses(plain, threaded)
    assert abs(first - untouched) > 1e-3
    both = in_both(plain, threaded)
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.base_model.disable_adapter_layers()) != pytest.approx(first)
    assert both(lambda peft_model: peft_model.base_model.enable_adapter_layers()) == pytest.approx(first, abs=1e-9)
    hidden = torch.randn(2, 3, model.config.hidden_size, dtype=torch.float64)

    def of_head(peft_model):
        with torch.no_grad():
            return peft_model.get_base_model().get_output_embeddings()(hidden)

    for logits in threaded.run(of_head):
        torch.testing.assert_close(logits, of_head(plain), rtol=1e-9, atol=1e-9)
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-9)
    assert {name for name, _ in threaded.models[0].named_parameters()} == {name for name, _ in plain.named_parameters()}


@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("2x1x2", (8, 4))])
def test_rows_gradients_in_segments(tmp_path, mesh, lengths):
    model, micro_batch = ended(), tokens_batch()
    micro_batch["labels"][:, -1] = -100
    plain = with_tokens(copy.deepcopy(model))
    moved(plain)
    trained = assert_as_plain(model, plain, Staged(model, mesh), micro_batch, lengths, tmp_path)
    assert "model.embed_tokens.token_adapter.trainable_tokens_delta.default" in trained


@pytest.mark.parametrize(("tokens", "named"), [([3, -1], r"\[-1\] are none"), ([2, 9, 2], r"\[2\] are given more")])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
def test_tokens_that_are_no_rows_or_no_single_ones_are_named(mesh, tokens, named):
    model = Threaded(ended(), mesh).models[0]
    with pytest.raises(UnsupportedModelError, match=f"model.embed_tokens are 0 to .*{named}"):
        with_tokens(model, tokens)


def test_rows_that_have_no_rule_are_refused_by_name():
    tied = Staged(ended(tied=True)).models[1]
    mesh = Threaded(ended(), "1x2x1").models[0]
    for model, tokens, named in ((tied, TOKENS, "tie_word_embeddings"), (mesh, {"q_proj": [1]}, "q_proj")):
        before = [name for name, _ in model.named_modules()]
        with pytest.raises(UnsupportedModelError, match=rf"trainable_token_indices=.*{named}"):
            with_tokens(model, tokens)
        assert [name for name, _ in model.named_modules()] == before


def rows_saved_by_ranks(start, folder):
    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = with_tokens(on("1x2x1")), on("2x1x1")
    moved(model)
    with precision(keep_float64=True):
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**tokens_batch()).logits.detach() for either in (model, read)]


def test_rows_are_in_pefts_folder(pool, tmp_path):
    model = ended(tied=True).eval()
    model.save_pretrained(tmp_path / "start")
    results = pool.run(2, rows_saved_by_ranks, tmp_path / "start", tmp_path / "adapter", timeout_s=TIMEOUT_S)
    written = with_tokens(copy.deepcopy(model))
    written.save_pretrained(tmp_path / "plain")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert saved.keys() == expected.keys()
    plain = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad(), KeepFloat64():
        expected = plain(**tokens_batch()).logits
    for rank_logits in results:
        for logits in rank_logits:
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


ENDS = ["embed_tokens", "lm_head"]


def options_of(architecture, names):
    targets = ["c_attn"] if architecture == "gpt2" else ["q_proj"]
    return {"target_modules": targets, "modules_to_save": names, "task_type": "CAUSAL_LM"}


MODULE_CASES = [
    ("llama", "1x2x1", False, ENDS),
    ("llama", "1x1x2", True, ["lm_head"]),
    ("llama", "2x2x2", False, [*ENDS, "norm"]),
    ("gemma", "3x1x2", True, [*ENDS, "input_layernorm"]),
    ("gpt2", "1x2x2", True, ["wte", "wpe", "lm_head", "ln_1"]),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "mesh", "tied", "names"), MODULE_CASES)
def test_modules_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, tied, names):
    model, micro_batch = ended(architecture, tied=tied), batch(rows=6, vocabulary=101)
    options = options_of(architecture, names)
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, mesh, **options)
    trained = assert_step(plain, threaded, micro_batch)
    assert sum(".modules_to_save." in name for name in trained) >= len(names)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("2x1x2", (8, 4))])
def test_modules_gradients_in_segments(tmp_path, mesh, lengths, tied):
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


def test_modules_are_switched_disabled_and_unloaded():
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
def test_modules_are_in_pefts_folder(pool, tmp_path, tied):
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
