"""Rows of a micro-batch with different adapters (``adapter_names``): trained together, as plain PEFT computes them."""

import copy

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from test_lora import Adapted, adapted, assert_gradients, batch, built
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.verify import SmallModel
from small_layers import mixture
from threaded import step_of
from training import _batches, settings

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel

NAMES = ["default", "other", "__base__", "default"]


def with_other(peft_model, **options):
    """A second adapter of other layers; both are trained."""
    torch.manual_seed(3)
    options = {"r": 5, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj", "o_proj"], **options}
    peft_model.add_adapter("other", LoraConfig(init_lora_weights=False, **options))
    peft_model.base_model.set_adapter(["default", "other"])
    return peft_model


def both(model, mesh, **options):
    """The model of plain PEFT, which takes names in evaluation only, and that on a mesh."""
    plain, threaded = with_other(adapted(copy.deepcopy(model)), **options).eval(), Adapted(model, mesh)
    for rank_model in threaded.models:
        with_other(rank_model, **options)
    return plain, threaded


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(
    ("mesh", "rows", "options"),
    [
        ("1x2x1", 4, {}),
        ("1x1x2", 4, {"lora_bias": True, "target_modules": ["o_proj", "down_proj"]}),
        ("2x2x2", 4, {"use_rslora": True}),
        # One rank of three has a row without an adapter and a copy.
        ("3x1x1", 4, {}),
        ("2x1x1", 3, {"target_modules": ["v_proj"]}),
    ],
)
def test_loss_and_every_gradient_are_those_of_plain_peft(mesh, rows, options):
    plain, threaded = both(built("llama", kv_heads=2), mesh, **options)
    step = step_of(**batch(rows), adapter_names=NAMES[:rows])
    with KeepFloat64():
        expected = step(plain)
    for loss in threaded.run(step):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_gradients(plain, threaded.whole(lambda parameter: parameter.grad))


def test_greedy_tokens_are_those_of_plain_peft():
    plain, threaded = both(built("llama", kv_heads=2), "2x1x2")

    def tokens(model, beams=1):
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        return model.eval().generate(input_ids=batch()["input_ids"], adapter_names=NAMES, **options).tolist()

    for beams in (1, 2):
        expected = tokens(plain, beams)
        assert expected != plain.generate(input_ids=batch()["input_ids"], max_new_tokens=6, do_sample=False).tolist()
        for of_rank in threaded.run(lambda model, beams=beams: tokens(model, beams)):
            assert of_rank == expected


def trained_sharded(path, folder, config):
    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, f"{folder}/start", is_trainable=True)
    model.load_adapter(f"{folder}/start/other", "other", is_trainable=True)
    model.base_model.set_adapter(["default", "other"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    losses = []
    for _, micro_batch in zip(range(3), _batches(0, 1), strict=False):
        loss = engine(**micro_batch, adapter_names=NAMES).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.module.save_pretrained(f"{folder}/end")
    return losses


def test_adapters_that_are_trained_together_are_saved_each_by_itself(pool, checkpoint, tmp_path):
    path = checkpoint(SmallModel("llama", heads=4, kv_heads=2))
    config = {**settings("1x2x1", zero=0), "gradient_accumulation_steps": 1}
    del config["scheduler"]
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = with_other(adapted(plain)).eval()
    plain.save_pretrained(tmp_path / "start")
    results = pool.run(2, trained_sharded, path, str(tmp_path), config, timeout_s=120.0)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.5), []
    for _, micro_batch in zip(range(3), _batches(0, 1), strict=False):
        loss = plain(**micro_batch, adapter_names=NAMES).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for rank_losses in results:
        assert rank_losses == pytest.approx(losses, rel=2e-6)
    plain.save_pretrained(tmp_path / "expected")
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        saved, expected = load_file(tmp_path / "end" / name), load_file(tmp_path / "expected" / name)
        assert saved.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-5, msg=key)


def test_what_has_no_rule_is_refused_by_name():
    model = built("llama", kv_heads=2)
    _, threaded = both(model, "1x2x1")
    for rank_model in threaded.models:
        for names, said in (
            (["nobody", "other", "other", "other"], "non-existing adapter.*nobody"),
            (["other"] * 3, "3 and 4 respectively"),
        ):
            with pytest.raises(ValueError, match=said):
                rank_model(**batch(), adapter_names=names)
        rank_model.base_model.model.gradient_checkpointing_enable()
        with pytest.raises(UnsupportedModelError, match=r"a recomputed layer .* activation checkpointing"):
            rank_model.train()(**batch(), adapter_names=NAMES)
    _, threaded = both(model, "1x2x1", target_modules=["embed_tokens"])
    for rank_model in threaded.models:
        with pytest.raises(UnsupportedModelError, match=r"embed_tokens \(EmbeddingLora\) has no rule .* set_adapter"):
            rank_model(**batch(), adapter_names=NAMES)


def test_tokens_of_several_rows_are_told_from_rows():
    model = mixture("qwen2_moe").double()
    threaded = Adapted(model, "1x1x2", target_modules=["shared_expert.down_proj"])
    few = batch(vocabulary=61)

    def step(rank_model):
        with pytest.raises(UnsupportedModelError, match=r"tokens of several .* target_modules"):
            rank_model(**few, adapter_names=["default"] * 4)

    threaded.run(step)
