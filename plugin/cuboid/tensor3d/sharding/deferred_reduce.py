"""Gradients that are still on their way to the shards while the backward of the layer before goes on.

A reduce-scatter of a weight's gradient has time until the optimizer's step. But whatever a backward returns, autograd
adds to ``grad`` at once, and calls the hooks by which frameworks learn of it. So between the parameters of a layer and
their users stands a node that was made *before* the layer ahead of it ran in forward. Autograd runs nodes in the
opposite order of their making, so this one comes up when that other layer's backward is through, and waits then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuboid.distributed.async_result import Pending


class Carry:
    """The gradients that are on their way to some shards."""

    def __init__(self) -> None:
        self._pending: list[Pending[Any]] = []

    def leave(self, gradient: Pending[Any]) -> None:
        """Wait for this one later. Until then nobody must read it."""
        self._pending.append(gradient)

    def wait(self) -> None:
        """For all of them."""
        for gradient in self._pending:
            gradient.wait()
        self._pending = []


class _Shards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.carry = carry
        ctx.set_materialize_grads(False)
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.carry.wait()
        return None, *gradients


def carried_shards(shards: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Carry]:
    """The same shards, each for exactly one use in forward, whose backward may :meth:`Carry.leave` the gradient."""
    carry = Carry()
    return _Shards.apply(carry, *shards), carry
