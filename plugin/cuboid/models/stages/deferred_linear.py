"""Plain linear layers whose weight gradient can be computed later, for stages without a mesh.

The products are those of ``nn.Linear`` and of Hugging Face's ``Conv1D``, forward and backward, so results are bitwise
equal. For how gradients are deferred see :mod:`cuboid.tensor3d.sharding.weight_gradients`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from cuboid.models.sharded.fp8 import Fp8Conv1D, Fp8Linear
from cuboid.tensor3d.compiled.split_backward import ProductsInGraph, leave_gradient
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore, new_edge


def defer_weight_gradients(modules: Iterable[nn.Module], store: WeightGradientStore) -> None:
    """Make the linear layers in some modules defer weight gradients to a store whenever it is open.

    These are :class:`ShardedLinear`, and modules whose class is exactly ``nn.Linear`` or ``Conv1D``. Any other subclass
    may compute something else, so its weight gradient isn't deferred.
    """
    for parent in modules:
        for module in parent.modules():
            if isinstance(module, ShardedLinear):
                module.weight_gradients = store
            elif type(module) in _DEFERRED:
                module.__class__ = _DEFERRED[type(module)]
                module.weight_gradients = store  # type: ignore[assignment]


class _LeavesGradient:
    """Mixin of linear layers that defer, also in compiled graphs.

    Attributes:
        in_graph, number: while the layer is part of a graph.
    """

    weight: Any
    bias: Any
    weight_gradients: WeightGradientStore
    in_graph: ProductsInGraph | None = None
    number = 0
    in_first = False

    def leave(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add to the store what the weight's gradient needs."""
        is_fp8 = isinstance(self, (Fp8Linear, Fp8Conv1D))
        layer = _DeferredLayer(self.weight, self.weight_gradients, self.in_first, is_fp8)
        self.weight_gradients.add(_DeferredProduct(layer, x.flatten(0, -2), dy.flatten(0, -2)))

    def multiply_in_graph(self, x: torch.Tensor) -> torch.Tensor:
        """As :func:`_multiply`, while a graph is made."""
        weight, bias = self.weight.detach(), self.bias
        weight = weight.t() if self.in_first else weight
        if isinstance(self, (Fp8Linear, Fp8Conv1D)):
            return leave_gradient(rowwise.linear(x, weight, bias), x, self)
        if torch.is_autocast_enabled(x.device.type):
            dtype = autocast_dtype(x)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return leave_gradient(nn.functional.linear(x, weight, bias), x, self)


class _DeferredLinear(_LeavesGradient, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, I]`` to ``[…, O]``."""
        if not self.weight_gradients.defers(self.weight):
            return super().forward(x)
        if self.in_graph is not None and torch.compiler.is_compiling():
            return self.multiply_in_graph(x)
        layer = _DeferredLayer(self.weight, self.weight_gradients, in_first=False, is_fp8=isinstance(self, Fp8Linear))
        return _multiply(x, self.bias, layer)


class _DeferredConv1D(_LeavesGradient, Conv1D):  # type: ignore[misc]
    in_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, I]`` to ``[…, O]``."""
        if not self.weight_gradients.defers(self.weight):
            return super().forward(x)  # type: ignore[no-any-return]
        if self.in_graph is not None and torch.compiler.is_compiling():
            return self.multiply_in_graph(x)
        layer = _DeferredLayer(self.weight, self.weight_gradients, in_first=True, is_fp8=isinstance(self, Fp8Conv1D))
        return _multiply(x, self.bias, layer)


class _DeferredFp8Linear(_DeferredLinear, Fp8Linear):
    pass


class _DeferredFp8Conv1D(_DeferredConv1D, Fp8Conv1D):
    pass


_DEFERRED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _DeferredLinear,
    Conv1D: _DeferredConv1D,
    Fp8Linear: _DeferredFp8Linear,
    Fp8Conv1D: _DeferredFp8Conv1D,
}
for _plain, _deferred in _DEFERRED.items():
    # Reports and PEFT identify a module's class by its name.
    _deferred.__name__ = _plain.__name__


@dataclass(frozen=True)
class _DeferredLayer:
    """A layer's weight, whose gradient bypasses autograd's graph, and its memory layout.

    ``in_first``: the weight is stored ``[I, O]`` instead of ``[O, I]``. ``is_fp8``: forward and dgrad are in fp8.
    """

    weight: torch.Tensor
    store: WeightGradientStore
    in_first: bool
    is_fp8: bool


def _multiply(x: torch.Tensor, bias: torch.Tensor | None, layer: _DeferredLayer) -> torch.Tensor:
    weight = layer.weight.detach()
    if layer.is_fp8:
        rowwise.check_dtypes(x, weight)
    elif torch.is_autocast_enabled(x.device.type):
        dtype = autocast_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    out: torch.Tensor = _Multiply.apply(x, bias, new_edge(x), weight, layer)
    return out


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        edge: torch.Tensor,
        weight: torch.Tensor,
        layer: _DeferredLayer,
    ) -> torch.Tensor:
        del edge
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        rows, weight_oi = x.flatten(0, -2), weight.t() if layer.in_first else weight
        if layer.is_fp8:
            y = rowwise.multiply(rows, weight_oi, fast=True)
            return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)
        return nn.functional.linear(rows, weight_oi, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _DeferredLayer = ctx.layer
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        # ``.data``, because a view would keep the input's whole graph alive, with everything it saved for backward.
        layer.store.add(_DeferredProduct(layer, x.data.flatten(0, -2), rows.data))
        dx = None
        if needs_x:
            weight_io = weight if layer.in_first else weight.t()
            dx = (rowwise.multiply(rows, weight_io) if layer.is_fp8 else rows.mm(weight_io.t())).view(x.shape)
        return dx, rows.sum(0) if needs_bias else None, None, None, None


@dataclass(frozen=True)
class _DeferredProduct:
    """A product of ``x`` ``[tokens, I]`` and ``dy`` ``[tokens, O]``; see
    :class:`~cuboid.tensor3d.sharding.weight_gradients.DeferredProduct`.
    """

    layer: _DeferredLayer
    x: torch.Tensor
    dy: torch.Tensor

    @property
    def key(self) -> Hashable:
        """Identifies the weight."""
        return id(self.layer.weight)

    def gradients(self, others: Sequence[_DeferredProduct]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """The weight with its gradient, summed over the tokens of all units."""
        left, right = self._factors
        if others and left.dtype != statistics_dtype(left.dtype):
            # As one product, whose sum is rounded to 16 bits once.
            lefts, rights = zip(*(product._factors for product in (self, *others)), strict=True)
            left, right, others = torch.cat(lefts), torch.cat(rights), ()
        # The same product as autograd's own, so that the gradient of one unit is bitwise equal.
        gradient = left.t().mm(right)
        for product in others:
            # Joining the units' rows would copy them, which takes a fifth as long as the product.
            left, right = product._factors
            gradient.addmm_(left.t(), right)
        return [(self.layer.weight, gradient.to(self.layer.weight.dtype))]

    @property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the gradient is the product of, the first one transposed."""
        return (self.x, self.dy) if self.layer.in_first else (self.dy, self.x)
