"""Deferred reduce-scatter: gradients on their way to the shards while the backward of the layer before runs.

A reduce-scatter of a weight's gradient has time until the optimizer's step. But whatever a backward returns, autograd
adds to ``grad`` at once, and calls the hooks by which frameworks learn of it. So between the parameters of a layer and
their users stands a node that was made *before* the layer ahead of it ran in forward. Autograd runs nodes in the
opposite order of their making, so this one comes up when that other layer's backward is through, and waits then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuboid.distributed.async_result import AsyncResult


class DeferredReduce:
    """Reduce-scatters that were started for some shards, and are waited for later."""

    def __init__(self) -> None:
        self._pending: list[AsyncResult[Any]] = []

    def defer(self, gradient: AsyncResult[Any]) -> None:
        """Wait for this one later. Until then nobody must read it."""
        self._pending.append(gradient)

    def wait(self) -> None:
        """For all of them."""
        for gradient in self._pending:
            gradient.wait()
        self._pending = []


class _Shards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: DeferredReduce, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.view_as, shards, shards))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.deferred.wait()
        return None, *gradients


def deferred_shards(shards: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], DeferredReduce]:
    """The same shards, each for one use in forward, whose backward may :meth:`~DeferredReduce.defer` its gradient."""
    deferred = DeferredReduce()
    return _Shards.apply(deferred, *shards), deferred
