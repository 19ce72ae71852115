"""States that recurrent layers hand from one segment of a micro-batch to the next, and the gradients that come back.

A state (the last inputs of a causal convolution, the matrix of a linear attention, of a state space) is made by one
segment's forward and read by the next one's. Each segment has a graph of its own, which a state leaves by
:func:`read_state` and into which its gradient comes back by :func:`carry_states`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

#: Names a state of a layer, and the position where the segment that made it ends.
StateKey = tuple[Hashable, int]


class RecurrentStates:
    """Of every layer of one stage, for one micro-batch."""

    def __init__(self) -> None:
        self._states: dict[StateKey, torch.Tensor] = {}
        self._gradients: dict[StateKey, torch.Tensor] = {}

    def write(self, key: StateKey, state: torch.Tensor) -> None:
        """Keep a state for the next segment. A recomputation writes the same once more, which changes nothing."""
        self._states[key] = state.detach()

    def read(self, key: StateKey) -> torch.Tensor:
        """What a segment wrote.

        Raises:
            KeyError: none did.
        """
        return self._states[key]

    def add_gradient(self, key: StateKey, gradient: torch.Tensor) -> None:
        """Add what the next segment sends back to a state."""
        before = self._gradients.get(key)
        self._gradients[key] = gradient if before is None else before + gradient

    def take_gradient(self, key: StateKey) -> torch.Tensor | None:
        """All that came back. Segments run backward in reverse order, so the state isn't needed any more."""
        self._states.pop(key, None)
        return self._gradients.pop(key, None)

    def free(self) -> None:
        """Forget everything: the micro-batch is done, or was only evaluated."""
        self._states.clear()
        self._gradients.clear()

    @property
    def held_bytes(self) -> int:
        """Of all states and gradients."""
        return sum(x.nbytes for x in (*self._states.values(), *self._gradients.values()))


def read_state(states: RecurrentStates, key: StateKey) -> torch.Tensor:
    """A state that the segment before has written; what it is used for sends a gradient back."""
    state = states.read(key)
    # An output of autograd's needs an input that has a gradient.
    found: torch.Tensor = _Read.apply(state.new_zeros((), requires_grad=state.is_floating_point()), states, key)
    return found


def carry_states(
    hidden: torch.Tensor, states: RecurrentStates, keys: Sequence[StateKey], made: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Let the backward of a layer's output begin that of the states that the layer made, too.

    Args:
        hidden: the layer's output, any shape.
        states: where the gradients of the states will be by then.
        keys, made: names of the states, and the states in the layer's graph.

    Returns:
        ``hidden``.
    """
    carried: torch.Tensor = _Carry.apply(hidden, states, tuple(keys), *made)
    return carried


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, states: RecurrentStates, key: StateKey) -> torch.Tensor:
        ctx.place = (states, key)
        # A copy, for code that advances a state in place.
        return states.read(key).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        states, key = ctx.place
        states.add_gradient(key, gradient)
        return gradient.new_zeros(()), None, None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, states: RecurrentStates, keys: tuple[StateKey, ...], *made: torch.Tensor
    ) -> torch.Tensor:
        ctx.place = (states, keys)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, keys = ctx.place
        return gradient, None, None, *(states.take_gradient(key) for key in keys)
