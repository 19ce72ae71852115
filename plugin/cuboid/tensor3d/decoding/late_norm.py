"""Norms over split features whose statistics travel with the products of their output.

The statistics of a rank's own features are known before the message that completes the products, those of all features
only after it. So each rank normalises its features by its own statistics, multiplies them, and sends both. With mean
squares m_r of the ranks, whose mean is m, an RMSNorm's products are

    Σ_r f_r · W_r (w_r x_r / √(m_r + ε)),   f_r = √((m_r + ε) / (m + ε)).

With means μ_r, variances v_r, and their combinations μ and v over all features (Chan et al. 1979), a LayerNorm's are

    Σ_r f_r · W_r (w_r (x_r - μ_r) / √(v_r + ε)) + (μ_r - μ) / √(v + ε) · W_r w_r + W_r b_r,

f_r = √((v_r + ε) / (v + ε)), for which its weight and bias are multiplied as two more tokens. If anything else computes
with a norm's output, its statistics are sent then, or are known from the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import AxisGroup


class PendingNorm(ABC):
    """A norm of ``x``, ``[..., H/h]``, of whose statistics a rank knows its own features' part.

    Args:
        x: the input.
        wide: the same in the statistics' dtype.
        eps: in the root; positive.
        along: the ranks that the last dim is split over.

    Attributes:
        dtype: of the output.
        statistics: those of the rank's own features, ``[..., k]``.
        constants: ``[H/h]`` each: what is multiplied beside the tokens.
    """

    statistics: torch.Tensor
    constants: Sequence[torch.Tensor] = ()

    def __init__(self, x: torch.Tensor, wide: torch.Tensor, eps: float, along: AxisGroup) -> None:
        self.dtype, self._wide, self._eps, self._along = x.dtype, wide, eps, along
        #: The statistics of all features, ``[..., k]``, once they are known.
        self._complete: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the statistics of all features aren't known yet."""
        return self._complete is None

    def own_terms(self) -> torch.Tensor:
        """``[..., H/h]``, normalised by the rank's own features alone."""
        return self._normed(self.statistics, shifts=False)

    def values(self) -> torch.Tensor:
        """The norm's output. Collective, if the statistics aren't known yet."""
        if self._values is None:
            if self._complete is None:
                self._complete = self._combined(all_gather(self.statistics, self._along), 0).squeeze(0)
            self._values = self._normed(self._complete, shifts=True)
        return self._values

    def weighted(
        self,
        terms: torch.Tensor,
        constants: torch.Tensor | None,
        statistics: torch.Tensor,
        dim: int,
        place: tuple[int, ...],
    ) -> torch.Tensor:
        """The ranks' terms of the products as they are summed.

        Args:
            terms: what all ranks have sent, ``[ranks, …, B/b, S, O]``.
            constants: the products of the constants, ``[ranks, …, count, O]``; None if there are none.
            statistics: ``[ranks, …, B/b, S, k]``.
            dim: that of the ranks whose features are others.
            place: the rank's own place in the other dims of ranks, and 0 in this one.
        """
        complete = self._combined(statistics, dim)
        self._complete = complete[place]
        return self._weighted(terms, constants, statistics, complete)

    @abstractmethod
    def _normed(self, statistics: torch.Tensor, *, shifts: bool) -> torch.Tensor:
        """The output for these statistics; unless it ``shifts``, without bias."""

    @abstractmethod
    def _combined(self, statistics: torch.Tensor, dim: int) -> torch.Tensor:
        """The statistics of all features, from those of the ranks along a dim, which is kept."""

    @abstractmethod
    def _weighted(
        self,
        terms: torch.Tensor,
        constants: torch.Tensor | None,
        statistics: torch.Tensor,
        complete: torch.Tensor,
    ) -> torch.Tensor:
        """See :meth:`weighted`."""


class PendingRMSNorm(PendingNorm):
    """``(offset + weight) · x / √(mean(x²) + eps)``."""

    def __init__(
        self, x: torch.Tensor, wide: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, along: AxisGroup
    ) -> None:
        super().__init__(x, wide, eps, along)
        self._weight, self._offset = weight, offset
        self.statistics = wide.square().mean(-1, keepdim=True)

    def _normed(self, statistics: torch.Tensor, *, shifts: bool) -> torch.Tensor:  # noqa: ARG002
        normed = self._wide * torch.rsqrt(statistics + self._eps)
        # Llama casts before it scales, Gemma (offset 1) scales before it casts.
        if self._offset:
            return ((self._offset + self._weight.to(normed.dtype)) * normed).to(self.dtype)
        return self._weight * normed.to(self.dtype)

    def _combined(self, statistics: torch.Tensor, dim: int) -> torch.Tensor:
        return statistics.mean(dim, keepdim=True)

    def _weighted(
        self,
        terms: torch.Tensor,
        constants: torch.Tensor | None,  # noqa: ARG002
        statistics: torch.Tensor,
        complete: torch.Tensor,
    ) -> torch.Tensor:
        return terms * ((statistics + self._eps) / (complete + self._eps)).sqrt_()


class PendingLayerNorm(PendingNorm):
    """``weight · (x - mean(x)) / √(var(x) + eps) + bias``; without a weight it is 1."""

    def __init__(
        self,
        x: torch.Tensor,
        wide: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        along: AxisGroup,
    ) -> None:
        super().__init__(x, wide, eps, along)
        self._weight, self._bias = weight, bias
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        self.statistics = torch.cat([mean, variance], -1)
        scale = x.new_ones(x.shape[-1]) if weight is None else weight
        self.constants = (scale,) if bias is None else (scale, bias)

    def _normed(self, statistics: torch.Tensor, *, shifts: bool) -> torch.Tensor:
        mean, variance = statistics.split(1, -1)
        y = (self._wide - mean) * torch.rsqrt(variance + self._eps)
        if self._weight is not None:
            y = y * self._weight
        return (y + self._bias if shifts and self._bias is not None else y).to(self.dtype)

    def _combined(self, statistics: torch.Tensor, dim: int) -> torch.Tensor:
        means, variances = statistics.split(1, -1)
        mean = means.mean(dim, keepdim=True)
        return torch.cat([mean, (variances + (means - mean).square()).mean(dim, keepdim=True)], -1)

    def _weighted(
        self,
        terms: torch.Tensor,
        constants: torch.Tensor | None,
        statistics: torch.Tensor,
        complete: torch.Tensor,
    ) -> torch.Tensor:
        assert constants is not None
        (means, variances), (mean, variance) = statistics.split(1, -1), complete.split(1, -1)
        variance = variance + self._eps
        scale, *shift = constants.unsqueeze(-3).split(1, -2)
        weighted = terms * ((variances + self._eps) / variance).sqrt_()
        weighted = torch.addcmul(weighted, (means - mean) * variance.rsqrt(), scale.to(weighted.dtype))
        return weighted + shift[0] if shift else weighted
