"""Several ranks on one GPU: every collective through the host gives what gloo gives."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.verify import SmallModel, WorkerPool
from cuboid.verify.workers.staged_group import STAGED, StagedGroup, register_staged

RANKS = 4


def everything(group):
    """What each collective leaves on this rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(RANKS * 3)
    results = []
    for name in ("broadcast", "all_reduce"):
        local = x.clone()
        getattr(dist, name)(local, *([1] if name == "broadcast" else []), group=group)
        results.append(local)
    out = torch.empty(RANKS, RANKS * 3)
    work = dist.all_gather_into_tensor(out.view(-1), x, group=group, async_op=True)
    work.wait()
    results.append(out)
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x, group=group)
    results += parts
    parts = [torch.empty_like(x) for _ in range(RANKS)] if rank == 2 else None
    dist.gather(x, parts, dst=2, group=group)
    results += parts or []
    local = torch.empty_like(x)
    dist.scatter(local, [x * (r + 1) for r in range(RANKS)] if rank == 1 else None, src=1, group=group)
    results.append(local)
    local = torch.empty(3)
    dist.reduce_scatter_tensor(local, x.clone(), group=group)
    results.append(local)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    results.append(out)
    received = torch.empty_like(x)
    works = [dist.irecv(received, (rank - 1) % RANKS, group=group), dist.isend(x, (rank + 1) % RANKS, group=group)]
    for work in works:
        work.wait()
    results.append(received)
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert [one["rank"] for one in objects] == list(range(RANKS))
    dist.barrier(group=group)
    return results


def both():
    """By gloo, and staged although the tensors are on the CPU."""
    register_staged()
    StagedGroup.is_staged = lambda self, tensor: True
    staged = dist.new_group(backend=STAGED)
    assert dist.get_backend(staged) == STAGED
    return everything(dist.group.WORLD), everything(staged)


def test_collectives_are_gloos(pool):
    for with_gloo, staged in pool.run(RANKS, both):
        for one, other in zip(with_gloo, staged, strict=True):
            assert torch.equal(one, other)


class StagedPool(WorkerPool):
    backend = STAGED


def train(path):
    """Loss and gradients of a mesh of four."""
    StagedGroup.is_staged = lambda self, tensor: True
    section = {"mode": "3d_tensor", "mesh": {"batch": 2, "sequence": 2}}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model = cuboid.shard(model, {"tensor_parallel": section})
    ids = torch.arange(4 * 8).view(4, 8) * 7 % 131
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), cuboid.full_gradients(model), dist.get_backend()


def test_a_mesh_runs_on_it(pool, checkpoint):
    path = checkpoint(SmallModel("llama", layers=1))
    loss, gradients, _ = pool.run(RANKS, train, path)[0]
    with StagedPool(RANKS) as workers:
        staged_loss, staged, backend = workers.run(RANKS, train, path)[0]
    assert backend == STAGED
    assert staged_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(staged[name], gradient, rtol=1e-10, atol=1e-12)
