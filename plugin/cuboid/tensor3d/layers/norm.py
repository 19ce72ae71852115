"""RMSNorm and LayerNorm over a hidden dim that is split: one small collective for the statistics.

Input and output are ``[..., H/h]``; weight and bias are ``[H/h]`` blocks. Only the input and the ``[..., 1]``
statistics are saved. Statistics are computed in float32, or in float64 where the input is.

OLMo 2 normalises over the features of all attention heads. Each rank has its own heads; with fewer key heads than
ranks, several ranks have copies of the same head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import all_gather, all_reduce, positions_are_whole
from cuboid.distributed.mesh import AxisGroup, Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import Axis
from cuboid.tensor3d.decoding.late_norm import PendingLayerNorm, PendingNorm, PendingRMSNorm
from cuboid.tensor3d.layers.late_gather import LateTensor
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, but at least float32, as Hugging Face and PyTorch compute norms and losses."""
    return torch.promote_types(dtype, torch.float32)


def has_fused_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has a fused kernel, which reads the rows once and saves no more for backward than is saved here.

    Only on CUDA, with equal dtypes: otherwise torch composes elementwise operations, each of which saves its result.
    The kernel rounds once, after the weight; Hugging Face's code also rounds before it.
    """
    return x.is_cuda and x.dtype == weight.dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        along: AxisGroup,
        hidden: int,
        copies: torch.Tensor | None,
    ) -> torch.Tensor:
        wide = x.to(statistics_dtype(x.dtype))
        # A feature that several ranks have counts once in the sum.
        terms = wide.pow(2) if copies is None else wide.pow(2) / copies
        squares = all_reduce(terms.sum(-1, keepdim=True), along)
        rstd = torch.rsqrt(squares / hidden + eps)
        ctx.save_for_backward(x, weight, rstd, copies)
        ctx.offset, ctx.hidden, ctx.along = offset, hidden, along
        normed = wide * rstd
        # Llama casts before it scales, Gemma (offset 1) scales before it casts.
        return ((offset + weight.to(wide.dtype)) * normed).to(x.dtype) if offset else weight * normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd, copies = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        wide_dy = dy.to(rstd.dtype)
        dweight = (wide_dy * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        scaled = wide_dy * (ctx.offset + weight.to(rstd.dtype))
        mean = all_reduce((scaled * normed).sum(-1, keepdim=True), ctx.along) / ctx.hidden
        # Each copy of a feature that several ranks have contributes a part of its gradient.
        correction = normed * mean if copies is None else normed * mean / copies
        return (rstd * (scaled - correction)).to(x.dtype), dweight, None, None, None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, along: AxisGroup) -> torch.Tensor:
    """``(offset + weight) · x / sqrt(mean(x²) + eps)``, the mean over ``along`` too: ``[..., H/h]`` to the same shape.

    Args:
        x: ``[..., H/h]``.
        weight: ``[H/h]``.
        eps: in the root.
        offset: added to the weight.
        along: the ranks that the last dim is split over.
    """
    if along.size == 1 and not offset and has_fused_kernel(x, weight):
        # Autocast runs this function in float32: cast back to the dtype of the residual stream.
        return nn.functional.rms_norm(x, weight.shape, weight, eps).to(x.dtype)
    y: torch.Tensor = _RMSNorm.apply(x, weight, eps, offset, along, x.shape[-1] * along.size, None)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        along: AxisGroup,
    ) -> torch.Tensor:
        wide = x.to(statistics_dtype(x.dtype))
        mean, variance = _moments(wide, along)
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.along, ctx.bias_dtype = along, None if bias is None else bias.dtype
        y = (wide - mean) * rstd
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        normed = (x.to(rstd.dtype) - mean) * rstd
        dy = dy.to(rstd.dtype)
        scaled = dy if weight is None else dy * weight
        sums = torch.cat([scaled.sum(-1, keepdim=True), (scaled * normed).sum(-1, keepdim=True)], -1)
        hidden = x.shape[-1] * ctx.along.size
        mean_scaled, mean_normed = (all_reduce(sums, ctx.along) / hidden).split(1, -1)
        dx = (rstd * (scaled - mean_scaled - normed * mean_normed)).to(x.dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
        dbias = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype) if needs_bias else None
        return dx, dweight, dbias, None, None


def _moments(x: torch.Tensor, along: AxisGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over the split last dim, ``[..., 1]`` each.

    The ranks all-gather their own mean and variance and combine them (Chan et al. 1979): E[x²] - E[x]² would suffer
    from cancellation.
    """
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    if along.size == 1:
        return mean, variance
    means, variances = all_gather(torch.cat([mean, variance], -1), along).split(1, -1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).pow(2)).mean(0)


class _ShardedNorm(ShardedModule):
    """A norm over a dim that ``axes`` split, with or without weight and bias.

    ``offset`` is added to the weight (1 in Gemma).
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        *,
        mesh: Mesh,
        specs: dict[str, ShardingSpec],
        eps: float,
        offset: float = 0.0,
        axes: tuple[Axis, ...] = ("hidden",),
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.offset = weight, bias, eps, offset
        self._along = mesh.along(*axes)
        self.init_sharding(mesh, specs)

    def _blocks(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = None if self.weight is None else self.unsharded("weight")
        return weight, None if self.bias is None else self.unsharded("bias")

    def _may_be_late(self, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
        """Where positions are whole: whether products of the output may complete it."""
        # Otherwise they would cast it, or eps wouldn't bound what a rank's own features are divided by.
        is_cast = torch.is_autocast_enabled(x.device.type) or (weight is not None and weight.dtype != x.dtype)
        return self.eps > 0 and not is_cast

    def extra_repr(self) -> str:
        """Epsilon and the mesh."""
        return f"eps={self.eps}, mesh={self.mesh.shape}"


class LateNorm(LateTensor):
    """Stands for a norm's output: products of it complete its statistics, if they are the first to take it."""

    pending: PendingNorm

    @staticmethod
    def of(norm: PendingNorm, x: torch.Tensor) -> LateNorm:
        """The output for an input ``x``."""
        late: LateNorm = LateNorm.standing(x, x.shape)
        late.pending = norm
        return late

    def values_of(self) -> torch.Tensor:
        """See :class:`LateTensor`."""
        return self.pending.values()


class ShardedRMSNorm(_ShardedNorm):
    """RMSNorm of a split hidden dim."""

    @uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H/h]`` to ``[..., H/h]``."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        weight, bias = self._blocks()
        weight = x.new_ones(x.shape[-1]) if weight is None else weight
        if self._along.size > 1 and positions_are_whole() and bias is None and self._may_be_late(x, weight):
            wide = x.to(statistics_dtype(x.dtype))
            return LateNorm.of(PendingRMSNorm(x, wide, weight, self.eps, self.offset, self._along), x)
        y = rms_norm(x, weight, self.eps, self.offset, self._along)
        return y if bias is None else y + bias


class HeadsRMSNorm(_ShardedNorm):
    """RMSNorm over the features of all query heads, or of all key heads.

    Args:
        rows: which of the block's features are this rank's, in order; None for all of them.
        copies: for each of this rank's features, the number of its copies on all ranks; None if there is one of each.
        features: number of features of all heads.
        options: see :class:`ShardedRMSNorm`.
    """

    rows: torch.Tensor | None
    copies: torch.Tensor | None

    def __init__(
        self,
        *args: Any,
        rows: torch.Tensor | None,
        copies: torch.Tensor | None,
        features: int,
        **options: Any,
    ) -> None:
        super().__init__(*args, axes=("sequence", "hidden"), **options)
        self._features = features
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("copies", copies, persistent=False)

    @uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., own heads · head dim]`` to the same shape."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        weight, _ = self._blocks()
        assert weight is not None
        weight = weight if self.rows is None else weight[self.rows]
        y: torch.Tensor = _RMSNorm.apply(x, weight, self.eps, self.offset, self._along, self._features, self.copies)
        return y


class ShardedLayerNorm(_ShardedNorm):
    """LayerNorm of a split hidden dim."""

    @uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H/h]`` to ``[..., H/h]``."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        weight, bias = self._blocks()
        if weight is not None and self.offset:
            weight = self.offset + weight
        if self._along.size > 1 and positions_are_whole() and self._may_be_late(x, weight):
            wide = x.to(statistics_dtype(x.dtype))
            return LateNorm.of(PendingLayerNorm(x, wide, weight, bias, self.eps, self._along), x)
        return _LayerNorm.apply(x, weight, bias, self.eps, self._along)
