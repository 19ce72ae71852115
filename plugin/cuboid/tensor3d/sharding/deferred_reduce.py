"""Deferred reduce: a gradient's reduce-scatter is in flight while the backward of the preceding layer runs.

Only the optimizer's step needs the reduced gradient. But autograd adds what a backward returns to ``grad`` at once, and
then calls the hooks that frameworks have registered. So there is a node between the parameters of a layer and the
products that use them, created *before* the preceding layer ran in forward. Autograd runs nodes in the reverse order of
their creation, so this node runs when that layer's backward has finished, and waits for the reduce-scatters then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuboid.distributed.async_result import AsyncResult


class DeferredReduce:
    """Reduce-scatters in flight for the shards of one layer."""

    def __init__(self) -> None:
        self._pending: list[AsyncResult[Any]] = []

    def defer(self, gradient: AsyncResult[Any]) -> None:
        """Add one. Its result must not be read before :meth:`wait`."""
        self._pending.append(gradient)

    def wait(self) -> None:
        """Wait for all of them."""
        for gradient in self._pending:
            gradient.wait()
        self._pending = []


class _ReduceToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: DeferredReduce, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.deferred = deferred
        # A frozen shard's gradient stays None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.view_as, shards, shards))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.deferred.wait()
        return None, *gradients


def deferred_shards(shards: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], DeferredReduce]:
    """Views of the shards, each for one product, whose backward may :meth:`~DeferredReduce.defer` its gradient."""
    deferred = DeferredReduce()
    return _ReduceToShards.apply(deferred, *shards), deferred
