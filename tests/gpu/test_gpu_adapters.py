"""Adapters on a device, on trunks of 16 and 4 bits: gradients beside plain PEFT and bitsandbytes, pace and memory."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import cuboid
from gpu.test_gpu_compile import tokens_per_s
from gpu.test_gpu_stage import LARGE, batch_of, model_of
from gpu.test_gpu_stage import SIZES as TINY

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "bitsandbytes")),
    reason="needs peft and bitsandbytes",
)
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}}}
STAGE = {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 4, "certification": "verified"}}


def adapted(model, folder):
    from peft import PeftModel

    # In a pipeline, new factors have other values.
    return PeftModel.from_pretrained(model, folder, is_trainable=True).train()


def write(path, sizes, dtype):
    """A checkpoint, and an adapter of it in ``adapter``."""
    from peft import LoraConfig, get_peft_model

    model = model_of(sizes, "cpu", torch.float32).to(dtype)
    model.save_pretrained(path)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    get_peft_model(model, LoraConfig(r=8, lora_alpha=16, **options)).save_pretrained(f"{path}/adapter")


def loaded(path, device, dtype, how, bits):
    """A model of a checkpoint on the device, by plain transformers or by Cuboid."""
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    options = {"dtype": dtype, **({"quantization_config": quantised} if bits == 4 else {})}
    if how == "plain":
        return AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **options)
    model = cuboid.from_pretrained(path, MESH | STAGE if how == "stage" else MESH, **options)
    return model.to(device)


def gradients(path, device, how, bits):
    """The loss, and the factors' gradients by name, in float32."""
    model = adapted(loaded(path, device, torch.float32, how, bits), f"{path}/adapter")
    batch = batch_of("padded", device, length=128)
    if how == "stage":
        loss = cuboid.Pipeline(model).train(iter([batch]), 1)
    else:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    named = ((name.removeprefix("base_model.model."), x.grad) for name, x in model.named_parameters())
    return float(loss.detach()), {name: gradient.cpu() for name, gradient in named if gradient is not None}


def largest_difference(path, device, how, bits):
    write(path, TINY, torch.float32)
    expected_loss, expected = gradients(path, device, "plain", bits)
    loss, actual = gradients(path, device, how, bits)
    assert actual.keys() == expected.keys()
    errors = [float((actual[name] - x).abs().max() / x.abs().max()) for name, x in expected.items()]
    return expected_loss, loss, max(errors)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("how", ["mesh", "stage"])
def test_gradients_of_factors_are_plain_ones(alone, device, tmp_path, how, bits, figure):
    ((expected_loss, loss, error),) = alone.run(1, largest_difference, str(tmp_path), device, how, bits, timeout_s=80)
    where = f"{how}, {'32' if bits == 16 else bits} bits"
    figure("Adapters on all linear layers of a small model in float32", where, "gradients differ by", f"{error:.1e}")
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    # Some elements may be rounded the other way on a device than on the host, where we round while loading.
    assert error < (1e-3 if bits == 16 else 3e-2)


def step(path, device, dtype, length, how, bits):
    """Tokens per second of an adapter's steps with checkpointed layers, and the most memory that they took, in GiB."""
    model = adapted(loaded(path, device, dtype, how, bits), f"{path}/adapter")
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.base_model.model.enable_input_require_grads()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pace = tokens_per_s(model, None, device, length, first=2, count=3)
    return pace, torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")


def steps(path, device, sizes, dtype, length):
    write(path, sizes, dtype)
    cases = [(how, bits) for bits in (16, 4) for how in ("plain", "mesh")]
    return {case: step(path, device, dtype, length, *case) for case in cases}


@pytest.mark.limit(170)
def test_steps_on_trunks_of_16_and_4_bits(fresh, device, tmp_path, figure):
    on_gpu = device.type == "cuda"
    sizes, dtype, length = (LARGE, torch.bfloat16, 8192) if on_gpu else (TINY, torch.float32, 64)
    (measured,) = fresh.run(1, steps, str(tmp_path), device, sizes, dtype, length, timeout_s=160)
    table = "A step of LoRA on all linear layers (r = 8), layers checkpointed: two layers of an 8B Llama, 8k tokens"
    for (how, bits), (pace, memory) in measured.items():
        row = f"{how}, a trunk of {bits} bits"
        figure(table, row, "tokens/s", f"{pace:,.0f}")
        figure(table, row, "÷ plain", f"{pace / measured['plain', bits][0]:.3f}")
        figure(table, row, "GiB", f"{memory:.2f}")
        assert pace > 0
