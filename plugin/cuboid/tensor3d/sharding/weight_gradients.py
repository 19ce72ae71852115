"""The second half of a split backward: weight gradients that are computed later than the gradient of the input.

A layer that defers multiplies by ``weight.detach()``, so that the weight isn't in the autograd graph: if backward only
returned None for it, hooks that wait for the weight's gradient would be called without one. In backward, the layer adds
what dW needs, the rank's own part of the input and of the output's gradient, to a store. When the store runs a unit,
the gradients go through autograd's own accumulation, which calls all hooks. Layers that don't defer, norms, biases and
embeddings get their gradients together with the input's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class DeferredProduct(Protocol):
    """The weight gradients of one layer, or of several with one input, for one unit.

    Attributes:
        key: the same for the same layer in all units.
    """

    @property
    def key(self) -> Hashable:
        """See above."""
        ...

    def gradients(self, others: Sequence[Any]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a weight and its gradient, summed over this unit and others with the same key."""
        ...


class WeightGradientStore:
    """What a stage's deferred weight gradients need, by unit, between the unit's two backward halves.

    It is an object that layers refer to, not a context variable: on CUDA, backward runs in autograd's threads.
    """

    def __init__(self) -> None:
        #: Whether layers whose forward runs now should defer.
        self.is_open = False
        self._unit: Hashable = None
        self._waiting: dict[Hashable, list[DeferredProduct]] = {}

    def defers(self, weight: torch.Tensor) -> bool:
        """Whether a product whose forward runs now should defer the gradient of ``weight``."""
        return self.is_open and weight.requires_grad and torch.is_grad_enabled()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let layers defer: for forwards, and for backwards that may recompute them."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    @contextmanager
    def filling(self, unit: Hashable) -> Iterator[None]:
        """Assign products added inside to ``unit``: for the unit's backward."""
        self._unit = unit
        self._waiting[unit] = []
        try:
            with self.open():
                yield
        finally:
            self._unit = None

    def add(self, product: DeferredProduct) -> None:
        """Add a layer's product to the current unit, in the layer's backward."""
        assert self._unit is not None, "a backward outside of a unit"
        self._waiting[self._unit].append(product)

    def run(self, units: Sequence[Hashable]) -> None:
        """Accumulate the weight gradients of units that were filled, layer by layer in the order of their backward.

        A layer's gradients are summed over the units first, then reduced and accumulated once.
        """
        by_layer: dict[Hashable, list[DeferredProduct]] = {}
        for unit in units:
            count: dict[Hashable, int] = {}
            for product in self._waiting.pop(unit):
                # A layer may be called more than once in a unit.
                count[product.key] = count.get(product.key, 0) + 1
                by_layer.setdefault((product.key, count[product.key]), []).append(product)
        for key in list(by_layer):
            first, *others = by_layer.pop(key)
            # As in any backward, where grad mode is off.
            with torch.no_grad():
                for weight, gradient in first.gradients(others):
                    torch.autograd.backward(weight, gradient)

    def check_empty(self) -> None:
        """Check at the end of a step that no unit is left."""
        assert not self._waiting, f"weight gradients of {next(iter(self._waiting))} never ran"

    def clear(self) -> None:
        """Drop everything, after an error."""
        self._waiting.clear()
        self._unit, self.is_open = None, False


def new_edge(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor that wants a gradient: an output that depends on it runs backward even if nothing else does.

    That happens after a frozen embedding, where neither the detached weight nor its input requires a gradient.
    """
    return torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True)
