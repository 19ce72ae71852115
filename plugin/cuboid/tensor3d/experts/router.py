"""Modules that look at all features of a token and give a few numbers: routers, and the gates of shared experts.

Their own code runs, on this rank's tokens and this rank's part of the features, ``[T/s, H/h]``; only the product with
their weight ``[E, H/h]`` is ours, whose partial sums are added up over `hidden`. The ranks along `hidden` then have the
same numbers to the last bit, and make the same choices of them, also where two are equal. Each token is looked at by
no other ranks.

The gradient of such numbers is, on each rank, a part of the sum over `hidden`: whatever is computed with them there is
multiplied with this rank's own features. So the transpose of the sum is one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cuboid.distributed.axis_collectives import all_gather, all_reduce
from cuboid.distributed.mesh import AxisGroup
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.layers.dropout import own_random_numbers
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


class ShardedRouter(ShardedModule):
    """Mixed into the class of a model's router, whose code stays its own."""

    def configure(self) -> None:
        """The module has its shards."""
        self.gathered_once = frozenset(self.sharded_params)
        #: Whether it draws random numbers in training, as some do to choose between experts that are nearly as good.
        self.is_random = any("jitter" in name and isinstance(x, float) and x > 0 for name, x in vars(self).items())

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, on ``[T/s, H/h]``."""
        if self.mesh.shape.size == 1:
            return super().forward(*args, **kwargs)
        hidden = self.mesh.along("hidden")
        is_random = self.is_random and self.training
        # Ranks along `hidden` look at the same tokens, and must draw the same.
        draws = own_random_numbers(self.mesh, self._device(), ("batch", "sequence")) if is_random else nullcontext()
        with self.unsharded_in_place(), draws, _SumOverHidden(hidden) if hidden.size > 1 else nullcontext():
            return super().forward(*args, **kwargs)

    def _device(self) -> torch.device:
        return next(self.parameters()).device


class _SumOverHidden(TorchFunctionMode):
    """Inside, a linear layer multiplies parts of the features, and adds up the ranks' results."""

    def __init__(self, along: AxisGroup) -> None:
        super().__init__()
        self._along = along

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return self._linear(*args, **kwargs) if func is nn.functional.linear else func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = autocast_dtype(input)
        result: torch.Tensor = _Summed.apply(input.to(dtype), weight.to(dtype), self._along)
        return result if bias is None else result + bias.to(dtype)


class _Summed(torch.autograd.Function):
    """x Wᵀ, of parts of the features. What is added up isn't rounded before it is complete."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.along = along
        wide = statistics_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            own = nn.functional.linear(x.to(wide), weight.to(wide))
        # Each rank adds up the same numbers in the same order. No backend promises that of its all-reduce.
        return all_gather(own, along).sum(0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = statistics_dtype(x.dtype)
        # A gradient that is the caller's isn't to be overwritten.
        whole = all_reduce(gradient.to(wide, copy=True), ctx.along)
        dx = (whole @ weight.to(wide)).to(x.dtype)
        dweight = whole.flatten(0, -2).t() @ x.flatten(0, -2).to(wide)
        return dx, dweight.to(weight.dtype), None
