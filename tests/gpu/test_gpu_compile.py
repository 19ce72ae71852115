"""Compiled layers on a device: the gradients of uncompiled ones, and host and device time beside them."""

import time

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import cuboid
from cuboid.failures import rank_agreement
from cuboid.verify import WorkerPool

SIZES = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
LAYERS, LENGTH = 2, 4096


@pytest.fixture(scope="module")
def own_process():
    # Where no rank agrees with another one on anything, so that this process serves no other checks.
    with WorkerPool(1) as workers:
        yield workers


def sharded(axes, sizes, device, dtype, *, compiles):
    """One rank's part of a model on a mesh, all others of whose ranks are pretended."""
    dist.destroy_process_group()
    ranks = axes[0] * axes[1] * axes[2]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    rank_agreement._peers = lambda mesh: None
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=LAYERS)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    return cuboid.shard(model, {"tensor_parallel": {**section, "compile": compiles}})


def measure(axes, sizes, length, device, steps):
    """For uncompiled and compiled layers: host and whole seconds of a step, and the number of graphs."""
    rows = []
    for compiles in (False, True):
        model = sharded(axes, sizes, device, torch.bfloat16, compiles=compiles)
        ids = torch.zeros(axes[0], length, dtype=torch.int64, device=device)

        def step(base=model.base_model, ids=ids):
            start = time.perf_counter()
            base(input_ids=ids).last_hidden_state.sum().backward()
            started = time.perf_counter() - start
            if ids.is_cuda:
                torch.cuda.synchronize()
            return started, time.perf_counter() - start

        for _ in range(2):
            step()
        rows.append((*min(step() for _ in range(steps)), compiles and model.cuboid.compiled.graphs))
    return rows


@pytest.mark.limit(240)
@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
def test_host_and_device_time_of_a_compiled_layer(own_process, device, axes, figure):
    is_small = device.type == "cpu"
    sizes, length = (SMALL, 64) if is_small else (SIZES, LENGTH)
    (rows,) = own_process.run(1, measure, axes, sizes, length, str(device), 2 if is_small else 5, timeout_s=230)
    table = f"A layer on one rank, forward and backward of {length} tokens a row, without messages"
    for how, (host_s, whole_s, _) in zip(("uncompiled", "compiled"), rows, strict=True):
        row = f"{'×'.join(map(str, axes))} {how}"
        figure(table, row, "host ms", f"{host_s * 1e3 / LAYERS:.1f}")
        figure(table, row, "device ms", f"{whole_s * 1e3 / LAYERS:.1f}")
    assert rows[1][2] == 1


def gradients(device):
    """Gradients of a model whose layers are uncompiled, and of one whose layers are compiled."""
    results = []
    ids = torch.arange(2 * 64, device=device).view(2, 64) * 7 % 512
    for compiles in (False, True):
        model = sharded((1, 1, 1), SMALL, device, torch.float32, compiles=compiles)
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        results.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
    return results


@pytest.mark.limit(240)
def test_gradients_of_compiled_layers(own_process, device):
    ((uncompiled, compiled),) = own_process.run(1, gradients, str(device), timeout_s=230)
    for name, gradient in uncompiled.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
