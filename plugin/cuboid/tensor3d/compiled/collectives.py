"""Collectives along mesh axes inside of a compiled graph, differentiable; along axes of one rank, the input itself.

They are torch's functional collectives, which Inductor schedules, and whose transposes it differentiates.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, own_slice
from cuboid.distributed.mesh import AxisGroup, Mesh

# torch 2.13 warns of the older names, which are all that earlier versions have.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def _group(along: AxisGroup) -> dist.ProcessGroup:
    assert along.process_group is not None, "a mesh that isn't connected"
    return along.process_group


def gather(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]``."""
    if along.size == 1:
        return x
    dim = dim % x.dim()
    # No copy where all dims before it have one element, such as that of a single row.
    return torch.flatten(torch.movedim(stack(x, along), 0, dim), dim, dim + 1)


def stack(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """All-gather of several ranks' tensors: ``[...]`` on each rank to ``[ranks, ...]``."""
    return torch.unflatten(_all_gather(x, 0, _group(along)), 0, (along.size, x.shape[0]))


def scatter(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to a slice of the sum, ``[..., n, ...]``."""
    if along.size == 1:
        return x
    return cast(torch.Tensor, _reduce_scatter(x, "sum", dim % x.dim(), _group(along)))


def scatter_parts(y: torch.Tensor, parts: int, along: AxisGroup) -> torch.Tensor:
    """Reduce-scatter of features, of whose ``parts`` each rank gets a piece of every one."""
    if parts > 1 and along.size > 1:
        # [..., parts, ranks, n] -> [..., ranks, parts, n]
        y = torch.unflatten(y, -1, (parts, along.size, -1)).transpose(-3, -2).flatten(-3)
    return scatter(y, -1, along)


class _SumInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.along = along
        return _all_gather(x.unsqueeze(0), 0, _group(along)).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.all_reduce(gradient, "sum", _group(ctx.along)), None


def sum_in_order(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """:func:`sum_over` with the same bits on all ranks, which no backend's all-reduce guarantees."""
    return x if along.size == 1 else _SumInOrder.apply(x, along)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence: AxisGroup, hidden: AxisGroup) -> torch.Tensor:
        ctx.sequence, ctx.hidden = sequence, hidden
        return gather(gather(x, -1, hidden), SEQUENCE_DIM, sequence).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        positions = own_slice(gradient, SEQUENCE_DIM, ctx.sequence)
        return own_slice(positions, -1, ctx.hidden).contiguous(), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence: AxisGroup, hidden: AxisGroup) -> torch.Tensor:
        ctx.sequence, ctx.hidden = sequence, hidden
        # Not a view, because some models add to it in place.
        return own_slice(own_slice(x, SEQUENCE_DIM, sequence), -1, hidden).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather(gather(gradient, -1, ctx.hidden), SEQUENCE_DIM, ctx.sequence), None, None


def whole(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """``[B/b, S/s, H/h]`` to ``[B/b, S, H]``, from which all ranks of sequence × hidden compute the same."""
    activation: torch.Tensor = _Whole.apply(x, mesh.along("sequence"), mesh.along("hidden"))
    return activation


def part(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The transpose of :func:`whole`."""
    activation: torch.Tensor = _Part.apply(x, mesh.along("sequence"), mesh.along("hidden"))
    return activation


def max_over(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """All-reduce to the largest, of what needs no gradient."""
    return x if along.size == 1 else functional.all_reduce(x, "max", _group(along))


def sum_over(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """All-reduce of partial sums. Each rank uses them for what is its own, so that the backward is the same sum."""
    return x if along.size == 1 else functional.all_reduce(x, "sum", _group(along))
