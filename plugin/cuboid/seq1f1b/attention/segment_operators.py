"""Attention of a segment as operators of torch, for compiled graphs: what :mod:`.chunked_attention` computes.

A graph takes tensors and numbers, and all layers and segments share it. So a *place* says which KV cache, layer and
position a call is of: a tensor of three integers on the host, whose values no graph depends on. Operators return
tensors of their own and keep none that they were given: Inductor uses the memory of both again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from cuboid.errors import UnsupportedModelError
from cuboid.seq1f1b.attention.chunked_attention import attend, attend_backward, prefix_backward
from cuboid.seq1f1b.attention.kernels import choose_kernel
from cuboid.seq1f1b.attention.kv_cache import KVCache

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Two = tuple[torch.Tensor, torch.Tensor]

# Operators get no objects, so they look the KV caches up here. A cache is removed when nothing else refers to it.
_CACHES: weakref.WeakValueDictionary[int, KVCache] = weakref.WeakValueDictionary()
_NUMBERS: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def place_of(cache: KVCache, layer: int, start: int) -> torch.Tensor:
    """The place of the calls of a layer, whose key in the KV cache is the pair of the number ``layer`` and the call's
    number.
    """
    number = _NUMBERS.get(cache)
    if number is None:
        number = _NUMBERS[cache] = next(_count)
        _CACHES[number] = cache
    return torch.tensor([number, layer, start], dtype=torch.int64, device="cpu")


def _at(place: torch.Tensor, call: int) -> tuple[KVCache, Hashable, int]:
    number, layer, start = place.tolist()
    return _CACHES[number], (layer, call), start


@torch.library.custom_op("cuboid::attend_segment", mutates_args=())
def attend_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, place: torch.Tensor, call: int, scale: float
) -> _Two:
    """The output ``[B, L, Hq, Dv]`` and log-sum-exp ``[B, Hq, L]`` of a segment's causal attention to all before it.

    Args:
        query: ``[B, Hq, L, D]``.
        key: ``[B, Hkv, L, D]``; written to the KV cache.
        value: ``[B, Hkv, L, Dv]``; likewise.
        place: see :func:`place_of`.
        call: number of the call in the layer's forward.
        scale: factor by which the scores are multiplied.
    """
    cache, layer, start = _at(place, call)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    cache.write(layer, start, key, value)
    kernel = choose_kernel(query, key, value, past=start, length=cache.length)
    out, lse = attend(kernel, query, key, value, cache, layer, start, scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@attend_segment.register_fake
def _attention_shapes(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any) -> _Two:
    rows, heads, length = query.shape[:3]
    lse = query.new_empty((rows, heads, length), dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty((rows, length, heads, value.shape[-1])), lse


@torch.library.custom_op("cuboid::attend_segment_backward", mutates_args=())
def attend_segment_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    place: torch.Tensor,
    call: int,
    scale: float,
    key_heads: int,
    needs_past: bool,
) -> _Three:
    """The gradients of query, key and value; those of earlier segments' keys and values are added in the KV cache.

    ``key_heads`` is what the operator's fake needs.
    """
    del key_heads
    cache, layer, start = _at(place, call)
    query = query if query.stride(-1) == 1 else query.contiguous()
    kernel = choose_kernel(query, *cache.read(layer, start, start + query.shape[2]), past=start, length=cache.length)
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    gradients = attend_backward(kernel, grad, query, out, lse, cache, layer, start, scale, needs_past=needs_past)
    dq, dk, dv = (x.contiguous() for x in gradients)
    return dq, dk, dv


@attend_segment_backward.register_fake
def _attention_gradient_shapes(grad: torch.Tensor, query: torch.Tensor, *rest: Any) -> _Three:
    rows, _, length, features = query.shape
    *_, key_heads, _ = rest
    sizes = (rows, key_heads, length)
    dv = query.new_empty((*sizes, grad.shape[-1]))
    return query.new_empty(query.shape), query.new_empty((*sizes, features)), dv


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: _Two) -> None:
    query, key, _, place, *rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, out, lse, place)
    ctx.rest = (*rest, key.shape[1])


def _attention_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, out, lse, place = ctx.saved_tensors
    needs_past = any(ctx.needs_input_grad[1:3])
    operator: Any = torch.ops.cuboid.attend_segment_backward.default
    return (*operator(grad.contiguous(), query, out, lse, place, *ctx.rest, needs_past), None, None, None)


attend_segment.register_autograd(_attention_backward, setup_context=_save_attention)


@torch.library.custom_op("cuboid::segment_prefix", mutates_args=())
def segment_prefix(key: torch.Tensor, value: torch.Tensor, place: torch.Tensor, call: int, length: int) -> _Two:
    """Copies of the last ``length`` keys ``[B, Hkv, length, D]`` and values up to a segment's end.

    Args:
        key, value: the segment's own, which are written to the KV cache.
        place, call: as for :func:`attend_segment`.
        length: the keys that the call's mask covers.
    """
    cache, layer, start = _at(place, call)
    own_length = key.shape[2]
    stop = start + own_length
    if length > stop or (start > 0 and length <= own_length):
        raise UnsupportedModelError(
            f"a layer cut its mask to {length} keys, while there are {stop}, for which there is no rule with segments"
        )
    cache.write(layer, start, key, value)
    keys, values = cache.read(layer, stop - length, stop)
    return _copy(keys), _copy(values)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@segment_prefix.register_fake
def _prefix_shapes(key: torch.Tensor, value: torch.Tensor, _: torch.Tensor, __: int, length: int) -> _Two:
    keys, values = ((*x.shape[:2], length, x.shape[3]) for x in (key, value))
    return key.new_empty(keys), value.new_empty(values)


@torch.library.custom_op("cuboid::segment_prefix_backward", mutates_args=())
def segment_prefix_backward(
    dk: torch.Tensor, dv: torch.Tensor, place: torch.Tensor, call: int, own_length: int, needs_past: bool
) -> _Two:
    """The gradients of a segment's own keys and values; those of earlier segments' are added in the KV cache."""
    cache, layer, start = _at(place, call)
    first = start + own_length - dk.shape[2]
    gradients = prefix_backward(dk, dv, cache, layer, start, first, needs_past=needs_past)
    return _copy(gradients[0]), _copy(gradients[1])


@segment_prefix_backward.register_fake
def _prefix_gradient_shapes(
    dk: torch.Tensor, dv: torch.Tensor, _: torch.Tensor, __: int, own_length: int, ___: bool
) -> _Two:
    keys, values = ((*x.shape[:2], own_length, x.shape[3]) for x in (dk, dv))
    return dk.new_empty(keys), dv.new_empty(values)


def _save_prefix(ctx: Any, inputs: tuple[Any, ...], output: _Two) -> None:
    del output
    key, _, place, call, _ = inputs
    ctx.save_for_backward(place)
    ctx.rest = call, key.shape[2]


def _prefix_gradients(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:
    (place,) = ctx.saved_tensors
    operator: Any = torch.ops.cuboid.segment_prefix_backward.default
    return (*operator(dk, dv, place, *ctx.rest, any(ctx.needs_input_grad[:2])), None, None, None)


segment_prefix.register_autograd(_prefix_gradients, setup_context=_save_prefix)

#: As graphs have them.
ATTEND: Any = torch.ops.cuboid.attend_segment.default
PREFIX: Any = torch.ops.cuboid.segment_prefix.default
