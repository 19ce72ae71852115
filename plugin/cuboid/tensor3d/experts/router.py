"""Modules that compute a few numbers from all features of a token: routers, and the gates of shared experts.

Their own code runs on this rank's tokens and part of the features, ``[T/s, H/h]``. Only the product with their weight
``[E, H/h]`` is replaced: its partial sums are added up over `hidden`. The ranks along `hidden` then have bitwise equal
scores and make the same choices, also between equal ones. No other ranks have these tokens.

Each rank's gradient of the scores is a partial sum over `hidden`, because the rank multiplies them only with its own
features. So backward sums over `hidden` too.
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
from cuboid.tensor3d.experts.expert_update import UpdatedModule
from cuboid.tensor3d.layers.dropout import own_random_numbers
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs


class ShardedRouter(UpdatedModule):
    """Mixin for a model's router class, whose own code runs unchanged."""

    def configure(self) -> None:
        """Configure the router, after :meth:`init_sharding`."""
        self.gathered_once = frozenset(self.sharded_params)
        self.updates = {}
        #: Whether it draws random numbers in training, as some do to vary the choice between similar experts.
        self.is_random = any("jitter" in name and isinstance(x, float) and x > 0 for name, x in vars(self).items())

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on ``[T/s, H/h]``."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        if self.mesh.shape.size == 1:
            return super().forward(*args, **kwargs)
        hidden = self.mesh.along("hidden")
        is_random = self.is_random and self.training
        # Ranks along `hidden` route the same tokens, and must draw the same random numbers.
        draws = own_random_numbers(self.mesh, self._device(), ("batch", "sequence")) if is_random else nullcontext()
        with self.unsharded_in_place(), draws, SumOverHidden(hidden) if hidden.size > 1 else nullcontext():
            return super().forward(*args, **kwargs)

    def _device(self) -> torch.device:
        return next(self.parameters()).device


class SumOverHidden(TorchFunctionMode):
    """Inside, a linear layer multiplies the rank's part of the features, and partial results are summed."""

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
        result = summed_linear(input, weight, self._along)
        return result if bias is None else result + bias.to(result.dtype)


def summed_linear(x: torch.Tensor, weight: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """The product of parts ``[…, H/h]`` of the features with those of a weight, ``[E, H/h]``: ``[…, E]`` everywhere."""
    dtype = autocast_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    result: torch.Tensor = nn.functional.linear(x, weight) if along.size == 1 else _Summed.apply(x, weight, along)
    return result


class _Summed(torch.autograd.Function):
    """x Wᵀ from parts of the features; partial sums are rounded only when they are complete."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.along = along
        wide = statistics_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            partial_sums = nn.functional.linear(x.to(wide), weight.to(wide))
        # Gather and sum locally: every rank adds in the same order, which no backend's all-reduce guarantees.
        return all_gather(partial_sums, along).sum(0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        wide = statistics_dtype(gradient.dtype)
        # A copy: the all-reduce would overwrite the caller's gradient.
        dy = all_reduce(gradient.to(wide, copy=True), ctx.along)
        dx = (dy @ weight.to(wide)).to(gradient.dtype) if needs_x else None
        dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2).to(wide) if needs_weight else None
        return dx, None if dweight is None else dweight.to(weight.dtype), None
