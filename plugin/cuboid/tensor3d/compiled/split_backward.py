"""Weight gradients that a graph's backward leaves for later: see :mod:`cuboid.tensor3d.sharding.weight_gradients`.

A linear layer in a graph multiplies by its weight without the weight's gradient, and its output is given to an operator
whose backward takes the layer's input and the output's gradient. When the backward's graph is complete, both become
outputs of it, and the operators go: no copies, and no kernel that keeps what Inductor uses the memory of. The graph has
one number more as input, the anchor, whose gradient the operators seem to be.

On a mesh, input and gradient are the rank's own parts, as in uncompiled layers: they are gathered for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.tensor3d.compiled.hooks import fused_of
from cuboid.tensor3d.layers.fused_projections import FusedProjections
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore


class LeavesGradient(Protocol):
    """A linear layer that adds what its weight's gradient needs to a store.

    Attributes:
        in_graph, number: while the layer is part of a graph.
    """

    weight_gradients: WeightGradientStore
    in_graph: ProductsInGraph | None
    number: int

    def leave(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add the input and the output's gradient of the unit whose backward runs."""


class ProductsInGraph:
    """The linear layers of compiled layers that leave weight gradients.

    Attributes:
        layer: number of the layer that runs, a tensor on the host.
        anchor: a new one for each run of a layer.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._linears: list[list[Any]] = []
        #: By the id of a layer that shares its input with others: their hook.
        self._fused: dict[int, FusedProjections] = {}
        self._layers = [torch.tensor(number, device="cpu") for number in range(len(layers))]
        for layer in layers:
            linears: list[Any] = [
                module for module in layer.modules() if getattr(module, "weight_gradients", None) is not None
            ]
            for number, linear in enumerate(linears):
                linear.in_graph, linear.number = self, number
            self._linears.append(linears)
            hooks = [hook for module in layer.modules() for hook in module._forward_pre_hooks.values()]
            for fused in (fused for hook in hooks for fused in fused_of(hook)):
                self._fused.update(dict.fromkeys(map(id, fused.projections), fused))
        self.layer, self.anchor = torch.tensor(0), torch.tensor(0.0)

    @property
    def is_empty(self) -> bool:
        """Whether no layer has such products."""
        return not any(self._linears)

    def begin(self, number: int) -> None:
        """Before a layer's graph runs."""
        self.layer, self.anchor = self._layers[number], torch.zeros((), requires_grad=torch.is_grad_enabled())

    def leave(self, layer: torch.Tensor, numbers: Sequence[int], factors: Sequence[torch.Tensor]) -> None:
        """Give the linear layers with these numbers the inputs and gradients, one after the other."""
        linears = self._linears[int(layer)]
        #: By hook and input: what was left, by linear layer.
        together: dict[tuple[int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for place, number in enumerate(numbers):
            linear, x, dy = linears[number], factors[2 * place], factors[2 * place + 1]
            fused = self._fused.get(id(linear))
            if fused is None:
                linear.leave(x, dy)
                continue
            left = together.setdefault((id(fused), x.data_ptr()), {})
            left[id(linear)] = x, dy
            # One gather of the input for all, unless some of them are frozen or have been given something else.
            if len(left) == len(fused.projections):
                fused.leave(x, [left[id(projection)][1] for projection in fused.projections])
                left.clear()
        for left in together.values():
            for linear in linears:
                if id(linear) in left:
                    linear.leave(*left[id(linear)])

    def completed(self, graph: torch.fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        """Let a backward's graph return what weight gradients need; what then runs it. None if there is nothing."""
        nodes: list[Any] = [node for node in graph.graph.nodes if node.target is _LEAVE]
        if not nodes:
            return None
        output: Any = graph.graph.output_node()
        results, factors = list(output.args[0]), [factor for node in nodes for factor in node.args[:2]]
        layer, numbers = nodes[0].args[2], [node.args[3] for node in nodes]
        output.args = ((*results, layer, *factors),)
        for node in nodes:
            with graph.graph.inserting_before(node):
                zero = graph.graph.call_function(
                    torch.ops.aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": node.meta["val"].device}
                )
            zero.meta = dict(node.meta)
            node.replace_all_uses_with(zero)
            graph.graph.erase_node(node)
        graph.recompile()
        return lambda run: _Backward(self, run, len(results), numbers)


class _Backward:
    """A backward's graph, whose results behind the first ``count`` go to linear layers."""

    def __init__(self, products: ProductsInGraph, run: Callable[..., Any], count: int, numbers: Sequence[int]) -> None:
        # For AOTAutograd: arguments come as a list.
        self._boxed_call = True
        self._products, self._run, self._count, self._numbers = products, run, count, numbers

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Run, and give the linear layers what is theirs."""
        results = self._run(arguments)
        layer, *factors = results[self._count :]
        self._products.leave(layer, self._numbers, factors)
        return results[: self._count]


def leave_gradient(y: torch.Tensor, x: torch.Tensor, linear: LeavesGradient) -> torch.Tensor:
    """A layer's output, whose backward leaves the gradient of the layer's weight.

    Args:
        y: computed without the weight's gradient.
        x: the input from which the gradient will be computed, on a mesh the rank's part.
        linear: the layer.
    """
    assert linear.in_graph is not None
    output: torch.Tensor = _Leave.apply(y, x, linear.in_graph.anchor, linear.in_graph.layer, linear.number)
    return output


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, anchor: torch.Tensor, layer: torch.Tensor, number: int
    ) -> torch.Tensor:
        del anchor
        ctx.save_for_backward(x, layer)
        ctx.number = number
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, layer = ctx.saved_tensors
        return dy, None, _LEAVE(x, dy, layer, ctx.number), None, None


@torch.library.custom_op("cuboid::leave_weight_gradient", mutates_args=())
def _leave(x: torch.Tensor, dy: torch.Tensor, layer: torch.Tensor, number: int) -> torch.Tensor:  # noqa: ARG001
    raise AssertionError("a graph of a backward that wasn't completed")


@_leave.register_fake
def _left(_: torch.Tensor, dy: torch.Tensor, __: torch.Tensor, ___: int) -> torch.Tensor:
    return dy.new_empty((), dtype=torch.float32)


_LEAVE: Any = torch.ops.cuboid.leave_weight_gradient.default
