"""Collectives over a network give what gloo's own give, and are taken only where there is a network."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed import collectives, mesh
from cuboid.distributed.host_identity import host_identity
from cuboid.verify import SmallModel, WorkerPool


def both_ways(sizes, dtype):
    """Gathers and reduce-scatters of some sizes in gloo's way and directly; whether they agree, and what is right."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for size in sizes:
        parts = [torch.arange(size, dtype=dtype).mul(3 + other).sin() for other in range(ranks)]
        terms_of_rank = [torch.arange(ranks * size, dtype=dtype).mul(2 + other).cos() for other in range(ranks)]
        assert torch.equal(collectives.start_exchange(parts[rank], group).wait(), torch.stack(parts))
        for direct in (False, True):
            out = torch.empty(ranks * size, dtype=dtype)
            collectives.gather_into(out, parts[rank], group, direct=direct)
            assert torch.equal(out, torch.cat(parts))
            out = torch.empty(size, dtype=dtype)
            collectives.reduce_scatter_into(out, terms_of_rank[rank], group, direct=direct)
            wanted = torch.stack([terms[rank * size : (rank + 1) * size] for terms in terms_of_rank]).sum(0)
            assert torch.equal(out, wanted)
            # A part of the result that lies in its place already, and a sum in several tensors.
            out = torch.full((ranks, size), float("nan"), dtype=dtype)
            collectives.gather_into(out, out[rank].copy_(parts[rank]), group, direct=direct)
            assert torch.equal(out.view(-1), torch.cat(parts))
            outs = [torch.empty(size // 3, dtype=dtype), torch.empty(1, size - size // 3, dtype=dtype)]
            collectives.start_reduce_scatter_into(outs, terms_of_rank[rank].clone(), group, direct=direct).wait()
            # Which of the ranks' terms are added up first depends on the sizes.
            torch.testing.assert_close(torch.cat([outs[0], outs[1][0]]), wanted)
    return True


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_direct_messages_bring_the_same(pool, ranks, dtype):
    assert all(pool.run(ranks, both_ways, [1, 7, 40_000], dtype))


def run_model(path, axes, networks):
    """Loss and gradients of a mesh whose ranks believe to be on so many networks, and what it found out."""
    mesh.host_identity = lambda _: str(dist.get_rank() % networks)
    collectives.DIRECT_BYTES = 0
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    model = cuboid.shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), {"tensor_parallel": section})
    ids = torch.arange(6 * 12).view(6, 12) * 7 % 131
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = cuboid.full_gradients(model)
    return float(loss.detach()), gradients, cuboid.mesh_of(model).spans_networks


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(1, 2, 3), (3, 1, 2), (1, 6, 1)], ids=str)
def test_a_mesh_over_networks_computes_what_one_on_a_machine_does(checkpoint, axes):
    path = checkpoint(SmallModel("llama", heads=12, kv_heads=6, layers=1))
    # Their module is changed, so these processes serve no other test.
    with WorkerPool(6) as workers:
        loss, gradients, spans = workers.run(6, run_model, path, axes, 1)[0]
        assert not spans
        direct_loss, direct_gradients, spans = workers.run(6, run_model, path, axes, 3)[0]
    assert spans
    assert direct_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(direct_gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_processes_of_one_machine_have_one_network(pool):
    assert len(set(pool.run(3, host_identity, "net"))) == 1
