"""A layer of a 7B model on one rank of many: messages go nowhere, everything else is real."""

import time

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import cuboid
from cuboid.distributed import rank_agreement
from cuboid.verify import WorkerPool

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
    # The process group is another one than the pool's, so this process serves no other test.
    with WorkerPool(1) as workers:
        yield workers


def measure(axes, rows, length, sizes):
    """Host seconds to start forward and backward, seconds until the device is through, and peak bytes."""
    dist.destroy_process_group()
    ranks = axes[0] * axes[1] * axes[2]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    rank_agreement._world = lambda mesh: None
    config = transformers.LlamaConfig(**sizes)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    model = cuboid.shard(model, {"tensor_parallel": section}).base_model

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
def test_host_and_device_time_of_a_layer(axes, figure):
    with WorkerPool(1) as workers:
        ((host_s, whole_s, peak),) = workers.run(1, measure, axes, max(axes[0], 1), LENGTH, SIZES, timeout_s=300)
    table = f"A layer of a 7B Llama on one rank, forward and backward of {LENGTH} tokens a row, without messages"
    row = "×".join(map(str, axes))
    figure(table, row, "host ms", f"{host_s * 1e3 / LAYERS:.1f}")
    figure(table, row, "device ms", f"{whole_s * 1e3 / LAYERS:.1f}")
    figure(table, row, "peak MiB", f"{peak / 2**20 / LAYERS:,.0f}")
    assert whole_s < 60
