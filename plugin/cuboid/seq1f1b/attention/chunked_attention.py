"""Causal attention of one segment to itself and to all segments before it.

Two ways, alike in what they do with the store of keys and values. :func:`attend_segment` is two fused kernels, one for
the past and one for the segment itself, merged by their log-sum-exps; no mask exists. :func:`prefix` gives whatever
kernel a model needs the keys and values of the past together with the segment's own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cuboid.seq1f1b.attention.kernels import choose_kernel
from cuboid.seq1f1b.attention.kv_cache import KVCache


def attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    store: KVCache,
    layer: Hashable,
    start: int,
    scale: float,
) -> torch.Tensor:
    """Plain causal attention of a segment of L positions.

    Args:
        query: ``[B, Hq, L, D]``; Hq is a multiple of Hkv.
        key: ``[B, Hkv, L, D]``.
        value: ``[B, Hkv, L, Dv]``.
        store: holds keys and values of the positions before ``start``, and gets these.
        layer: names the layer in the store.
        start: the segment's first position.
        scale: of the scores.

    Returns:
        ``[B, Hq, L, Dv]``.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for torch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    out: torch.Tensor = _AttendSegment.apply(query, key, value, store, layer, start, scale)
    return out


def prefix(
    key: torch.Tensor, value: torch.Tensor, store: KVCache, layer: Hashable, start: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values from position ``first`` to the end of a segment, not copied.

    Args:
        key, value: the segment's own, ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``.
        store, layer, start: as for :func:`attend_segment`.
        first: at most ``start``.

    Returns:
        ``[B, Hkv, start + L - first, D]`` and the same with Dv.
    """
    keys, values = _Prefix.apply(key, value, store, layer, start, first)
    return keys, values


class _AttendSegment(torch.autograd.Function):
    """Saves the query, the merged output and its log-sum-exp; keys and values are in the store."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        store: KVCache,
        layer: Hashable,
        start: int,
        scale: float,
    ) -> torch.Tensor:
        store.write(layer, start, key, value)
        kernel = choose_kernel(query, key, value)
        group = 1 if kernel.knows_groups else query.shape[1] // key.shape[1]
        own = _expand(key, group), _expand(value, group)
        out, lse = kernel.forward(query, *own, causal=True, scale=scale)
        if start > 0:
            past = kernel.forward(_fold(query, group), *store.read(layer, 0, start), causal=False, scale=scale)
            _merge(_by_group(out, group), _by_group(lse, group), *(_unfold(x, group) for x in past))
        if ctx.needs_input_grad[0] and query.untyped_storage().nbytes() > query.nbytes:
            # A view of a fused projection's result would keep keys and values once more.
            query = query.clone()
        ctx.save_for_backward(query, out, lse)
        ctx.place = (store, layer, start)
        ctx.call = (kernel, group, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse = ctx.saved_tensors
        (store, layer, start), (kernel, group, scale) = ctx.place, ctx.call
        own = (_expand(x, group) for x in store.read(layer, start, start + query.shape[2]))
        dq, dk, dv = kernel.backward(grad, query, *own, out, lse, causal=True, scale=scale)
        if start > 0:
            grad, folded, out, lse = (_fold(x, group) for x in (grad, query, out, lse))
            past = store.read(layer, 0, start)
            dq_past, dk_past, dv_past = kernel.backward(grad, folded, *past, out, lse, causal=False, scale=scale)
            _by_group(dq, group).add_(_unfold(dq_past, group))
            if any(ctx.needs_input_grad[1:3]):
                store.add_gradients(layer, 0, dk_past, dv_past)
        dk, dv = store.with_gradients(layer, start, _group_sum(dk, group), _group_sum(dv, group))
        if start == 0:
            store.free_layer(layer)
        return dq, dk, dv, None, None, None, None


class _Prefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, store: KVCache, layer: Hashable, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        store.write(layer, start, key, value)
        ctx.place = (store, layer, start, first)
        return store.read(layer, first, start + key.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        store, layer, start, first = ctx.place
        past = start - first
        if any(ctx.needs_input_grad[:2]):
            store.add_gradients(layer, first, dk[:, :, :past], dv[:, :, :past])
        dk, dv = store.with_gradients(layer, start, dk[:, :, past:], dv[:, :, past:])
        if start == 0:
            store.free_layer(layer)
        return dk, dv, None, None, None, None


# A group is the query heads that share one key head. For kernels that know groups by themselves it is taken to be one
# head. Others are given as many query heads as key heads: for the segment itself its few keys are repeated; for the
# past, which may be long, the group becomes more queries. That is right as no mask tells one query from another.


def _expand(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hkv, L, D]`` to ``[B, Hq, L, D]``."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, group · L, …]``."""
    return x if group == 1 else _by_group(x, group).flatten(2, 3)


def _unfold(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hkv, group · L, …]`` to ``[B, Hkv, group, L, …]``, not copied."""
    return x.unflatten(2, (group, -1))


def _by_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, group, L, …]``, not copied."""
    return x.unflatten(1, (-1, group))


def _group_sum(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, L, …]``."""
    if group == 1:
        return x
    heads = _by_group(x, group)
    # A reduction over a dim of two that lies in the middle takes three times as long on a CPU, for the same bits.
    return heads[:, :, 0] + heads[:, :, 1] if group == 2 else heads.sum(2)


def _merge(out: torch.Tensor, lse: torch.Tensor, past_out: torch.Tensor, past_lse: torch.Tensor) -> None:
    """Make ``out`` ``[…, L, Dv]`` and ``lse`` ``[…, L]`` those of attention to both sets of keys, in place."""
    past_share = torch.sigmoid(past_lse - lse).unsqueeze(-1)
    # In the precision of the log-sum-exp: it is float32 where the output is shorter.
    out.copy_(torch.lerp(out.to(lse.dtype), past_out.to(lse.dtype), past_share))
    torch.logaddexp(lse, past_lse, out=lse)
