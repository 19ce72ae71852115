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
from gpu.test_gpu_stage import LARGE, batch_of, model_of, train_once
from gpu.test_gpu_stage import SIZES as TINY

SIZES = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
LAYERS, MORE, LENGTH = 2, 4, 4096


@pytest.fixture(scope="module")
def own_process():
    # Where no rank agrees with another one on anything, so that this process serves no other checks.
    with WorkerPool(1) as workers:
        yield workers


def sharded(axes, sizes, device, dtype, *, compiles, layers=LAYERS):
    """One rank's part of a model on a mesh, all others of whose ranks are pretended."""
    dist.destroy_process_group()
    ranks = axes[0] * axes[1] * axes[2]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    rank_agreement._peers = lambda mesh: None
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    return cuboid.shard(model, {"tensor_parallel": {**section, "compile": compiles}})


def step_times(model, ids, steps):
    """The least host seconds of a step, and its seconds until the device is through."""

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        start = time.perf_counter()
        model.base_model(input_ids=ids).last_hidden_state.sum().backward()
        started = time.perf_counter() - start
        if ids.is_cuda:
            torch.cuda.synchronize()
        return started, time.perf_counter() - start

    for _ in range(2):
        step()
    return min(step() for _ in range(steps))


def measure(axes, sizes, length, device, steps):
    """For uncompiled and compiled layers: host and whole seconds of a layer, and the number of graphs.

    A layer's are the difference of models with more and with fewer: what a step takes once isn't a layer's.
    """
    rows = []
    ids = torch.zeros(axes[0], length, dtype=torch.int64, device=device)
    for compiles in (False, True):
        times = []
        for layers in (LAYERS, MORE):
            model = sharded(axes, sizes, device, torch.bfloat16, compiles=compiles, layers=layers)
            times.append(step_times(model, ids, steps))
        of_layer = [(more - fewer) / (MORE - LAYERS) for fewer, more in zip(*times, strict=True)]
        rows.append((*of_layer, compiles and model.cuboid.state.compiled.graphs))
    return rows


@pytest.mark.limit(240)
@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
def test_host_and_device_time_of_a_compiled_layer(own_process, device, axes, figure):
    is_small = device.type == "cpu"
    sizes, length = (SMALL, 64) if is_small else (SIZES, LENGTH)
    (rows,) = own_process.run(1, measure, axes, sizes, length, str(device), 2 if is_small else 5, timeout_s=230)
    table = f"One layer more on one rank, forward and backward of {length} tokens a row, without messages"
    for how, (host_s, whole_s, _) in zip(("uncompiled", "compiled"), rows, strict=True):
        row = f"{'×'.join(map(str, axes))} {how}"
        figure(table, row, "host ms", f"{host_s * 1e3:.1f}")
        figure(table, row, "device ms", f"{whole_s * 1e3:.1f}")
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


def replayed(sizes, length, device, dtype, steps):
    """For compiled layers as they are and as CUDA graphs: host and whole seconds of a layer, and gradients."""
    rows = []
    ids = torch.arange(length, device=device)[None] * 7 % sizes["vocab_size"]
    for replays in (False, True):
        with torch._inductor.config.patch({"triton.cudagraphs": replays}):
            times = []
            for layers in (LAYERS, MORE):
                model = sharded((1, 1, 1), sizes, device, dtype, compiles=True, layers=layers)
                times.append(step_times(model, ids, steps))
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        of_layer = [(more - fewer) / (MORE - LAYERS) for fewer, more in zip(*times, strict=True)]
        rows.append((*of_layer, {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}))
    return rows


@pytest.mark.limit(240)
def test_what_cuda_graphs_of_layers_would_bring(fresh, device, figure):
    """An experiment: nothing in Cuboid makes them, and a torch that can't only notes it."""
    is_small = device.type == "cpu"
    sizes, length, dtype = (SMALL, 64, torch.float32) if is_small else (SIZES, 1024, torch.bfloat16)
    table = f"An experiment: compiled layers replayed as CUDA graphs, {length} tokens on a mesh of one"
    try:
        (rows,) = fresh.run(1, replayed, sizes, length, str(device), dtype, 2 if is_small else 5, timeout_s=230)
    except cuboid.CuboidError as error:
        figure(table, "replayed", "error", str(error).splitlines()[-1][:200])
        return
    for row, (host_s, whole_s, _) in zip(("as they are", "replayed"), rows, strict=True):
        figure(table, row, "host ms a layer", f"{host_s * 1e3:.2f}")
        figure(table, row, "device ms a layer", f"{whole_s * 1e3:.2f}")
    (*_, expected), (*_, gradients) = rows
    errors = [float((gradients[name] - g).abs().max() / g.abs().max()) for name, g in expected.items()]
    figure(table, "replayed", "largest distance of a gradient", f"{max(errors):.1e}")


NO_MESH = {"mode": "3d_tensor", "mesh": {}}


def pace(device, sizes, dtype, length, who):
    """Tokens per second of five steps without activation checkpointing, and the loss."""
    torch._dynamo.reset()
    model = model_of(sizes, device, dtype)
    if who.startswith("mesh"):
        model = cuboid.shard(model, {"tensor_parallel": {**NO_MESH, "compile": "compiled" in who}})
    elif "compiled" in who:
        for layer in model.model.layers:
            layer.compile()
    ids = torch.randint(0, sizes["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1)).to(device)

    def steps(count):
        for _ in range(count):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return float(loss)

    steps(3)
    start = time.perf_counter()
    loss = steps(5)
    return 5 * length / (time.perf_counter() - start), loss


def paces(device, sizes, dtype, length):
    contestants = ("plain", "plain compiled", "mesh", "mesh compiled", "plain")
    return [pace(device, sizes, dtype, length, who) for who in contestants]


@pytest.mark.limit(240)
def test_a_mesh_of_one_beside_plain_transformers(alone, device, figure):
    sizes, dtype, length = (LARGE, torch.bfloat16, 8192) if device.type == "cuda" else (TINY, torch.float32, 64)
    (((plain, loss), (compiled, _), (mesh, _), (both, compiled_loss), (last, _)),) = alone.run(
        1, paces, device, sizes, dtype, length, timeout_s=230
    )
    table = "A mesh of one: two layers of an 8B Llama, bf16, 8k tokens, no activation checkpointing"
    for row, value in {"uncompiled": mesh, "compiled": both}.items():
        figure(table, row, "tokens/s", f"{value:,.0f}")
        figure(table, row, "÷ plain transformers", f"{2 * value / (plain + last):.3f}")
        figure(table, row, "÷ plain with compiled layers", f"{value / compiled:.3f}")
    figure(table, "plain, last", "÷ plain transformers", f"{last / plain:.3f}")
    assert compiled_loss == pytest.approx(loss, rel=2e-3)


def staged(model, mode, compiles, **options):
    """A stage with all layers, whose attention of segments is an operator of the layers' graphs."""
    stage = {"engine": "seq1f1b", "stages": 1, "segments": 4, "certification": "verified", **options}
    config = {"tensor_parallel": {**NO_MESH, "compile": compiles}, "pipeline": stage}
    return cuboid.Pipeline(cuboid.shard(model, {**config, "activation_checkpointing": {"mode": mode}}))


def stage_gradients(device, kind, mode, schedule):
    """Loss and gradients of the plain model, and of the third step of a compiled stage; its graphs."""
    torch._dynamo.reset()
    batch = batch_of(kind, device)
    plain = model_of(TINY, device, torch.float32)
    plain_loss = plain(**batch, use_cache=False).loss
    plain_loss.backward()
    model = model_of(TINY, device, torch.float32)
    pipeline = staged(model, mode, compiles=True, partition=[192, 128, 128, 64], schedule=schedule)
    for _ in range(3):
        model.zero_grad()
        loss = pipeline.train(iter([batch]), 1)
    gradients = {name: gradient.cpu() for name, gradient in cuboid.full_gradients(model).items()}
    expected = {name: parameter.grad.cpu() for name, parameter in plain.named_parameters()}
    return float(plain_loss.detach()), float(loss), expected, gradients, model.cuboid.state.compiled.graphs


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("kind", "mode", "schedule"),
    [
        ("plain", "none", "seq1f1b"),
        ("padded", "attention", "seq1f1b"),
        ("packed", "layers", "seq1f1b"),
        ("plain", "none", "zero_bubble"),
    ],
)
def test_gradients_of_a_compiled_stage(fresh, device, kind, mode, schedule):
    ((plain_loss, loss, expected, gradients, graphs),) = fresh.run(
        1, stage_gradients, device, kind, mode, schedule, timeout_s=110
    )
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert graphs > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def tokens_per_s(model, pipeline, device, length, *, first, count):
    """Of some steps with one sequence, after the first ones, through a pipeline if there is one."""
    vocabulary, generator = model.config.vocab_size, torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (1, length), generator=generator).to(device)

    def steps(count):
        for _ in range(count):
            train_once(model, {"input_ids": ids, "labels": ids}, pipeline)
        # Once, so that the host may run ahead from step to step.
        if device.type == "cuda":
            torch.cuda.synchronize()

    steps(first)
    start = time.perf_counter()
    steps(count)
    return count * length / (time.perf_counter() - start)


def stage_paces(device, sizes, dtype, length):
    """Tokens per second with activation checkpointing: plain, plain with compiled layers, and stages, then plain."""

    def pace_of(who):
        torch._dynamo.reset()
        model, pipeline = model_of(sizes, device, dtype), None
        if who.startswith("stage"):
            pipeline = staged(model, "attention", "compiled" in who)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers if "compiled" in who else ():
                layer.compile()
        return tokens_per_s(model, pipeline, device, length, first=2, count=3)

    return [pace_of(who) for who in ("plain", "plain compiled", "stage", "stage compiled", "plain")]


@pytest.mark.limit(150)
@pytest.mark.parametrize("length", [8192, 32_768])
def test_a_compiled_stage_beside_plain_transformers(fresh, device, length, figure):
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (TINY, torch.float32)
    length = length if device.type == "cuda" else length // 128
    ((plain, compiled, stage, both, last),) = fresh.run(1, stage_paces, device, sizes, dtype, length, timeout_s=140)
    table = "A stage of four segments: two layers of an 8B Llama, bf16, checkpointing; attention kept in the stage"
    for how, value in {"uncompiled": stage, "compiled": both}.items():
        row = f"{length // 1024}k tokens, {how}"
        figure(table, row, "tokens/s", f"{value:,.0f}")
        figure(table, row, "÷ plain transformers", f"{2 * value / (plain + last):.3f}")
        figure(table, row, "÷ plain with compiled layers", f"{value / compiled:.3f}")
    figure(table, f"{length // 1024}k tokens, plain, last", "÷ plain transformers", f"{last / plain:.3f}")
    assert both > 0
