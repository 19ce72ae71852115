"""Causal attention of one segment to itself and to all segments before it.

There are two entry points, which use the KV cache in the same way. :func:`attend_segment` calls a fused kernel, without
a mask: once for the past and the segment, if the kernel's causal pattern ends at the last key; otherwise twice, and
merges the results by their log-sum-exps. :func:`prefix` returns the keys and values of the past followed by the
segment's own, for the model's own attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from cuboid.errors import UnsupportedModelError
from cuboid.seq1f1b.attention.kernels import Kernel, choose_kernel
from cuboid.seq1f1b.attention.kv_cache import KVCache


class Kept(Protocol):
    """A tensor that a checkpointed forward keeps for its recomputation."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""

    def read(self) -> torch.Tensor:
        """An alias of the tensor.

        Raises:
            UnsupportedModelError: it has been changed in place since.
        """


class OnDevice:
    """A tensor that is kept where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    @property
    def nbytes(self) -> int:
        """See :class:`Kept`."""
        return self._tensor.nbytes

    def read(self) -> torch.Tensor:
        """See :class:`Kept`."""
        if self._tensor._version != self._version:
            raise UnsupportedModelError(
                "the model's code changes attention's output in place, so that it can't be kept for the recomputation; "
                'write "activation_checkpointing": {"mode": "layers"}'
            )
        return self._tensor.detach()


@dataclass(frozen=True, eq=False)
class KeptOutput:
    """What a checkpointed forward keeps of a segment's attention, so that its recomputation runs no kernel.

    Args:
        kernel: computed the output, and will compute its backward.
        out: ``[B, Hq, L, Dv]``, merged.
        lse: ``[B, Hq, L]``, likewise.
    """

    kernel: Kernel
    out: Kept
    lse: Kept

    def read(self) -> tuple[Kernel, torch.Tensor, torch.Tensor]:
        """The kernel, and aliases of the output and the log-sum-exp."""
        return self.kernel, self.out.read(), self.lse.read()

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return self.out.nbytes + self.lse.nbytes


@dataclass(eq=False)
class KeptCall:
    """What one call keeps.

    Args:
        keep: keeps a tensor.
        output: empty in the forward, which fills it, and not in the recomputation.
    """

    keep: Callable[[torch.Tensor], Kept] = OnDevice
    output: KeptOutput | None = None


def attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    layer: Hashable,
    start: int,
    scale: float,
    kept: KeptCall | None = None,
) -> torch.Tensor:
    """Plain causal attention of a segment of L positions.

    Args:
        query: ``[B, Hq, L, D]``; Hq is a multiple of Hkv.
        key: ``[B, Hkv, L, D]``.
        value: ``[B, Hkv, L, Dv]``.
        cache: holds the positions before ``start``; the segment's own are added.
        layer: identifies the layer in the KV cache.
        start: the segment's first position.
        scale: factor by which the scores are multiplied.
        kept: under checkpointing that keeps attention, what this call keeps: the same object in the recomputation.

    Returns:
        ``[B, Hq, L, Dv]``.
    """
    out: torch.Tensor = _AttendSegment.apply(*as_autocast(query, key, value), cache, layer, start, scale, kept)
    return out


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors as autocast casts the inputs of torch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def prefix(
    key: torch.Tensor, value: torch.Tensor, cache: KVCache, layer: Hashable, start: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values from position ``first`` to the end of a segment, as views of the KV cache.

    Args:
        key, value: the segment's own, ``[B, Hkv, L, D]`` and ``[B, Hkv, L, Dv]``.
        cache, layer, start: as for :func:`attend_segment`.
        first: the first position to return; at most ``start``.

    Returns:
        ``[B, Hkv, start + L - first, D]`` and the same with Dv.
    """
    keys, values = _Prefix.apply(key, value, cache, layer, start, first)
    return keys, values


class _AttendSegment(torch.autograd.Function):
    """Saves the query, the merged output and its log-sum-exp; keys and values are in the KV cache."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        layer: Hashable,
        start: int,
        scale: float,
        kept: KeptCall | None,
    ) -> torch.Tensor:
        # The fused kernels read a head's features as if they were contiguous; the one for CPUs doesn't check it.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        cache.write(layer, start, key, value)
        if kept is not None and kept.output is not None:
            kernel, out, lse = kept.output.read()
        else:
            kernel = choose_kernel(query, key, value, past=start, length=cache.length)
            out, lse = attend(kernel, query, key, value, cache, layer, start, scale)
            if kept is not None:
                kept.output = KeptOutput(kernel, kept.keep(out), kept.keep(lse))
        if ctx.needs_input_grad[0] and query.untyped_storage().nbytes() > query.nbytes:
            # If q is a view of a fused projection's output, saving it would keep that output's k and v alive, which are
            # in the KV cache already.
            query = query.clone()
        ctx.save_for_backward(query, out, lse)
        ctx.place = (cache, layer, start)
        ctx.call = (kernel, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse = ctx.saved_tensors
        (cache, layer, start), (kernel, scale) = ctx.place, ctx.call
        needs_past = any(ctx.needs_input_grad[1:3])
        dq, dk, dv = attend_backward(kernel, grad, query, out, lse, cache, layer, start, scale, needs_past=needs_past)
        return dq, dk, dv, *[None] * 5


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    layer: Hashable,
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged output and log-sum-exp of a segment's attention to itself and to all before it."""
    if start > 0 and kernel.ends_at_last_key:
        return kernel.forward(query, *cache.read(layer, 0, start + query.shape[2]), causal=True, scale=scale)
    group = _group(kernel, query, key)
    # The diagonal: the segment's queries and its own keys, causal.
    out, lse = kernel.forward(query, _expand(key, group), _expand(value, group), causal=True, scale=scale)
    if start > 0:
        # The past: every query of the segment sees all of it, so no mask is needed.
        past = kernel.forward(_fold(query, group), *cache.read(layer, 0, start), causal=False, scale=scale)
        # In [B, Hkv, group, L, …], a view of the segment's [B, Hq, L, …] and of the past's [B, Hkv, group·L, …].
        _merge(_by_group(out, group), _by_group(lse, group), *(_unfold(x, group) for x in past))
    return out, lse


def attend_backward(
    kernel: Kernel,
    grad: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cache: KVCache,
    layer: Hashable,
    start: int,
    scale: float,
    *,
    needs_past: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a segment's query, key and value, after those of the past were added to the KV cache.

    Args:
        grad: ``[B, Hq, L, Dv]``, the gradient of ``out``.
        query, out, lse: of the forward, ``[B, Hq, L, …]``, merged.
        kernel, cache, layer, start, scale: as in :func:`attend`.
        needs_past: whether keys and values have gradients.
    """
    if start > 0 and kernel.ends_at_last_key:
        so_far = cache.read(layer, 0, start + query.shape[2])
        dq, dk, dv = kernel.backward(grad, query, *so_far, out, lse, causal=True, scale=scale)
        dk, dv = prefix_backward(dk, dv, cache, layer, start, 0, needs_past=needs_past)
        return dq, _alone(dk), _alone(dv)
    # With the merged out and lse, each call gives its own share of the gradients (see `kernels`).
    key, value = cache.read(layer, start, start + query.shape[2])
    group = _group(kernel, query, key)
    own_kv = _expand(key, group), _expand(value, group)
    dq, dk, dv = kernel.backward(grad, query, *own_kv, out, lse, causal=True, scale=scale)
    # Before `add_gradients`, so that the last segment, which no later one adds to, has nothing to sum.
    dk, dv = cache.with_gradients(layer, start, _group_sum(dk, group), _group_sum(dv, group))
    if start > 0:
        # As in forward: [B, Hq, L, …] to [B, Hkv, group·L, …].
        grad, folded, out, lse = (_fold(x, group) for x in (grad, query, out, lse))
        past = cache.read(layer, 0, start)
        dq_past, dk_past, dv_past = kernel.backward(grad, folded, *past, out, lse, causal=False, scale=scale)
        _by_group(dq, group).add_(_unfold(dq_past, group))
        if needs_past:
            cache.add_gradients(layer, 0, dk_past, dv_past)
    else:
        # The first segment is the last to run backward.
        cache.free_layer(layer)
    return dq, dk, dv


class _Prefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, cache: KVCache, layer: Hashable, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache.write(layer, start, key, value)
        ctx.place = (cache, layer, start, first)
        return cache.read(layer, first, start + key.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = prefix_backward(dk, dv, *ctx.place, needs_past=any(ctx.needs_input_grad[:2]))
        return *map(_alone, gradients), None, None, None, None


def _alone(x: torch.Tensor) -> torch.Tensor:
    """A tensor with a memory of its own: as views, gradients of a segment would keep those of the past alive until the
    second half of a split backward.
    """
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def prefix_backward(
    dk: torch.Tensor,
    dv: torch.Tensor,
    cache: KVCache,
    layer: Hashable,
    start: int,
    first: int,
    *,
    needs_past: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a segment's own keys and values, from ``dk`` and ``dv`` of what :func:`prefix` returned, after
    those of the past were added to the KV cache.
    """
    past = start - first
    gradients = cache.with_gradients(layer, start, dk[:, :, past:], dv[:, :, past:])
    if needs_past:
        cache.add_gradients(layer, first, dk[:, :, :past], dv[:, :, :past])
    if start == 0:
        cache.free_layer(layer)
    return gradients


# GQA: a group is the query heads that share one key head. Kernels that handle groups get the tensors unchanged
# (``group`` is 1 then). Other kernels need as many key heads as query heads. For the segment itself, whose keys are
# few, the keys are repeated. For the past, which may be long, the heads of a group become additional queries of one
# head instead. That is correct because there is no mask that depends on the query's position.


def _group(kernel: Kernel, query: torch.Tensor, key: torch.Tensor) -> int:
    return 1 if kernel.knows_groups else query.shape[1] // key.shape[1]


def _expand(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hkv, L, D]`` to ``[B, Hq, L, D]``."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, group · L, …]``."""
    return x if group == 1 else _by_group(x, group).flatten(2, 3)


def _unfold(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hkv, group · L, …]`` to ``[B, Hkv, group, L, …]``, a view."""
    return x.unflatten(2, (group, -1))


def _by_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, group, L, …]``, a view."""
    return x.unflatten(1, (-1, group))


def _group_sum(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, Hq, L, …]`` to ``[B, Hkv, L, …]``."""
    if group == 1:
        return x
    heads = _by_group(x, group)
    # On a CPU, a reduction over an inner dim of size two takes three times as long as an addition, for the same bits.
    return heads[:, :, 0] + heads[:, :, 1] if group == 2 else heads.sum(2)


def _merge(out: torch.Tensor, lse: torch.Tensor, past_out: torch.Tensor, past_lse: torch.Tensor) -> None:
    """Merge attention to two sets of keys into ``out`` ``[…, L, Dv]`` and ``lse`` ``[…, L]``, in place."""
    # exp(past_lse) / (exp(past_lse) + exp(lse)), without overflow.
    past_share = torch.sigmoid(past_lse - lse).unsqueeze(-1)
    # Computed in the dtype of the log-sum-exp, which is float32 if the output has 16 bits.
    out.copy_(torch.lerp(out.to(lse.dtype), past_out.to(lse.dtype), past_share))
    torch.logaddexp(lse, past_lse, out=lse)
