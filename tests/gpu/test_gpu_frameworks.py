"""DeepSpeed and ColossalAI in a world of one device: both Adams, and checkpoints of a model with dropout."""

import importlib.util
import math
import time

import pytest
import torch
import transformers
from torch.utils import cpp_extension

import cuboid
from gpu.test_gpu_stage import SIZES as LLAMA
from gpu.test_gpu_stage import model_of

SIZES = {"vocab_size": 512, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 512}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "checkpoint": {"asynchronous": True},
}
STEPS, SAVED_AFTER = 4, 2


def batches_of(step, device):
    """The two micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 512, (2, 2, 384), generator=generator).to(device)
    return iter([{"input_ids": rows, "labels": rows} for rows in ids])


def dropping_model(device):
    """GPT-2, whose masks come from the device's generator."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, attn_pdrop=0.0, resid_pdrop=0.1, embd_pdrop=0.1)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def config_with(segments, **sections):
    stage = {"engine": "seq1f1b", "stages": 1, "segments": segments, "certification": "verified"}
    return {**CONFIG, "pipeline": stage, **sections}


def deepspeed_run(device, folder, torch_adam, segments, resumes):
    """The losses of the steps behind or around a checkpoint, and seconds until its save returns, and is done."""
    import deepspeed

    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": torch_adam}}
    config = config_with(segments, optimizer=adam, zero_optimization={"stage": 1})
    model = cuboid.shard(dropping_model(device), config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    first = 0
    if resumes:
        engine.load_checkpoint(folder)
        first = SAVED_AFTER
    losses, saving_s = [], (0.0, 0.0)
    for step in range(first, STEPS):
        losses.append(float(engine.train_batch(batches_of(step, device))))
        if step + 1 == SAVED_AFTER:
            start = time.perf_counter()
            engine.save_checkpoint(folder)
            returned_s = time.perf_counter() - start
            engine.wait_for_checkpoint()
            saving_s = returned_s, time.perf_counter() - start
    return losses, saving_s


@pytest.mark.limit(150)
@pytest.mark.parametrize("segments", [1, 4])
def test_a_checkpoint_resumes_with_the_same_dropout(device, fresh, tmp_path, segments, figure):
    ((losses, (returned_s, done_s)),) = fresh.run(
        1, deepspeed_run, str(device), str(tmp_path), True, segments, False, timeout_s=70
    )
    with fresh.fresh() as others:
        ((resumed, _),) = others.run(1, deepspeed_run, str(device), str(tmp_path), True, segments, True, timeout_s=70)
    assert resumed == pytest.approx(losses[SAVED_AFTER:], rel=1e-5)
    table, row = "A small checkpoint of a DeepSpeed engine", f"{segments} segments"
    figure(table, row, "training stops for, ms", f"{returned_s * 1e3:.0f}")
    figure(table, row, "until it is published, ms", f"{done_s * 1e3:.0f}")


# Compiling it takes a minute or more.
@pytest.mark.limit(180)
def test_the_fused_adam_of_deepspeed(device, fresh, tmp_path, monkeypatch):
    # Images for CUDA set it to such as 9.0a, which DeepSpeed 0.19 can't read; without it, it asks the GPU.
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if device.type == "cpu" or cpp_extension.CUDA_HOME is None or not cpp_extension.is_ninja_available():
        pytest.skip("FusedAdam is compiled with nvcc and ninja, which aren't there; configs say torch_adam")
    ((losses, _),) = fresh.run(1, deepspeed_run, str(device), str(tmp_path), False, 4, False, timeout_s=160)
    assert all(map(math.isfinite, losses))
    assert len(losses) == STEPS


def booster_run(device):
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config_with(4))
    model = cuboid.shard(dropping_model(device), plugin.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(float(booster.execute_pipeline(batches_of(step, device), model, None, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.skipif(importlib.util.find_spec("colossalai") is None, reason="ColossalAI isn't installed")
def test_steps_of_a_booster(device, fresh):
    (losses,) = fresh.run(1, booster_run, str(device), timeout_s=80)
    assert all(map(math.isfinite, losses))


def mesh_of_one(device):
    """The first loss of an engine in bf16, which makes its groups for one rank."""
    import deepspeed

    section = {"mode": "3d_tensor", "mesh": {"batch": 1}}
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {**CONFIG, "tensor_parallel": section, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config |= {"gradient_accumulation_steps": 1, "optimizer": adam}
    model = model_of(LLAMA, torch.device(device), torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=cuboid.shard(model, config), config=config)
    losses = []
    for _ in range(STEPS):
        batch = next(batches_of(0, device))
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_mesh_of_one_device_under_deepspeed(device, fresh):
    (losses,) = fresh.run(1, mesh_of_one, str(device), timeout_s=80)
    assert losses[-1] < losses[0]
