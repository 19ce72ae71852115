"""Collectives on plain buffers, in the fastest way that the torch version and the backend offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.async_result import AsyncResult

# torch 2.13 warns of the older names, which are all that earlier versions have.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: Minimum bytes of a message for which sending it directly saves more on a link than it costs to set up; up to them,
#: what counts is the number of messages.
DIRECT_BYTES = 64 << 10
#: Maximum number of ranks for which direct messages between all of them are faster than gloo's ring.
_DIRECT_GATHER_RANKS = 4


def start_gather_into(
    out: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    direct: bool = False,
    change: Callable[[torch.Tensor], Any] | None = None,
) -> AsyncResult[Any]:
    """Start to all-gather the ranks' tensors of n elements, end to end in rank order.

    Args:
        out: contiguous, of ranks·n elements.
        x: contiguous, of n elements; may be this rank's slot of ``out``, as NCCL and gloo allow.
        group: the ranks.
        direct: whether gloo's ranks may send to each other directly where that uses a network better.
        change: function of the complete ``out``, whose value is the result.

    Returns:
        ``out``, or the value of ``change``.
    """
    ranks = group.size()
    direct = direct and ranks <= _DIRECT_GATHER_RANKS and x.nbytes >= DIRECT_BYTES
    # Repeats exchanges_directly, which a step would call too often here.
    is_pair = ranks == 2 and not getattr(group, "in_threads", False) and dist.get_backend(group) == "gloo"
    if not direct and not is_pair:
        return AsyncResult(out, [_gather(out.view(-1), x.view(-1), group=group, async_op=True)], holds=x, change=change)
    slots, flat, rank = out.view(ranks, -1), x.view(-1), group.rank()
    slot, works = slots[rank], []
    if not direct:
        # gloo's all-gather receives into a buffer of its own and copies that, which takes twice as long as an exchange.
        counts = [0, x.numel()] if rank == 0 else [x.numel(), 0]
        works = [dist.all_to_all_single(slots[1 - rank], flat, counts, counts, group=group, async_op=True)]
    if slot.data_ptr() != x.data_ptr():
        slot.copy_(flat)
    if direct:
        works = _exchange(slots, [slot] * ranks, group)
    return AsyncResult(out, works, holds=x, change=change)


def exchanges_directly(group: dist.ProcessGroup) -> bool:
    """Whether :func:`start_exchange` is faster than a collective for messages up to :data:`DIRECT_BYTES`.

    It is over gloo with few ranks, whose all-gather and all-reduce of some bytes take two and three times as long as an
    all-to-all.
    """
    if getattr(group, "in_threads", False) or group.size() > _DIRECT_GATHER_RANKS:
        return False
    return bool(dist.get_backend(group) == "gloo")


def start_exchange(
    x: torch.Tensor, group: dist.ProcessGroup, change: Callable[[torch.Tensor], Any] | None = None
) -> AsyncResult[Any]:
    """As :func:`start_gather_into`, where :func:`exchanges_directly` says so."""
    ranks, rank = group.size(), group.rank()
    out = x.new_empty((ranks, *x.shape))
    if ranks > 2:
        work = dist.all_to_all_single(out.view(-1), x.view(-1).repeat(ranks), group=group, async_op=True)
        return AsyncResult(out, (work,), change=change)
    counts = [0, x.numel()] if rank == 0 else [x.numel(), 0]
    work = dist.all_to_all_single(out[1 - rank].view(-1), x.view(-1), counts, counts, group=group, async_op=True)
    out[rank].copy_(x)
    return AsyncResult(out, (work,), holds=x, change=change)


def gather_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, *, direct: bool = False) -> None:
    """:func:`start_gather_into`, waited for."""
    start_gather_into(out, x, group, direct=direct).wait()


def start_reduce_scatter_into(
    outs: Sequence[torch.Tensor],
    x: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    direct: bool = False,
    exchange: bool = False,
) -> AsyncResult[Sequence[torch.Tensor]]:
    """Start to sum the ranks' tensors of ranks·n elements; rank r gets the r-th n elements of the sum.

    Args:
        outs: contiguous tensors that receive the n elements, in order.
        x: contiguous, of ranks·n elements; it may be overwritten.
        group: the ranks.
        direct: as for :func:`start_gather_into`.
        exchange: whether backends other than gloo exchange slices too (all-to-all), so that each rank sums its own.
            Otherwise they add in x's dtype on the way, which rounds a sum of bfloat16 once for each rank but the first.

    Returns:
        ``outs``.
    """
    # Groups of threads aren't registered with torch.distributed, so that they have no backend to ask for.
    in_threads = getattr(group, "in_threads", False)
    # A sum of two terms is rounded once in either case.
    spares_exchange = not exchange or group.size() <= 2
    if in_threads or (dist.get_backend(group) != "gloo" and spares_exchange):
        return _own_reduce_scatter(outs, x, group)
    # gloo's own reduce-scatter runs an all-reduce and sends twice the bytes. Exchanging the slices sends only what is
    # needed, and `sum` adds them in its accumulation dtype rather than in bfloat16.
    ranks, rank = group.size(), group.rank()
    slices = x.view(ranks, -1)
    own_slice = slices[rank]
    direct = direct and own_slice.nbytes >= DIRECT_BYTES
    is_single = len(outs) == 1
    finish: Callable[[], object]
    if ranks == 2:
        # A single result receives the peer's slice directly, and this rank's own slice is added to it.
        peer_slice = slices[1 - rank]
        recv_buffer = outs[0].view(-1) if is_single else torch.empty_like(own_slice)
        finish = partial(recv_buffer.add_, own_slice) if is_single else partial(_add_up, outs, recv_buffer, own_slice)
        if direct:
            return AsyncResult(
                outs, _exchange((recv_buffer, recv_buffer), (peer_slice, peer_slice), group), finish, holds=x
            )
        counts = [0, peer_slice.numel()] if rank == 0 else [peer_slice.numel(), 0]
        work = dist.all_to_all_single(recv_buffer, peer_slice, counts, counts, group=group, async_op=True)
        return AsyncResult(outs, (work,), finish, holds=x)
    pieces = torch.empty_like(slices)
    finish = partial(torch.sum, pieces, 0, out=outs[0].view(-1)) if is_single else partial(_add_up, outs, pieces)
    if direct:
        pieces[rank].copy_(own_slice)
        return AsyncResult(outs, _exchange(pieces, slices, group), finish, holds=x)
    work = dist.all_to_all_single(pieces.view(-1), x.view(-1), group=group, async_op=True)
    return AsyncResult(outs, (work,), finish, holds=x)


def _add_up(outs: Sequence[torch.Tensor], pieces: torch.Tensor, own_slice: torch.Tensor | None = None) -> None:
    """Write a sum to ``outs``, in order: that of the rows of ``pieces`` ``[ranks, n]``, or of two tensors ``[n]``."""
    start = 0
    for out in outs:
        place = slice(start, start + out.numel())
        if own_slice is None:
            torch.sum(pieces[:, place], 0, out=out.view(-1))
        else:
            torch.add(pieces[place], own_slice[place], out=out.view(-1))
        start = place.stop


def _own_reduce_scatter(
    outs: Sequence[torch.Tensor], x: torch.Tensor, group: dist.ProcessGroup
) -> AsyncResult[Sequence[torch.Tensor]]:
    """The backend's own reduce-scatter, which has a single output."""
    if len(outs) == 1:
        return AsyncResult(outs, [_reduce_scatter(outs[0].view(-1), x.view(-1), group=group, async_op=True)], holds=x)
    total = x.new_empty(sum(out.numel() for out in outs))

    def copy_out() -> None:
        for out, part in zip(outs, total.split([out.numel() for out in outs]), strict=True):
            out.view(-1).copy_(part)

    return AsyncResult(outs, [_reduce_scatter(total, x.view(-1), group=group, async_op=True)], copy_out, holds=x)


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, *, direct: bool = False) -> None:
    """:func:`start_reduce_scatter_into` with one output, waited for."""
    start_reduce_scatter_into([out], x, group, direct=direct).wait()


def _exchange(
    recv_buffers: Sequence[torch.Tensor] | torch.Tensor,
    send_buffers: Sequence[torch.Tensor] | torch.Tensor,
    group: dist.ProcessGroup,
) -> list[dist.Work | None]:
    """Send ``send_buffers[r]`` to every other rank r and receive ``recv_buffers[r]`` from it, both ways at once.

    gloo's own all-to-all often does one after the other. Receives come first, so that it never waits for a slow peer.
    """
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [dist.irecv(recv_buffers[rank], group=group, group_src=rank) for rank in peers]
    return works + [dist.isend(send_buffers[rank], group=group, group_dst=rank) for rank in peers]


def sum_over_ranks(numbers: Sequence[float] | torch.Tensor, device: torch.device) -> Any:
    """The sum of each number over all ranks, as a list in the shape of ``numbers``; collective over the world."""
    sums = torch.as_tensor(numbers, dtype=torch.float64, device=device).clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums.tolist()
