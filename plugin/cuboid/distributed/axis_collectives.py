"""Collectives along mesh axes, on plain buffers and on a dim of a tensor.

They are not differentiable: the layers' autograd functions call them in forward and their transposes in backward.
Along axes of one rank they return their input. Functions named ``start_…`` return an
:class:`~cuboid.distributed.async_result.AsyncResult`, so that computing can overlap; the input must not be modified
before it is waited for. The ranks are a :class:`~cuboid.distributed.mesh.AxisGroup`, from :meth:`Mesh.along`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.collectives import (
    DIRECT_BYTES,
    start_exchange,
    start_gather_into,
    start_reduce_scatter_into,
)
from cuboid.distributed.mesh import AxisGroup

#: The sequence's dim in activations ``[B, S, H]``.
SEQUENCE_DIM = 1
_are_positions_whole: ContextVar[bool] = ContextVar("cuboid_whole_positions", default=False)
#: Whether each rank has all positions of the running forward; see :func:`whole_positions`.
positions_are_whole: Callable[[], bool] = _are_positions_whole.get
_are_rows_alike: ContextVar[bool] = ContextVar("cuboid_rows_alike", default=False)
#: Whether all ranks of `batch` have the same rows of the running forward; see :func:`whole_positions`.
rows_are_alike: Callable[[], bool] = _are_rows_alike.get


def start_all_gather(
    x: torch.Tensor, along: AxisGroup, change: Callable[[torch.Tensor], Any] | None = None, *, in_place: bool = False
) -> AsyncResult[Any]:
    """Stack the ranks' tensors: ``[...]`` on each rank to ``[ranks, ...]`` on all of them, in rank order.

    Args:
        x: this rank's tensor.
        along: the ranks.
        change: function of the stack, whose value is the result.
        in_place: copy ``x`` to its slot at once, so that it may be modified or freed while the gather is in flight.
    """
    ranks, group = along.size, along.process_group
    if ranks == 1:
        return AsyncResult(x.unsqueeze(0), change=change)
    assert group is not None, "a mesh that isn't connected"
    x = x.contiguous()
    if positions_are_whole() and along.exchanges and x.nbytes <= DIRECT_BYTES:
        along.counted["all_gather", ranks * x.nbytes] += 1
        return start_exchange(x, group, change)
    out = x.new_empty((ranks, *x.shape))
    if in_place:
        # The collective reads this rank's tensor from its slot of the output.
        x = out[group.rank()].copy_(x)
    along.counted["all_gather", out.nbytes] += 1
    return start_gather_into(out, x, group, direct=along.mesh.spans_networks, change=change)


def start_all_gather_into(out: torch.Tensor, x: torch.Tensor, along: AxisGroup) -> AsyncResult[torch.Tensor]:
    """:func:`start_all_gather` of several ranks into a contiguous tensor ``[ranks, ...]``."""
    assert along.process_group is not None, "a mesh that isn't connected"
    along.counted["all_gather", out.nbytes] += 1
    return start_gather_into(out, x.contiguous(), along.process_group, direct=along.mesh.spans_networks)


def all_gather(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """:func:`start_all_gather`, waited for."""
    stacked: torch.Tensor = start_all_gather(x, along).wait()
    return stacked


def start_reduce_scatter_parts(
    x: torch.Tensor, shapes: Sequence[Sequence[int]], along: AxisGroup, *, exchange: bool = False
) -> AsyncResult[Sequence[torch.Tensor]]:
    """Sum the ranks' ``[ranks, n]``; rank r gets row r of the sum, as several tensors.

    Args:
        x: contiguous; it may be overwritten.
        shapes: of the tensors that make up the n elements of a row, one after another.
        along: more than one rank.
        exchange: see :func:`~cuboid.distributed.collectives.start_reduce_scatter_into`.
    """
    assert along.process_group is not None, "a mesh that isn't connected"
    along.counted["reduce_scatter", x.nbytes] += 1
    outs = list(map(x.new_empty, shapes))
    direct = along.mesh.spans_networks
    return start_reduce_scatter_into(outs, x, along.process_group, direct=direct, exchange=exchange)


def start_reduce_scatter(x: torch.Tensor, along: AxisGroup, *, exchange: bool = False) -> AsyncResult[torch.Tensor]:
    """Sum the ranks' ``[ranks, ...]``; rank r gets slice r of the sum, ``[...]``.

    For ``exchange`` see :func:`~cuboid.distributed.collectives.start_reduce_scatter_into`.
    """
    if along.size == 1:
        return AsyncResult(x.squeeze(0))
    scattering = start_reduce_scatter_parts(x.contiguous(), (x.shape[1:],), along, exchange=exchange)
    return scattering.giving(scattering.incomplete()[0])


def reduce_scatter(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """:func:`start_reduce_scatter`, waited for."""
    return start_reduce_scatter(x, along).wait()


def start_all_reduce(
    x: torch.Tensor, along: AxisGroup, change: Callable[[torch.Tensor], Any] | None = None
) -> AsyncResult[Any]:
    """Sum the ranks' tensors. ``x`` may be overwritten. For ``change``, see :func:`start_all_gather`."""
    if along.size == 1:
        return AsyncResult(x, change=change)
    assert along.process_group is not None, "a mesh that isn't connected"
    x = x.contiguous()
    if positions_are_whole() and along.exchanges and x.nbytes <= DIRECT_BYTES:
        along.counted["all_gather", along.size * x.nbytes] += 1
        return start_exchange(x, along.process_group, partial(_sum_of_ranks, change))
    along.counted["all_reduce", x.nbytes] += 1
    return AsyncResult(x, (dist.all_reduce(x, group=along.process_group, async_op=True),), change=change)


def all_reduce(x: torch.Tensor, along: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Combine the ranks' tensors elementwise. ``x`` may be overwritten; use the result."""
    if along.size == 1:
        return x
    assert along.process_group is not None, "a mesh that isn't connected"
    if op is dist.ReduceOp.SUM and positions_are_whole():
        total: torch.Tensor = start_all_reduce(x, along).wait()
        return total
    x = x.contiguous()
    along.counted["all_reduce", x.nbytes] += 1
    if along.exchanges and along.size == 2 and op is dist.ReduceOp.SUM:
        # gloo's all-reduce takes four times as many system calls as an exchange. Either order gives the same sum.
        received, counts = torch.empty_like(x), [x.numel(), 0] if along.index else [0, x.numel()]
        dist.all_to_all_single(received.view(-1), x.view(-1), counts, counts, group=along.process_group)
        return x.add_(received)
    dist.all_reduce(x, op=op, group=along.process_group)
    return x


def _sum_of_ranks(change: Callable[[torch.Tensor], Any] | None, stacked: torch.Tensor) -> Any:
    # In the order of the ranks, so that all of them get the same sum, bit by bit.
    total = stacked.sum(0, dtype=stacked.dtype)
    return total if change is None else change(total)


@contextmanager
def whole_positions(*, rows_alike: bool = False) -> Iterator[None]:
    """In the ``with`` block, this thread's forward isn't cut over its positions: each rank has all of them.

    So run the steps of a generation, of few tokens and without a graph. What cuts a sequence elsewhere, or the head's
    positions over `hidden`, gives all ranks the sum then, and nothing is gathered. A product and its neighbour send as
    many bytes as otherwise, in half as many messages.

    Args:
        rows_alike: whether the micro-batch has a single row, of which the ranks of `batch` have copies.
    """
    token, rows_token = _are_positions_whole.set(True), _are_rows_alike.set(rows_alike)
    try:
        yield
    finally:
        _are_positions_whole.reset(token)
        _are_rows_alike.reset(rows_token)


def gather_positions(x: torch.Tensor, along: AxisGroup, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """All-gather positions, unless they are whole: ``[B, S/n, ...]`` to ``[B, S, ...]``."""
    return x if positions_are_whole() else gather_dim(x, dim, along)


def scatter_positions(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """Partial sums ``[B, S, ...]`` to the rank's positions of the sum, ``[B, S/n, ...]``, or to all if it has all."""
    return all_reduce(x, along) if positions_are_whole() else scatter_dim(x, SEQUENCE_DIM, along)


def own_positions(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """The rank's positions of ``[B, S, ...]``. A view."""
    return x if positions_are_whole() else own_slice(x, SEQUENCE_DIM, along)


def cut_positions(length: int, ranks: int) -> int:
    """The number of a rank's positions, of ``length`` positions over ``ranks`` ranks."""
    return length if positions_are_whole() else length // ranks


def start_gather_dim(x: torch.Tensor, dim: int, along: AxisGroup) -> AsyncResult[torch.Tensor]:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]`` on all."""
    if along.size == 1:
        return AsyncResult(x)
    dim %= x.dim()
    # [ranks, ..., n, ...] -> [..., ranks · n, ...]; `flatten` copies only if dims of several elements precede `dim`.
    return start_all_gather(x, along, lambda stacked: stacked.movedim(0, dim).flatten(dim, dim + 1))


def gather_dim(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """:func:`start_gather_dim`, waited for."""
    return start_gather_dim(x, dim, along).wait()


def scatter_dim(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to a slice of the sum, ``[..., n, ...]``."""
    if along.size == 1:
        return x
    dim %= x.dim()
    # [..., ranks · n, ...] -> [ranks, ..., n, ...]
    stacked = x.unflatten(dim, (along.size, x.shape[dim] // along.size)).movedim(dim, 0)
    return reduce_scatter(stacked, along)


def own_slice(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """This rank's slice of a dim that isn't split yet. A view."""
    length = x.shape[dim] // along.size
    return x.narrow(dim, along.index * length, length)


def padded_length(length: int, pieces: int) -> int:
    """``length``, rounded up to a multiple of ``pieces``."""
    return math.ceil(length / pieces) * pieces
