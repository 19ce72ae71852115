"""Flat parameters, gradient buffers, norms, and optimizers over several replicas."""

import functools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.optim.data_parallel_optimizer import replica_optimizer
from cuboid.optim.flat_params import FlatParameters
from cuboid.optim.grad_buffer import GradientBuffer, gradient_of, starts_of
from cuboid.optim.grad_norm import scale_to, total_norm

shapes = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


def parameters_of(given_shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in given_shapes]


@given(shapes, st.integers(1, 5), st.booleans())
def test_every_element_has_one_owner_among_the_replicas_and_keeps_its_value(given_shapes, parts, low):
    dtype = torch.bfloat16 if low else torch.float32
    originals = parameters_of(given_shapes)
    names = [f"p{place}" for place in range(len(originals))]
    seen = {name: torch.zeros(parameter.numel()) for name, parameter in zip(names, originals, strict=True)}
    lengths = set()
    for index in range(parts):
        parameters = parameters_of(given_shapes)
        flat = FlatParameters(parameters, torch.float32, dtype, (index, parts))
        lengths.add(flat.master.numel())
        stepped = flat.optimizer_tensor({id(p): name for p, name in zip(parameters, names, strict=True)})
        assert stepped.names == tuple(names)
        for slot in stepped.slots:
            original = originals[names.index(slot.name)].detach().reshape(-1)[slot.start : slot.start + slot.numel]
            # Master weights keep the precision that the weights were loaded with.
            assert torch.equal(stepped.tensor[slot.offset : slot.offset + slot.numel], original)
            seen[slot.name][slot.start : slot.start + slot.numel] += 1
        for parameter, original in zip(parameters, originals, strict=True):
            assert torch.equal(parameter, original.to(dtype))
    assert len(lengths) == 1
    assert all(bool((count == 1).all()) for count in seen.values())


@given(shapes)
def test_parameters_are_aligned_and_never_overlap(given_shapes):
    parameters = parameters_of(given_shapes)
    starts = starts_of(parameters)
    assert len(starts) == len(parameters) + 1
    assert all(start % 64 == 0 for start in starts)
    for parameter, (start, following) in zip(parameters, pairwise(starts), strict=True):
        assert start + parameter.numel() <= following < start + parameter.numel() + 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_accumulates_and_collects_replaced_gradients(dtype):
    parameters = parameters_of([(3, 2), (5,)], dtype)
    buffer = GradientBuffer(parameters, torch.float32)
    for _ in range(2):
        (parameters[0].sum() * 3 + (parameters[1] * 2).sum()).backward()
    assert [float(gradient_of(p).mean()) for p in parameters] == [6, 4]
    assert (parameters[0].grad is None) == (dtype == torch.bfloat16)
    if dtype == torch.float32:
        parameters[0].grad, parameters[1].grad = torch.full((3, 2), 9.0), None
        assert float(buffer.collect().sum()) == 54
        assert [float(p.grad.sum()) for p in parameters] == [54, 0]
    buffer.clear()
    assert float(buffer.collect().abs().sum()) == 0
    (parameters[1] * 2).sum().backward()
    assert float(buffer.collect().sum()) == 10


def test_accumulation_in_float32_keeps_what_bfloat16_would_lose():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    GradientBuffer([weight], torch.float32)
    for share in (256.0, 1.0, 1.0, 1.0):
        (weight * share).sum().backward()
    assert float(gradient_of(weight)) == 259


@pytest.mark.parametrize("initial", [0.0, 0.5])
def test_adagrad_begins_with_the_sums_that_it_was_made_with(initial):
    low_precision, plain = parameters_of([(3, 2), (5,)]), parameters_of([(3, 2), (5,)])
    for dtype, parameters in ((torch.bfloat16, low_precision), (None, plain)):
        optimizer = torch.optim.Adagrad(parameters, lr=1.0, initial_accumulator_value=initial)
        replicated = replica_optimizer(optimizer, Mesh(MeshShape()), dtype, split=False)
        (parameters[0].sum() * 3 + (parameters[1] * 2).sum()).backward()
        replicated.reduce()
        replicated.step()
    for low, exact in zip(low_precision, plain, strict=True):
        # The masters are float32 as the plain weights are, and rounded once.
        assert torch.equal(low, exact.to(torch.bfloat16))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_the_norm_is_that_of_all_gradients_as_one_vector(sizes, kind):
    generator = torch.Generator().manual_seed(len(sizes))
    gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    norm = total_norm(gradients, [], kind, torch.ones((), dtype=torch.float64))
    assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(torch.cat(gradients), kind)), rel=1e-12)
    scale_to(gradients, norm, float(norm) / 2)
    assert float(torch.linalg.vector_norm(torch.cat(gradients), kind)) == pytest.approx(float(norm) / 2, rel=1e-5)
    kept = [gradient.clone() for gradient in gradients]
    scale_to(gradients, norm, float(norm) * 2)
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


def test_a_rank_without_gradients_has_the_norm_of_none():
    assert total_norm([], [], 2.0, torch.ones(())).item() == 0
    assert total_norm([torch.empty(0)], [], math.inf, torch.ones(())).item() == 0


def steps_on(shapes_given, dtype, split, frozen):
    """Parameters after some steps on different gradients per replica, and the sum of these."""
    mesh = Mesh(MeshShape())
    mesh.connect()
    parameters = parameters_of(shapes_given, torch.float64 if dtype is None else torch.float32)
    parameters[frozen].requires_grad_(False)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.3, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    replicated = replica_optimizer(optimizer, mesh, dtype, split=split)
    for step in range(3):
        for _ in range(2):
            total = sum((p * (mesh.rank + step + place)).sum() for place, p in enumerate(parameters) if p.requires_grad)
            (total + (parameters[0] ** 2).sum() / mesh.topology.data).backward()
        replicated.reduce()
        if step == 1:
            # One more backward after the gradients were reduced.
            replicated.reopen()
            replicated.reduce()
        replicated.step()
        replicated.clear()
    values = [parameter.detach().clone() for parameter in parameters]
    return values, sum(p.numel() for group in optimizer.param_groups for p in group["params"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_step_like_one_process(pool, replicas, split):
    given_shapes, frozen = [(3, 5), (70,), (), (4, 4, 2)], 1
    results = pool.run(replicas, functools.partial(steps_on, given_shapes, None, split, frozen))
    alone = parameters_of(given_shapes, torch.float64)
    alone[frozen].requires_grad_(False)
    groups = [{"params": alone[:2]}, {"params": alone[2:], "lr": 0.3, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for step in range(3):
        for _ in range(2):
            factors = [sum(rank + step + place for rank in range(replicas)) for place in range(len(alone))]
            total = sum((p * factor).sum() for p, factor in zip(alone, factors, strict=True) if p.requires_grad)
            (total + (alone[0] ** 2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values, held in results:
        for value, wanted in zip(values, alone, strict=True):
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
        if split and replicas > 1:
            assert held < sum(p.numel() for p in alone if p.requires_grad) / replicas + 64 * len(alone)


@pytest.mark.parametrize("split", [False, True])
def test_replicas_in_bfloat16_stay_equal_and_near_float32(pool, split):
    given_shapes = [(3, 5), (70,), (), (4, 4, 2)]
    results = pool.run(3, functools.partial(steps_on, given_shapes, torch.bfloat16, split, 1))
    exact = pool.run(3, functools.partial(steps_on, given_shapes, None, False, 1))[0][0]
    for values, _ in results:
        for place, value in enumerate(values):
            assert torch.equal(value, results[0][0][place])
            if place != 1:
                assert value.dtype == torch.bfloat16
            torch.testing.assert_close(value.double(), exact[place], rtol=2e-2, atol=2e-2)
