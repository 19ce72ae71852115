"""Collectives on plain buffers, as each version of torch and each backend does them best."""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 warns of the older names, which are all that earlier versions have.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Lay the ranks' tensors of n elements end to end, in rank order.

    Args:
        out: contiguous, of ranks·n elements.
        x: contiguous, of n elements.
        group: the ranks.
    """
    _gather(out.view(-1), x.view(-1), group=group)


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up the ranks' tensors of ranks·n elements, and leave the r-th n of the sum with rank r.

    Args:
        out: contiguous, of n elements.
        x: contiguous, of ranks·n elements.
        group: the ranks.
    """
    if dist.get_backend(group) != "gloo":
        _reduce_scatter(out.view(-1), x.view(-1), group=group)
        return
    # gloo's own reduce-scatter is an all-reduce in disguise and sends twice the bytes. Exchanging the slices and
    # adding them here sends what is needed, and adds in the accumulation dtype of `sum` rather than in bfloat16.
    pieces = torch.empty_like(x.view(-1))
    dist.all_to_all_single(pieces, x.view(-1), group=group)
    torch.sum(pieces.view(group.size(), -1), 0, out=out.view(-1))
