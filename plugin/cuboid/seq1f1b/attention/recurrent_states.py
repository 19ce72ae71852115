"""States that recurrent layers pass from one segment of a micro-batch to the next, and the gradients of those states.

A state (the last inputs of a causal convolution, the matrix of a linear attention or a state space model) is computed
by one segment's forward and read by the next segment's. Each segment has an autograd graph of its own. The next
segment's graph reads the state by :func:`read_state`, whose backward collects the gradient; :func:`carry_states` feeds
that gradient into the graph of the segment that computed the state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

#: Identifies a state of a layer, and the position at which the segment that computed it ends.
StateKey = tuple[Hashable, int]


class RecurrentStates:
    """The states of every recurrent layer of one stage, for one micro-batch, and their gradients."""

    def __init__(self) -> None:
        self._states: dict[StateKey, torch.Tensor] = {}
        self._gradients: dict[StateKey, torch.Tensor] = {}

    def write(self, key: StateKey, state: torch.Tensor) -> None:
        """Keep a state for the next segment. A recomputation may write the same state again, which is harmless."""
        self._states[key] = state.detach()

    def read(self, key: StateKey) -> torch.Tensor:
        """Return a state that a segment wrote.

        Raises:
            KeyError: it wasn't written.
        """
        return self._states[key]

    def add_gradient(self, key: StateKey, gradient: torch.Tensor) -> None:
        """Add the gradient of a state that the next segment's backward computed."""
        total = self._gradients.get(key)
        self._gradients[key] = gradient if total is None else total + gradient

    def take_gradient(self, key: StateKey) -> torch.Tensor | None:
        """Remove and return a state's gradient; None if there is none.

        Segments run backward in reverse order, so the state itself is no longer needed either and is freed.
        """
        self._states.pop(key, None)
        return self._gradients.pop(key, None)

    def free(self) -> None:
        """Free all states and gradients: the micro-batch is done, or was only evaluated."""
        self._states.clear()
        self._gradients.clear()

    @property
    def held_bytes(self) -> int:
        """Total size of all states and gradients."""
        return sum(x.nbytes for x in (*self._states.values(), *self._gradients.values()))


def read_state(states: RecurrentStates, key: StateKey) -> torch.Tensor:
    """Return a copy of a state that the previous segment wrote; its gradient is added to ``states`` in backward."""
    state = states.read(key)
    # Autograd runs a function's backward only if one of its inputs requires a gradient; this scalar serves as that.
    copy: torch.Tensor = _Read.apply(state.new_zeros((), requires_grad=state.is_floating_point()), states, key)
    return copy


def carry_states(
    hidden: torch.Tensor, states: RecurrentStates, keys: Sequence[StateKey], new_states: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Attach the states that a layer computed to its output, so that the output's backward includes theirs.

    Args:
        hidden: the layer's output, any shape.
        states: holds the states' gradients by the time of that backward.
        keys: the states' keys.
        new_states: the states themselves, as tensors of the layer's graph.

    Returns:
        A view of ``hidden``.
    """
    output: torch.Tensor = _Carry.apply(hidden, states, tuple(keys), *new_states)
    return output


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, states: RecurrentStates, key: StateKey) -> torch.Tensor:
        ctx.place = (states, key)
        # A copy, in case the layer's code updates the state in place.
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
        ctx: Any, hidden: torch.Tensor, states: RecurrentStates, keys: tuple[StateKey, ...], *new_states: torch.Tensor
    ) -> torch.Tensor:
        ctx.place = (states, keys)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, keys = ctx.place
        return gradient, None, None, *(states.take_gradient(key) for key in keys)
