"""Compiled layers: how many graphs there are after many steps, and what they compute."""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.verify import SmallModel, WorkerPool

BATCH, LENGTH, STEPS = 4, 8, 10
#: Inductor may take minutes for the first graph on a machine.
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(8) as workers:
        yield workers


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=2))


def tokens(shift=0, length=LENGTH):
    return (torch.arange(BATCH * length).view(BATCH, length) * 7 + shift) % 131


def plain_gradients(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_plain(path, loss, gradients):
    expected_loss, expected = plain_gradients(path)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-6 * max(1, gradient.abs().max()), name


class Graphs:
    """A backend that counts what it is given, and hands it on to Inductor or runs it as it is."""

    def __init__(self, compiler):
        self.compiler, self.count = compiler, 0

    def __call__(self, graph, inputs):
        self.count += 1
        return compile_fx(graph, inputs) if self.compiler == "inductor" else graph


def train_with_compiled_code(path, axes, compiler):
    """Graphs after each of ten steps of ``layer.compile()``, and the loss and gradients of the last."""
    torch._dynamo.reset()
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = cuboid.shard(plain, {"tensor_parallel": section}).train()
    graphs, after_step = Graphs(compiler), []
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        after_step.append(graphs.count)
    return after_step, float(loss.detach()), cuboid.full_gradients(model)


@pytest.mark.parametrize(
    ("axes", "compiler"),
    [
        ((1, 1, 1), "none"),
        ((1, 2, 1), "none"),
        pytest.param((2, 1, 1), "none", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((2, 1, 1), "inductor", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_that_a_script_compiles_have_the_graphs_of_the_first_step(pool, path, axes, compiler):
    ranks = pool.run(MeshShape(*axes).size, train_with_compiled_code, path, axes, compiler, timeout_s=TIMEOUT_S)
    for after_step, _, _ in ranks:
        assert after_step[0] > 0
        assert after_step == after_step[:1] * STEPS
    _, loss, gradients = ranks[0]
    assert_as_plain(path, loss, gradients)
