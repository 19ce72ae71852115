"""LoRA on embeddings and on the head: every gradient is plain PEFT's, and what scripts do with such adapters works."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, adapted, assert_losses, assert_step, batch, built, in_both, inner_names
from test_lora_stages import Staged, assert_as_plain
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64, precision
from threaded import Threaded, step_of

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel

ENDS = ["lm_head", "embed_tokens", "q_proj"]


def ended(architecture="llama", *, tied=False, **sizes):
    """A model whose vocabulary of 101 no mesh divides."""
    model = built(architecture, **sizes)
    model.config.update({"tie_word_embeddings": tied, "vocab_size": 101})
    torch.manual_seed(0)
    # In evaluation, GPT-2 has no dropout, and the loss is computed of whole logits.
    return AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).train(architecture != "gpt2")


def as_in_files(name, tensor):
    return tensor.t() if ".lora_embedding_A." in name else tensor


CASES = [
    ("llama", "1x2x1", False, {}),
    ("llama", "1x1x2", True, {"lora_bias": True, "target_modules": ["lm_head"]}),
    ("llama", "2x1x1", True, {"target_modules": ["embed_tokens"], "use_rslora": True}),
    ("llama", "2x2x2", False, {"r": 5}),
    ("gemma", "3x1x2", True, {}),
    ("gpt2", "1x2x2", True, {"target_modules": ["wte", "wpe", "lm_head"]}),
]


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("architecture", "mesh", "tied", "options"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, mesh, tied, options):
    model, micro_batch = ended(architecture, tied=tied), batch(rows=6, vocabulary=101)
    options = {"target_modules": ENDS, **options}
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, mesh, **options)
    assert_step(plain, threaded, micro_batch, as_in_files)


def test_a_rank_keeps_its_part_of_the_factors():
    threaded = Adapted(ended(), "2x2x2", target_modules=["lm_head", "embed_tokens"], r=8)
    kept, full = 0, 0
    for model in threaded.models:
        kept += sum(x.numel() for _, x in model.named_parameters() if x.requires_grad)
    for full_tensor in threaded.whole(lambda parameter: parameter if parameter.requires_grad else None).values():
        full += full_tensor.numel()
    # The vocabulary of 101 is padded to 104 rows.
    assert full <= kept <= full * 104 / 101


def test_ends_are_switched_disabled_merged_and_unloaded():
    model = ended()
    plain = adapted(copy.deepcopy(model), target_modules=ENDS)
    threaded = Adapted(model, "1x2x2", target_modules=ENDS)
    first = assert_losses(plain, threaded)

    both = in_both(plain, threaded)
    with plain.disable_adapter(), KeepFloat64():
        expected = float(plain(**batch(), use_cache=False).loss)

    def disabled(peft_model):
        with peft_model.disable_adapter():
            return peft_model(**batch(), use_cache=False).loss.detach()

    assert [float(x) for x in threaded.run(disabled)] == pytest.approx([expected] * 4, abs=1e-12)
    other = LoraConfig(r=2, init_lora_weights=False, target_modules=["embed_tokens", "lm_head"])

    def add(peft_model):
        torch.manual_seed(5)
        peft_model.add_adapter("other", copy.deepcopy(other))
        peft_model.set_adapter("other")

    assert abs(both(add) - first) > 1e-6
    both(lambda peft_model: peft_model.delete_adapter("other"))
    both(lambda peft_model: peft_model.set_adapter("default"))
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-9)
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-9)
    assert not [name for name, _ in threaded.models[0].named_parameters() if "lora" in name or "base_layer" in name]


def assert_outputs(plain, threaded, change=lambda _: None):
    """After a change, logits, generated tokens, and what scripts compute with the head are plain PEFT's."""
    ids = batch(vocabulary=101)["input_ids"]
    hidden = torch.randn(2, 3, plain.config.hidden_size, dtype=torch.float64)

    def outputs(peft_model):
        with torch.no_grad():
            change(peft_model)
            tokens = peft_model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
            inner = peft_model.get_base_model()
            return peft_model(input_ids=ids).logits, tokens, inner.get_output_embeddings()(hidden)

    with KeepFloat64():
        logits, tokens, of_head = outputs(plain)
    for rank_logits, rank_tokens, rank_of_head in threaded.run(outputs):
        torch.testing.assert_close(rank_logits, logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rank_tokens, tokens)
        torch.testing.assert_close(rank_of_head, of_head, rtol=1e-9, atol=1e-9)


def test_logits_tokens_and_the_whole_head_have_the_update():
    model = ended().eval()
    assert_outputs(adapted(copy.deepcopy(model), target_modules=ENDS), Adapted(model, "2x2x1", target_modules=ENDS))


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x2"])
def test_tokens_follow_adapters_that_are_disabled_merged_and_exchanged(mesh):
    model = built("llama", kv_heads=2).eval()
    plain, threaded = adapted(copy.deepcopy(model)), Adapted(model, mesh)
    other = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj"])

    def add(peft_model):
        torch.manual_seed(5)
        peft_model.add_adapter("other", copy.deepcopy(other))
        peft_model.set_adapter("other")

    for change in (
        lambda _: None,
        lambda peft_model: peft_model.base_model.disable_adapter_layers(),
        lambda peft_model: peft_model.base_model.enable_adapter_layers(),
        lambda peft_model: peft_model.merge_adapter(),
        lambda peft_model: peft_model.unmerge_adapter(),
        add,
    ):
        assert_outputs(plain, threaded, change)


def test_in_float16_backward_drops_out_what_forward_has():
    model = ended()

    def gradients(peft_model, dtype):
        torch.manual_seed(3)
        peft_model.train().to(dtype)
        step_of(**batch(vocabulary=101))(peft_model)
        return {name: x.grad.double() for name, x in inner_names(peft_model).items() if x.requires_grad}

    # Without the masks of the forward, the gradients would be another draw's.
    options = {"target_modules": ["lm_head"], "lora_dropout": 0.5}
    wide, narrow = (
        Adapted(copy.deepcopy(model), "1x1x1", **options).run(lambda m, dtype=dtype: gradients(m, dtype))[0]
        for dtype in (torch.float32, torch.float16)
    )
    for name, gradient in wide.items():
        assert (narrow[name] - gradient).norm() < 0.05 * gradient.norm(), name


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_tied_weights_are_not_merged(name):
    threaded = Adapted(ended(tied=True), "1x2x1", target_modules=[name])
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings"):
        threaded.run(lambda peft_model: peft_model.merge_adapter())


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_dora_is_refused_there(name):
    for rank_model in (
        Threaded(ended(), "1x2x1").models[0],
        Staged(ended()).models[0 if name == "embed_tokens" else 1],
    ):
        with pytest.raises(UnsupportedModelError, match=rf"use_dora=True.*{name}"):
            adapted(rank_model, target_modules=[name], use_dora=True)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("mesh", "lengths"), [("1x1x1", (5, 4, 3)), ("1x2x1", (8, 4)), ("2x1x2", (8, 4))])
def test_gradients_in_segments(tmp_path, mesh, lengths, tied):
    model, micro_batch = ended(tied=tied), batch(vocabulary=101)
    micro_batch["labels"][:, -1] = -100
    staged = Staged(model, mesh)
    trained = assert_as_plain(
        model, adapted(copy.deepcopy(model), target_modules=ENDS), staged, micro_batch, lengths, tmp_path, as_in_files
    )
    assert {"lm_head.lora_A.default.weight", "model.embed_tokens.lora_embedding_A.default"} <= trained.keys()


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "layers.1.mlp.up_proj"])
def test_an_adapter_of_one_stage_only(tmp_path, name):
    model, micro_batch = ended(tied=True), batch(vocabulary=101)
    micro_batch["labels"][:, -1] = -100
    plain = adapted(copy.deepcopy(model), target_modules=[name])
    assert_as_plain(model, plain, Staged(model), micro_batch, (12,), tmp_path, as_in_files)


def test_a_name_that_no_stage_has_is_an_error_on_each():
    for stage_model in Staged(ended()).models:
        with pytest.raises(ValueError, match="Target modules"):
            adapted(stage_model, target_modules=["nothing"])


def saved_by_ranks(start, folder, options, *read_from):
    """After a step on a mesh: logits of its adapter, of it read on another mesh, and of adapters read from files."""

    def on(mesh):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    micro_batch = batch(vocabulary=101)
    model, other = adapted(on("1x2x1"), **options), on("2x1x1")
    with precision(keep_float64=True):
        model(**micro_batch).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= parameter.grad
        model.save_pretrained(folder)
        read = [PeftModel.from_pretrained(other, folder)]
        read += [PeftModel.from_pretrained(on("1x1x2"), others) for others in read_from]
        return [either(**micro_batch).logits.detach() for either in (model, *read)]


def test_they_are_in_pefts_folder(pool, tmp_path):
    model = ended().eval()
    model.save_pretrained(tmp_path / "start")
    written = adapted(copy.deepcopy(model), target_modules=ENDS)
    # PEFT writes the embedding itself beside its adapter.
    written.save_pretrained(tmp_path / "plain")
    assert "embed_tokens.base_layer.weight" in "".join(load_file(tmp_path / "plain" / "adapter_model.safetensors"))
    arguments = tmp_path / "start", tmp_path / "adapter", {"target_modules": ENDS}, tmp_path / "plain"
    plain = None
    for logits, read, read_of_plain in pool.run(2, saved_by_ranks, *arguments, timeout_s=TIMEOUT_S):
        plain = plain or PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
        with torch.no_grad(), KeepFloat64():
            expected, of_written = (x(**batch(vocabulary=101)).logits for x in (plain, written))
        assert (expected - of_written).abs().max() > 1e-3
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(read_of_plain, of_written, rtol=1e-9, atol=1e-9)
