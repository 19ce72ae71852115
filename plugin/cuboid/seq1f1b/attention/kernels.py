"""Fused attention kernels that return the log-sum-exp of each query's scores, and their backward.

The only mask they support is the causal one. Some handle GQA, where query heads share a key head; the others need as
many key heads as query heads. If ``out`` and ``lse`` are merged from several calls, each call's backward returns its
share of the gradients: a kernel recomputes the probabilities from ``lse``, and everything else depends on ``out`` only.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch._subclasses import FakeTensor

_aten: Any = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Attention of ``[B, H, L, D]`` queries to ``[B, H, S, D]`` keys and ``[B, H, S, Dv]`` values.

    Attributes:
        knows_groups: whether keys and values may have fewer heads than H, by a whole factor (GQA).
        ends_at_last_key: whether ``causal`` also means, with more keys than queries, that the last query sees all keys,
            the one before it all but the last, and so on.
    """

    knows_groups: ClassVar[bool]
    ends_at_last_key: bool

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output ``[B, H, L, Dv]`` and the natural log-sum-exp ``[B, H, L]`` in at least float32."""

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Return the gradients of query, key and value, given the output's gradient ``[B, H, L, Dv]``."""


def choose_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, past: int = 0, length: int = 0
) -> Kernel:
    """Return the fastest kernel for these tensors and their device; keys and values may have fewer heads (GQA).

    Args:
        query, key, value: of a segment.
        past: number of keys before the segment, for which the kernel is called too.
        length: of the whole sequence.
    """
    one_dtype = query.dtype == key.dtype == value.dtype
    one_head_dim = query.shape[-1] == value.shape[-1]
    if query.device.type == "cpu" and one_dtype and one_head_dim:
        return CpuFlash()
    if query.device.type == "cpu" and isinstance(query, FakeTensor):
        return FusedShapes()
    # On AMD GPUs these operators define the log-sum-exp differently.
    if query.device.type == "cuda" and one_dtype and torch.version.hip is None:
        cuda = torch.backends.cuda
        is_grouped = query.shape[1] != key.shape[1]
        parameters = cuda.SDPAParams(query, key, value, None, 0.0, False, is_grouped)
        has_flash = one_head_dim and query.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(parameters)
        # It doesn't take a single key, and its backward adds in no fixed order. The others have such backwards too.
        is_possible = past != 1 and not torch.are_deterministic_algorithms_enabled()
        is_better = not (has_flash and CudaFlash.pays(query, past)) and CudaCudnn.pays(query, past, length)
        if is_possible and is_better and cuda.can_use_cudnn_attention(parameters):
            return CudaCudnn()
        if has_flash:
            in_one_call = past > 0 and _aligns_with_last_key(query.device, query.dtype, query.shape[-1])
            return CudaFlash(ends_at_last_key=in_one_call)
        # The keys will be repeated to as many heads as the queries have, so query torch with equal head counts.
        equal_heads = cuda.SDPAParams(query[:, : key.shape[1]], key, value, None, 0.0, False, False)
        if cuda.can_use_efficient_attention(equal_heads):
            return CudaEfficient()
    if query.device.type != "cpu":
        _warn_of_no_kernel(query, key, value)
    return ChunkedMath()


def _warn_of_no_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    # Not guarded against repetition: Python shows a warning with the same text and place only once.
    kinds = "/".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (query, key, value)))
    sizes = "/".join(dict.fromkeys(str(x.shape[-1]) for x in (query, key, value)))
    warnings.warn(
        f"attention in {kinds} with a head dim of {sizes} has no fused kernel on {query.device.type} in this "
        "version of torch, or torch.backends.cuda has it switched off, so segments compute it by plain products, which "
        "take several times as long; bfloat16 with a head dim up to 256 that 8 divides has one on NVIDIA's GPUs",
        stacklevel=2,
    )


@functools.cache
def _aligns_with_last_key(device: torch.device, dtype: torch.dtype, features: int) -> bool:
    """Whether :class:`CudaFlash` can be called once for a segment and its past: tried with small tensors, backward too.

    Expected are the last rows of as many queries as there are keys, where the pattern has only one meaning.
    """
    length, few = 200, 40
    numbers = torch.arange(4 * length * features, device=device, dtype=torch.float32)
    query, key, value, grad = (0.7 * numbers).sin().to(dtype).view(4, 1, 1, length, features)
    grad[:, :, :-few] = 0
    options = {"causal": True, "scale": features**-0.5}
    results = []
    for queries in (length, few):
        kernel, dy, q = CudaFlash(), grad[:, :, -queries:], query[:, :, -queries:]
        out, lse = kernel.forward(q, key, value, **options)
        dq, dk, dv = kernel.backward(dy, q, key, value, out, lse, **options)
        results.append((*(x[:, :, -few:] for x in (out, lse, dq)), dk, dv))
    errors = [((mine - other).abs().max() / other.abs().max()).float() for other, mine in zip(*results, strict=True)]
    aligns = bool((torch.stack(errors) < 8 * torch.finfo(dtype).eps).all())
    if not aligns:
        warnings.warn(
            f"flash attention of torch {torch.__version__} on {device}, in {dtype} with a head dim of {features}, "
            "doesn't align its causal pattern with the last key, so it is called twice for a segment that has a past: "
            "the same results, in more time",
            stacklevel=2,
        )
    return aligns


class CpuFlash:
    """torch's flash kernel for CPUs, in any floating dtype."""

    ends_at_last_key = False
    # Not tried with earlier versions. torch compares its version with tuples too, which its stubs leave out.
    knows_groups: ClassVar[bool] = torch.__version__ >= (2, 13)  # type: ignore[operator]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        flash = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = flash_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv


class CudaFlash:
    """torch's FlashAttention-2, in float16 and bfloat16."""

    knows_groups: ClassVar[bool] = True

    #: Queries · heads of a segment up to which one call for it and its past is faster than two of cuDNN's.
    _FEW = 512 * 32

    def __init__(self, *, ends_at_last_key: bool = False) -> None:
        self.ends_at_last_key = ends_at_last_key

    @classmethod
    def pays(cls, query: torch.Tensor, past: int) -> bool:
        """Whether it is faster for a segment than cuDNN's kernel. See :func:`choose_kernel`."""
        return past > 0 and query.shape[:3].numel() <= cls._FEW

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        flash = _aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        # There are no cumulative sequence lengths; and no random state, because there is no dropout.
        no_bounds, no_random = None, torch.empty(0, dtype=torch.uint64, device=query.device)
        sizes = (no_bounds, no_bounds, query.shape[2], key.shape[2])
        flash_backward = _aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = flash_backward(
            grad, query, key, value, out, lse.contiguous(), *sizes, 0.0, causal, no_random, no_random, scale=scale
        )
        return dq, dk, dv


class CudaCudnn:
    """cuDNN's flash kernel, in float16 and bfloat16.

    On an H200 it is twice as fast as torch's FlashAttention-2. But for each new shape torch makes a plan, in 40 ms for
    the forward and 60 ms for the backward.
    """

    knows_groups: ClassVar[bool] = True
    #: torch aligns its causal pattern with the first key.
    ends_at_last_key = False

    #: Sequences whose length is a multiple of this are taken to be packed or padded, so that their shapes come again.
    _GRAIN = 128
    #: Queries · keys · heads · features of a call that saves as much in the layers of one stage as the plans take.
    _WORK = 2e11

    @classmethod
    def pays(cls, query: torch.Tensor, past: int, length: int) -> bool:
        """Whether it is faster for a segment, plans included. See :func:`choose_kernel`."""
        rows, heads, queries, features = query.shape
        comes_again = length % cls._GRAIN == 0 or rows * heads * features * queries * (past + queries) >= cls._WORK
        # The generations for which torch's own attention prefers it too.
        return comes_again and torch.cuda.get_device_capability(query.device)[0] in (9, 10)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        attention = _aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = attention(query, key, value, None, True, 0.0, causal, False, scale=scale)
        return out, lse.squeeze(-1)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        # torch looks up cuDNN's plans by the strides of query, key and value only, so those of the others must follow.
        grad, out = (dense_as(x, query) for x in (grad, out))
        no_bounds, no_bias = None, None
        no_random = torch.empty((), dtype=torch.int64, device=query.device)
        sizes = (no_bias, no_bounds, no_bounds, query.shape[2], key.shape[2])
        attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
        dq, dk, dv = attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse.contiguous().unsqueeze(-1),
            no_random,
            no_random,
            *sizes,
            0.0,
            causal,
            scale=scale,
        )
        return dq, dk, dv


def dense_as(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, H, L, Dv]`` without gaps in memory, dims in the order of ``query``'s strides; a copy if need be."""
    outer_first = sorted(range(4), key=query.stride, reverse=True)
    permuted = x.permute(outer_first)
    return x if permuted.is_contiguous() else permuted.contiguous().permute([outer_first.index(d) for d in range(4)])


class CudaEfficient:
    """torch's memory-efficient kernel, for float32 and head dims that flash rejects."""

    knows_groups: ClassVar[bool] = False
    ends_at_last_key = False

    #: The kernel pads the query dim of the log-sum-exp to a multiple of this number, with infinity.
    _ALIGNMENT = 32

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        efficient = _aten._scaled_dot_product_efficient_attention
        out, lse, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : query.shape[2]]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        # The kernel assumes the memory layout in which its forward writes the output, [B, L, H, D].
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = nn.functional.pad(lse, (0, -lse.shape[2] % self._ALIGNMENT), value=torch.inf)
        no_random = torch.zeros((), dtype=torch.int64, device="cpu")
        needs_grad = [True, True, True, False]
        efficient_backward = _aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = efficient_backward(
            grad, query, key, value, None, out, lse, no_random, no_random, 0.0, needs_grad, causal, scale=scale
        )
        return dq, dk, dv


class FusedShapes:
    """What a fused kernel allocates, for tensors without values, on CPUs that have no such kernel for them."""

    knows_groups: ClassVar[bool] = True
    ends_at_last_key = False

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        del key, causal, scale
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        return query.new_empty((*query.shape[:3], value.shape[-1])), lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        del grad, out, lse, causal, scale
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class ChunkedMath:
    """Plain tensor operations on any device, in chunks of queries to bound the memory of the scores."""

    knows_groups: ClassVar[bool] = False
    ends_at_last_key = False

    #: Largest number of scores in one chunk.
    _SCORES = 1 << 24

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Kernel`."""
        outs, lses = [], []
        for rows in self._chunks(query, key):
            scores = _scores(query, key, rows, causal=causal, scale=scale)
            lse = scores.logsumexp(-1)
            outs.append((scores.sub_(lse.unsqueeze(-1)).exp_() @ value.to(scores.dtype)).to(query.dtype))
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        dtype = lse.dtype
        dq, dk, dv = [], torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for rows in self._chunks(query, key):
            grad_rows, query_rows = grad[:, :, rows].to(dtype), query[:, :, rows].to(dtype)
            scores = _scores(query, key, rows, causal=causal, scale=scale)
            probabilities = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            dv += probabilities.mT @ grad_rows
            # d(scores) = P · (dP − Σ dO·O), where the sum is over the head dim.
            delta = (grad_rows * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
            ds = (grad_rows @ value.to(dtype).mT).sub_(delta).mul_(probabilities).mul_(scale)
            dq.append((ds @ key.to(dtype)).to(query.dtype))
            dk += ds.mT @ query_rows
        return torch.cat(dq, dim=2), dk.to(key.dtype), dv.to(value.dtype)

    def _chunks(self, query: torch.Tensor, key: torch.Tensor) -> list[slice]:
        batch, heads, length, _ = query.shape
        step = max(1, self._SCORES // (batch * heads * key.shape[2]))
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _scores(query: torch.Tensor, key: torch.Tensor, rows: slice, *, causal: bool, scale: float) -> torch.Tensor:
    """Scores ``[B, H, rows, S]`` in at least float32, −∞ where a key comes after its query."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query[:, :, rows].to(dtype) * scale) @ key.to(dtype).mT
    if causal:
        positions = torch.arange(key.shape[2], device=key.device)
        scores.masked_fill_(positions > positions[rows].unsqueeze(-1), -torch.inf)
    return scores
