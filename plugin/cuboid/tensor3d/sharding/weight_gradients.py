"""The second half of a split backward: weight gradients that are computed later than the gradient of the input.

A layer that defers multiplies by ``weight.detach()``, so that autograd knows nothing of the weight: if its backward
merely returned None for it, hooks that wait for the weight's gradient would be called without one. In backward it adds
what the product needs, the rank's own part of the input and the gradient of the output, to a store. When the store runs
a unit, the gradients go through autograd's own accumulation, which calls whatever hooks there are. Layers that don't
defer, norms, biases and embeddings have their gradients with the input's.
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
        """The weights with their gradients, this unit's and those of others with the same key added up."""
        ...


class WeightGradientStore:
    """What a stage's weight gradients need, by unit, from the input gradients of the unit on.

    It is an object that layers refer to, not a context variable: under CUDA, backward runs in threads of autograd's.
    """

    def __init__(self) -> None:
        #: Whether layers that run forward now are to defer.
        self.is_open = False
        self._unit: Hashable = None
        self._waiting: dict[Hashable, list[DeferredProduct]] = {}

    def defers(self, weight: torch.Tensor) -> bool:
        """Whether the product with a weight, now in its forward, is to defer its gradient."""
        return self.is_open and weight.requires_grad and torch.is_grad_enabled()

    @contextmanager
    def open(self) -> Iterator[None]:
        """For forwards, and for backwards in which they may run again."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    @contextmanager
    def filling(self, unit: Hashable) -> Iterator[None]:
        """For the backward of a unit: what is added belongs to it."""
        self._unit = unit
        self._waiting[unit] = []
        try:
            with self.open():
                yield
        finally:
            self._unit = None

    def add(self, product: DeferredProduct) -> None:
        """Called by a layer's backward."""
        assert self._unit is not None, "a backward outside of a unit"
        self._waiting[self._unit].append(product)

    def run(self, units: Sequence[Hashable]) -> None:
        """Accumulate the weight gradients of units that were filled, layer by layer in the order of their backward.

        Of several units, those of a layer are added up first, and accumulated and reduced once.
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
            # Grad mode is off in any backward, too.
            with torch.no_grad():
                for weight, gradient in first.gradients(others):
                    weight.backward(gradient)  # type: ignore[no-untyped-call]

    def check_empty(self) -> None:
        """At the end of a step."""
        assert not self._waiting, f"weight gradients of {next(iter(self._waiting))} never ran"

    def clear(self) -> None:
        """Forget everything, after an error."""
        self._waiting.clear()
        self._unit, self.is_open = None, False


def new_edge(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor that wants a gradient: an output that depends on it runs backward even if nothing else does.

    That is so behind a frozen embedding, where a detached weight and its input both want none.
    """
    return torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True)
