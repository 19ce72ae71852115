"""Gradients in bfloat16 are added up in float32, although NCCL, emulated here, would round them at every rank."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed import collectives
from cuboid.verify import SmallModel

RANKS, SIZE = 6, 4096
SMALL = SmallModel("llama", heads=12, kv_heads=6, layers=1)


class Ring:
    """A reduce-scatter as NCCL's ring does it: a slice goes from rank to rank, each of which adds its own term."""

    def __init__(self):
        self.calls = 0

    def __call__(self, out, x, group, async_op):
        self.calls += 1
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        terms = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(terms, x, group=group)
        order = [(rank + 1 + step) % ranks for step in range(ranks)]
        in_order = [terms[sender].view(ranks, -1)[rank] for sender in order]
        total = in_order[0]
        for term in in_order[1:]:
            total = total + term
        out.copy_(total)


def on_nccl(stack):
    """Let gloo pass for NCCL, as far as reduce-scatters are concerned."""
    ring = Ring()
    passing = SimpleNamespace(**{**vars(dist), "get_backend": lambda *_: "nccl"})
    stack.enter_context(mock.patch.object(collectives, "dist", passing))
    stack.enter_context(mock.patch.object(collectives, "_reduce_scatter", ring))
    return ring


def sums(exchange):
    """What a rank has of a sum, and what it should have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    terms = [torch.randn(ranks * SIZE, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)]
    reduced = torch.empty(SIZE, dtype=torch.bfloat16)
    with ExitStack() as stack:
        on_nccl(stack)
        collectives.start_reduce_scatter_into(
            [reduced], terms[rank].clone(), dist.group.WORLD, exchange=exchange
        ).wait()
    exact = torch.stack(terms).double().sum(0).view(ranks, -1)[rank]
    return reduced, exact


def test_an_exchange_rounds_once_where_a_ring_rounds_at_every_rank(pool):
    for reduced, exact in pool.run(RANKS, sums, True):
        # Float32 holds a sum of six bfloat16 numbers of like size exactly, or nearly.
        torch.testing.assert_close(reduced.double(), exact, rtol=2**-8, atol=1e-6)
    errors = {}
    for exchange in (True, False):
        parts = pool.run(RANKS, sums, exchange)
        errors[exchange] = max(((reduced.double() - exact).pow(2).mean().sqrt().item()) for reduced, exact in parts)
    assert errors[False] > 1.4 * errors[True]


def gradients(path, how, spans_nodes):
    """Reduce-scatters of the backend in a backward, and the gradients."""
    section = {"mode": "3d_tensor", "mesh": {"batch": RANKS}, **({} if how is None else {"gradient_reduce": how})}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = cuboid.shard(model, {"tensor_parallel": section}).train()
    ids = torch.arange(RANKS * 8).view(RANKS, 8) * 7 % 131
    with ExitStack() as stack:
        cuboid.mesh_of(model).connect()
        cuboid.mesh_of(model).spans_nodes = spans_nodes
        ring = on_nccl(stack)
        model(input_ids=ids, labels=ids).loss.backward()
    return ring.calls, cuboid.full_gradients(model)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("how", "spans_nodes", "rings"),
    [(None, False, False), ("fp32", True, False), ("auto", True, True), ("backend", False, True)],
)
def test_the_config_says_how_gradients_are_added_up(pool, checkpoint, how, spans_nodes, rings):
    calls, _ = pool.run(RANKS, gradients, checkpoint(SMALL), how, spans_nodes)[0]
    assert (calls > 0) == rings


def test_gradients_are_those_over_gloo(pool, checkpoint):
    path = checkpoint(SMALL)
    _, exchanged = pool.run(RANKS, gradients, path, "fp32", False)[0]
    with_gloo = pool.run(RANKS, gradients_over_gloo, path)[0]
    for name, gradient in with_gloo.items():
        assert torch.equal(exchanged[name], gradient), name


def gradients_over_gloo(path):
    with mock.patch(f"{__name__}.on_nccl", return_value=Ring()):
        return gradients(path, "backend", False)[1]
