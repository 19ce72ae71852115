"""Collectives along mesh axes, on plain buffers and on a dim of a tensor.

None of these is differentiable by itself: the layers' autograd functions call them in forward and backward, each
as the transpose of the other. Along axes of one rank they do nothing and return their input. What starts one
returns it pending, so that computing can go on meanwhile; its input must not change until it was waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.collectives import start_gather, start_reduce_scatter
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis

#: Of activations ``[B, S, H]``.
SEQUENCE_DIM = 1


def start_all_gather(x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> AsyncResult[torch.Tensor]:
    """Stack the ranks' tensors: ``[...]`` on each to ``[ranks, ...]`` on all, in rank order."""
    along = mesh.along(axes)
    ranks, group = along.size, along.process_group
    if ranks == 1:
        return AsyncResult(x.unsqueeze(0))
    assert group is not None, "a mesh that isn't connected"
    x = x.contiguous()
    out = x.new_empty((ranks, *x.shape))
    mesh.traffic.record("all_gather", along.label, out.nbytes, ranks)
    return start_gather(out, x, group, direct=mesh.spans_networks)


def all_gather(x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    """:func:`start_all_gather`, waited for."""
    return start_all_gather(x, mesh, axes).wait()


def start_scatter_parts(
    x: torch.Tensor, shapes: Sequence[Sequence[int]], mesh: Mesh, axes: tuple[Axis, ...]
) -> AsyncResult[Sequence[torch.Tensor]]:
    """Add up the ranks' ``[ranks, n]`` and leave slice r of the sum with rank r, as several tensors.

    Args:
        x: contiguous; it may be overwritten.
        shapes: of the tensors that the n elements of a slice are, one after the other.
        mesh, axes: along several ranks.
    """
    along = mesh.along(axes)
    assert along.process_group is not None, "a mesh that isn't connected"
    mesh.traffic.record("reduce_scatter", along.label, x.nbytes, along.size)
    outs = [x.new_empty(shape) for shape in shapes]
    return start_reduce_scatter(outs, x, along.process_group, direct=mesh.spans_networks)


def start_scatter(x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> AsyncResult[torch.Tensor]:
    """Add up the ranks' ``[ranks, ...]`` and leave slice r of the sum with rank r, as ``[...]``."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return AsyncResult(x.squeeze(0))
    scattering = start_scatter_parts(x.contiguous(), [x.shape[1:]], mesh, axes)
    return scattering.giving(scattering.incomplete()[0])


def reduce_scatter(x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    """:func:`start_scatter`, waited for."""
    return start_scatter(x, mesh, axes).wait()


def all_reduce(
    x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Combine the ranks' tensors elementwise. ``x`` may be overwritten; use the result."""
    return start_all_reduce(x, mesh, axes, op).wait()


def start_all_reduce(
    x: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> AsyncResult[torch.Tensor]:
    """As :func:`all_reduce`."""
    along = mesh.along(axes)
    if along.size == 1:
        return AsyncResult(x)
    assert along.process_group is not None, "a mesh that isn't connected"
    x = x.contiguous()
    mesh.traffic.record("all_reduce", along.label, x.nbytes, along.size)
    return AsyncResult(x, [dist.all_reduce(x, op=op, group=along.process_group, async_op=True)])


def start_gather_dim(x: torch.Tensor, dim: int, mesh: Mesh, axes: tuple[Axis, ...]) -> AsyncResult[torch.Tensor]:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]`` on all."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return AsyncResult(x)
    dim %= x.dim()
    shape = (*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    # Dims of size 1 before `dim` need no copy, which `reshape` finds out by itself.
    return start_all_gather(x, mesh, axes).then(lambda stacked: stacked.movedim(0, dim).reshape(shape))


def gather_dim(x: torch.Tensor, dim: int, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    """:func:`start_gather_dim`, waited for."""
    return start_gather_dim(x, dim, mesh, axes).wait()


def scatter_dim(x: torch.Tensor, dim: int, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to the sum's own slice ``[..., n, ...]``."""
    ranks = mesh.size(*axes)
    if ranks == 1:
        return x
    dim %= x.dim()
    stacked = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0)
    return reduce_scatter(stacked, mesh, axes)


def own_slice(x: torch.Tensor, dim: int, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    """This rank's piece of a dim that all ranks hold whole. A view."""
    length = x.shape[dim] // mesh.size(*axes)
    return x.narrow(dim, mesh.index(*axes) * length, length)


def padded_length(length: int, pieces: int) -> int:
    """The next multiple of ``pieces``."""
    return math.ceil(length / pieces) * pieces
