"""A layer of a 7B model on one rank of many: messages go nowhere, everything else is real."""

import time

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import cuboid
from cuboid.failures import rank_agreement
from cuboid.verify import WorkerPool
from proofs.mirror import mirrored

LAYERS, LENGTH = 2, 4096
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
}


@pytest.fixture(scope="module")
def own_process():
    # Where no rank agrees with another one on anything, so that this process serves no other checks.
    with WorkerPool(1) as workers:
        yield workers


def sharded(axes, sizes, device="cuda", dtype=torch.bfloat16):
    """One rank's part of a model on a mesh, all others of whose ranks are pretended."""
    dist.destroy_process_group()
    ranks = axes[0] * axes[1] * axes[2]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    rank_agreement._peers = lambda mesh: None
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes), dtype=dtype).train()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    return cuboid.shard(model, {"tensor_parallel": section})


def measure(axes, rows, length, sizes):
    """Host seconds to start forward and backward, seconds until the device is through, and peak bytes."""
    model = sharded(axes, sizes).base_model
    hidden = torch.zeros(rows, length, dtype=torch.int64, device="cuda")

    def step():
        start = time.perf_counter()
        model(input_ids=hidden).last_hidden_state.sum().backward()
        started = time.perf_counter() - start
        torch.cuda.synchronize()
        return started, time.perf_counter() - start

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    host_s, whole_s = min(step() for _ in range(5))
    return host_s, whole_s, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpus(1)
@pytest.mark.parametrize("axes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 4, 4)], ids=str)
def test_host_and_device_time_of_a_layer(own_process, axes, figure):
    ((host_s, whole_s, peak),) = own_process.run(1, measure, axes, axes[0], LENGTH, SIZES, timeout_s=80)
    table = f"A layer of a 7B Llama on one rank, forward and backward of {LENGTH} tokens a row, without messages"
    row = "×".join(map(str, axes))
    figure(table, row, "host ms", f"{host_s * 1e3 / LAYERS:.1f}")
    figure(table, row, "device ms", f"{whole_s * 1e3 / LAYERS:.1f}")
    figure(table, row, "peak MiB", f"{peak / 2**20 / LAYERS:,.0f}")
    assert whole_s < 60


def watched(axes, sizes):
    """The third step, which raises if the host waits for the device."""
    model = sharded(axes, sizes)
    ids = torch.zeros(axes[0], 256, dtype=torch.int64, device="cuda")
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            model.base_model(input_ids=ids).last_hidden_state.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.gpus(1)
@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 4, 1)], ids=str)
def test_no_layer_makes_the_host_wait(own_process, axes):
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 1024}
    assert own_process.run(1, watched, axes, sizes, timeout_s=80) == [True]


def mirrored_gradients(device, axes, checkpointing, late):
    """How many collectives two steps have, and their gradients."""
    sizes = {**SIZES, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    model = sharded(axes, sizes, device, torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(axes[0] * 2 * 64, device=device).view(-1, 64) * 7 % 512
    with mirrored(torch.device(device), late=late) as started:
        for _ in range(2):
            model.base_model(input_ids=ids).last_hidden_state.square().mean().backward()
    return len(started), {name: parameter.grad.cpu() for name, parameter in model.base_model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 4, 1), (4, 1, 1)], ids=str)
def test_nothing_reads_or_changes_what_a_late_collective_has_in_hand(own_process, device, axes, checkpointing):
    ((count, wanted),), ((late, gradients),) = (
        own_process.run(1, mirrored_gradients, str(device), axes, checkpointing, late, timeout_s=40)
        for late in (False, True)
    )
    assert count == late > 20
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item(), msg=name
        )
