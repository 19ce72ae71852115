"""Linear layers in fp8 on a device: products and gradients beside an emulation, and pace beside bf16 and torchao."""

import importlib
import importlib.util

import pytest
import torch

import cuboid
from cuboid.tensor3d.fp8 import rowwise
from gpu.test_gpu_compile import NO_MESH, tokens_per_s
from gpu.test_gpu_stage import LARGE, batch_of, model_of
from gpu.test_gpu_stage import SIZES as TINY

RECIPE = "rowwise_with_gw_hp"
#: Segments of one length, which have one graph.
EVEN = {"segments": 4, "partition": "even"}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def emulated(x, weight, *, fast=False):
    """Both operands rounded row by row to a grid of powers of two, and the exact product of what is left."""
    del fast
    x, weight = (rounded(operand) for operand in (x, weight))
    return (x @ weight.T).bfloat16()


def rounded(x):
    x = x.double()
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448)))
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def distance(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors_of_a_product(device, tokens, inputs, outputs):
    """Relative distances of y, dx and dW to the emulation, and to products in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, weight, dy = draw(tokens, inputs).requires_grad_(), draw(outputs, inputs).requires_grad_(), draw(tokens, outputs)
    # Gradients of tokens differ by orders of magnitude.
    dy = dy * torch.logspace(-3, 0, tokens, device=device)[:, None].to(dy.dtype)
    y = rowwise.linear(x, weight)
    y.backward(dy)
    emulation = emulated(x.detach(), weight.detach()), emulated(dy, weight.detach().T)
    wide = [tensor.detach().double() for tensor in (x, weight, dy)]
    exact = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    actual = y.detach(), x.grad, weight.grad
    return list(map(distance, actual, emulation)), list(map(distance, actual, exact))


@pytest.mark.parametrize("sizes", [(1024, 4096, 2048), (1, 2048, 4096), (333, 2064, 2080)], ids=str)
def test_products_are_those_of_the_emulation(alone, device, sizes, figure):
    ((to_emulation, to_exact),) = alone.run(1, errors_of_a_product, device, *sizes, timeout_s=60)
    table, row = "Products in fp8, relative distances", "×".join(map(str, sizes))
    for name, error in zip(("y", "dx", "dW"), to_exact, strict=True):
        figure(table, row, f"{name}, to float64", f"{error:.1e}")
    # Of rounding the result to bf16, and of sums in fewer bits.
    assert max(to_emulation) < 5e-3
    assert max(to_exact[:2]) < 6e-2
    assert to_exact[2] < 1e-2


def gradients(device, how, pipeline):
    """The loss, and all gradients in one, of the second step of a small model."""
    torch._dynamo.reset()
    section = {**NO_MESH, "compile": "compiled" in how}
    if "fp8" in how or "emulated" in how:
        section["fp8"] = {"recipe": RECIPE, "min_dimension": 16}
    multiply, rowwise.multiply = rowwise.multiply, emulated if "emulated" in how else rowwise.multiply
    try:
        model, batch = model_of(TINY, device, torch.bfloat16), batch_of("plain", device, length=128)
        config = {"tensor_parallel": section}
        if pipeline is not None:
            config["pipeline"] = {"engine": "seq1f1b", "stages": 1, "certification": "verified", **pipeline}
        model = cuboid.shard(model, config)
        runs = None if pipeline is None else cuboid.Pipeline(model)
        for _ in range(2):
            model.zero_grad()
            if runs is None:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
            else:
                loss = runs.train(iter([batch]), 1)
    finally:
        rowwise.multiply = multiply
    if "compiled" in how:
        assert model.cuboid.state.compiled.reason is None
    flat = [gradient.flatten().cpu() for gradient in cuboid.full_gradients(model).values()]
    return float(loss.detach()), torch.cat(flat)


def distances_of_gradients(device, pipeline):
    """By how it is computed: the loss, and the distance of the gradients to those of the emulation."""
    expected_loss, expected = gradients(device, "emulated", pipeline)
    by_way = {"emulated": (expected_loss, 0.0)}
    splits = pipeline is not None and "schedule" in pipeline
    for how in ("bf16", "fp8") if splits else ("bf16", "fp8", "compiled fp8"):
        loss, gradient = gradients(device, how, pipeline)
        by_way[how] = loss, distance(gradient, expected)
    return by_way


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "pipeline", [None, EVEN, {"segments": 4, "schedule": "zero_bubble"}], ids=["mesh", "stage", "split"]
)
def test_gradients_are_those_of_the_emulation(fresh, device, pipeline, figure):
    (by_way,) = fresh.run(1, distances_of_gradients, device, pipeline, timeout_s=110)
    where = "a mesh of one" if pipeline is None else f"a stage, {pipeline.get('schedule', 'seq1f1b')}"
    expected_loss, _ = by_way.pop("emulated")
    for how, (loss, error) in by_way.items():
        figure("Gradients of a small model in fp8, distance to the emulation", where, how, f"{error:.1e}")
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        # Another order of sums changes what is rounded up and down.
        assert error < 0.1


def pace(device, sizes, length, how):
    """Tokens per second of steps with a model's layers, in bf16."""
    torch._dynamo.reset()
    model, pipeline = model_of(sizes, device, torch.bfloat16), None
    section = {**NO_MESH, "compile": True}
    if "fp8" in how:
        section["fp8"] = {"recipe": RECIPE} if device.type == "cuda" else {"recipe": RECIPE, "min_dimension": 16}
    if how.startswith("mesh"):
        model = cuboid.shard(model, {"tensor_parallel": section})
    elif how.startswith("stage"):
        stage = {"engine": "seq1f1b", "stages": 1, "certification": "verified", **EVEN}
        config = {"tensor_parallel": section, "pipeline": stage, "activation_checkpointing": {"mode": "attention"}}
        pipeline = cuboid.Pipeline(cuboid.shard(model, config))
    else:
        if how == "torchao":
            float8 = importlib.import_module("torchao.float8")
            recipe = float8.Float8LinearConfig.from_recipe_name(RECIPE)
            # The head stays in bf16, as with us.
            float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "layers." in name)
        for layer in model.model.layers:
            layer.compile()
    pace_of_steps = tokens_per_s(model, pipeline, device, length, first=3, count=5)
    if how.startswith(("mesh", "stage")):
        assert model.cuboid.state.compiled.reason is None
    return pace_of_steps


def paces(device, sizes, length, contestants):
    return [pace(device, sizes, length, how) for how in contestants]


@pytest.mark.limit(180)
def test_a_mesh_of_one_in_fp8_beside_bf16_and_torchao(fresh, device, figure):
    sizes, length = (LARGE, 8192) if device.type == "cuda" else (TINY, 64)
    contestants = ["plain", "mesh", "mesh fp8", *(["torchao"] if HAS_TORCHAO else []), "plain"]
    (measured,) = fresh.run(1, paces, device, sizes, length, contestants, timeout_s=170)
    plain, mesh, fp8, *peer, last = measured
    table = "Compiled layers in fp8 on a mesh of one: two layers of an 8B Llama, 8k tokens, no activation checkpointing"
    rows = {"bf16": mesh, "fp8": fp8, **({"torchao's fp8, plain transformers": peer[0]} if peer else {})}
    for row, value in rows.items():
        figure(table, row, "tokens/s", f"{value:,.0f}")
        figure(table, row, "÷ plain compiled", f"{2 * value / (plain + last):.3f}")
        figure(table, row, "÷ bf16", f"{value / mesh:.3f}")
        if peer:
            figure(table, row, "÷ torchao", f"{value / peer[0]:.3f}")
    figure(table, "plain compiled, last", "÷ plain compiled", f"{last / plain:.3f}")
    assert fp8 > 0


@pytest.mark.limit(150)
def test_a_stage_in_fp8_beside_bf16(fresh, device, figure):
    sizes, length = (LARGE, 32_768) if device.type == "cuda" else (TINY, 256)
    ((stage, fp8, last),) = fresh.run(1, paces, device, sizes, length, ["stage", "stage fp8", "stage"], timeout_s=140)
    table = "A compiled stage of four segments in fp8: two layers of an 8B Llama, 32k tokens, attention kept"
    for row, value in {"bf16": stage, "fp8": fp8}.items():
        figure(table, row, "tokens/s", f"{value:,.0f}")
        figure(table, row, "÷ bf16", f"{2 * value / (stage + last):.3f}")
    figure(table, "bf16, last", "÷ bf16", f"{last / stage:.3f}")
    assert fp8 > 0
