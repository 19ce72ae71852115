"""Collectives along mesh axes, on plain buffers and on a dim of a tensor.

None of these is differentiable by itself: the layers' autograd functions call them in forward and backward, each
as the transpose of the other. Along axes of one rank they do nothing and return their input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cuboid.collectives import gather_into, reduce_scatter_into
from cuboid.mesh import Mesh
from cuboid.topology import Axis


def all_gather(x: torch.Tensor, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor:
    """Stack the ranks' tensors: ``[...]`` on each to ``[ranks, ...]`` on all, in rank order."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x.unsqueeze(0)
    x = x.contiguous()
    out = x.new_empty((ranks, *x.shape))
    mesh.traffic.record("all_gather", mesh.split_axes(axes), out.nbytes, ranks)
    gather_into(out, x, mesh.group(axes), direct=mesh.spans_networks)
    return out


def reduce_scatter(x: torch.Tensor, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor:
    """Add up the ranks' ``[ranks, ...]`` and leave slice r of the sum with rank r, as ``[...]``."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x.squeeze(0)
    x = x.contiguous()
    mesh.traffic.record("reduce_scatter", mesh.split_axes(axes), x.nbytes, ranks)
    out = x.new_empty(x.shape[1:])
    reduce_scatter_into(out, x, mesh.group(axes), direct=mesh.spans_networks)
    return out


def all_reduce(
    x: torch.Tensor, mesh: Mesh, axes: Sequence[Axis], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Combine the ranks' tensors elementwise. ``x`` may be overwritten; use the result."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x
    x = x.contiguous()
    mesh.traffic.record("all_reduce", mesh.split_axes(axes), x.nbytes, ranks)
    dist.all_reduce(x, op=op, group=mesh.group(axes))
    return x


def gather_dim(x: torch.Tensor, dim: int, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]`` on all."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x
    dim %= x.dim()
    stacked = all_gather(x, mesh, axes)
    shape = (*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    # Dims of size 1 before `dim` need no copy, which `reshape` finds out by itself.
    return stacked.movedim(0, dim).reshape(shape)


def scatter_dim(x: torch.Tensor, dim: int, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to the sum's own slice ``[..., n, ...]``."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x
    dim %= x.dim()
    stacked = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0)
    return reduce_scatter(stacked, mesh, axes)


def own_slice(x: torch.Tensor, dim: int, mesh: Mesh, axes: Sequence[Axis]) -> torch.Tensor:
    """This rank's piece of a dim that all ranks hold whole. A view."""
    length = x.shape[dim] // mesh.size(*axes)
    return x.narrow(dim, mesh.index(*axes) * length, length)


def padded_length(length: int, pieces: int) -> int:
    """The next multiple of ``pieces``."""
    return math.ceil(length / pieces) * pieces
