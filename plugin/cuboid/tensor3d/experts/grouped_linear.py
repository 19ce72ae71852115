"""The two products of a mixture's experts, on a batch × sequence × hidden mesh.

As those of a dense MLP (:mod:`cuboid.tensor3d.layers.linear_op`), for R = T·k rows that are sorted by expert. Per rank,
with T = B/b · S tokens, k experts for each, and E weights of O out and I in features:

========  ======================  ======================
tensor    up (gate and up)        down
========  ======================  ======================
input     [T/s, I/h] of tokens    [R, I/(s·h)] of rows
shard     [E/b, O/s, I/h]         [E/b, O/h, I/s]
block     [E, O/s, I/h]           [E, O/h, I/s]
output    [R, O/(s·h)] of rows    [T/s, O/h] of tokens
========  ======================  ======================

Up gathers the tokens over `sequence`, and scatters its rows' features over `hidden`; down gathers features over
`hidden`, adds up the rows of each token, and scatters tokens over `sequence`. So no collective's size depends on the
router's choices, and the gather of one product's input is that of the other's output gradient in backward. Only shards
are saved for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import (
    positions_are_whole,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.experts.dispatch import Dispatch, multiply_rows, multiply_transposed
from cuboid.tensor3d.experts.expert_update import LowRankUpdate
from cuboid.tensor3d.sharding.bucketing import start_reduce_scatters, start_unshards
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.sharded_param import ShardedParam


class Side(Protocol):
    """How a rank's part of a product's input or output relates to the rows that are multiplied."""

    def start_gather(self, x: torch.Tensor, dispatch: Dispatch) -> AsyncResult[torch.Tensor]:
        """Start to gather the rank's own part to rows ``[R, F]``."""
        ...

    def start_scatter(self, rows: torch.Tensor, dispatch: Dispatch) -> AsyncResult[torch.Tensor]:
        """The transpose: start to reduce partial sums ``[R, F]`` to the rank's own part of their sum."""
        ...


@dataclass(frozen=True)
class Tokens:
    """A rank has its own tokens, with all features that its block multiplies: ``[T/s, F]``."""

    along: AxisGroup

    def start_gather(self, x: torch.Tensor, dispatch: Dispatch) -> AsyncResult[torch.Tensor]:
        """See :class:`Side`."""
        if positions_are_whole():
            return AsyncResult(dispatch.rows(x))
        return start_all_gather(x, self.along, lambda stacked: dispatch.rows(stacked.flatten(0, 1)))

    def start_scatter(self, rows: torch.Tensor, dispatch: Dispatch) -> AsyncResult[torch.Tensor]:
        """See :class:`Side`."""
        if positions_are_whole():
            return start_all_reduce(dispatch.token_sums(rows), self.along)
        return start_reduce_scatter(dispatch.token_sums(rows).unflatten(0, (self.along.size, -1)), self.along)


@dataclass(frozen=True)
class Features:
    """A rank has all rows, with its own features: ``[R, F/h]``, the same share of each of ``parts`` parts."""

    along: AxisGroup
    parts: int = 1

    def start_gather(self, x: torch.Tensor, _: Dispatch) -> AsyncResult[torch.Tensor]:
        """See :class:`Side`."""
        return start_all_gather(x, self.along, self._together)

    def _together(self, stacked: torch.Tensor) -> torch.Tensor:
        # [h, R, parts · F] -> [R, parts, h, F] -> [R, parts · h · F]
        return stacked.unflatten(-1, (self.parts, -1)).movedim(0, 2).flatten(1)

    def start_scatter(self, rows: torch.Tensor, _: Dispatch) -> AsyncResult[torch.Tensor]:
        """See :class:`Side`."""
        by_rank = rows.unflatten(-1, (self.parts, self.along.size, -1)).movedim(2, 0)
        return start_reduce_scatter(by_rank.flatten(2), self.along)


@dataclass(frozen=True)
class GroupedProduct:
    """One product with the weights of all experts, and its collectives.

    ``source`` gathers the input, ``target`` reduces the output. With ``in_first``, weights are stored ``[E, in, out]``
    instead of ``[E, out, in]``. ``deferred`` waits for the reduction of the shard's gradient; without it, the gradient
    is complete when backward returns it. ``update`` is added to the block, which then has the dtype of the shard.
    """

    weight: ShardedParam
    in_first: bool
    source: Side
    target: Side
    deferred: DeferredReduce | None
    update: LowRankUpdate | None = None

    def __call__(self, x: torch.Tensor, shard: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        """Multiply the rank's part of the input, differentiably."""
        factors = (None, None) if self.update is None else (self.update.a, self.update.b)
        out: torch.Tensor = _GroupedLinear.apply(x, shard, *factors, self, dispatch)
        return out

    def in_out(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block as ``[E, in, out]``, once it is unsharded."""
        block = self.weight.unsharded() if self.weight.ranks > 1 else shard
        if self.update is not None:
            block = self.update.add_to(block).to(dtype)
        return block if self.in_first else block.transpose(1, 2)

    def block_gradient(self, x: torch.Tensor, dy: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        """The rank's part of the sum that is the block's gradient, from rows of input and output gradient."""
        factors = (x, dy) if self.in_first else (dy, x)
        return multiply_transposed(*factors, dispatch)

    def start_weight_gradient(self, block_gradient: torch.Tensor) -> AsyncResult[torch.Tensor] | None:
        """Start to reduce-scatter dW; None before a step's last backward."""
        total = self.weight.to_reduce(block_gradient, is_own=True)
        if total is None:
            return None
        (reducing,) = start_reduce_scatters([self.weight], [total])
        return reducing


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shard: torch.Tensor,
        _a: torch.Tensor | None,
        _b: torch.Tensor | None,
        product: GroupedProduct,
        dispatch: Dispatch,
    ) -> torch.Tensor:
        # The product has the factors, which are arguments for the sake of their gradients.
        ctx.product = product
        gathering = product.source.start_gather(x, dispatch)
        start_unshards([product.weight], [shard])
        rows = multiply_rows(gathering.wait(), product.in_out(shard, x.dtype), dispatch)
        scattering = product.target.start_scatter(rows, dispatch)
        # Checkpointing drops the dispatch with all else that is saved; the spans, on the host, stay.
        keeps_input = any(ctx.needs_input_grad[1:4])
        ctx.save_for_backward(x if keeps_input else None, shard, *dispatch.tensors)
        ctx.per_token, ctx.known_spans = dispatch.per_token, dispatch.known_spans
        # With "weight_gather": "step", keeps the block for backward.
        ctx.copy = product.weight.reshard_after_forward(shard, keep=any(ctx.needs_input_grad))
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        product: GroupedProduct = ctx.product
        x, shard, choices, places, experts, ends = ctx.saved_tensors
        dispatch = Dispatch(choices, places, experts, ends, ctx.per_token, ctx.known_spans)
        needs_x, needs_weight, needs_a, needs_b, *_ = ctx.needs_input_grad
        needs_block = needs_weight or needs_a or needs_b
        # Start all gathers before waiting for any of them.
        gathering = product.target.start_gather(gradient, dispatch)
        inputs = product.source.start_gather(x, dispatch) if needs_block else None
        if needs_x:
            start_unshards([product.weight], [shard])
        dy = gathering.wait()
        scattering = None
        if needs_x:
            by_out = product.in_out(shard, gradient.dtype).transpose(1, 2)
            scattering = product.source.start_scatter(multiply_rows(dy, by_out, dispatch), dispatch)
        # dW's product overlaps with dx's reduction.
        dweight: torch.Tensor | None = None
        factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if inputs is not None:
            block_gradient = product.block_gradient(inputs.wait(), dy, dispatch)
            if product.update is not None:
                factors = product.update.gradients(block_gradient)
            reducing = product.start_weight_gradient(block_gradient) if needs_weight else None
            if reducing is not None and product.deferred is None:
                dweight = reducing.wait()
            elif reducing is not None and product.deferred is not None:
                product.deferred.defer(reducing)
                dweight = reducing.incomplete()
        product.weight.discard()
        ctx.copy = None
        return None if scattering is None else scattering.wait(), dweight, *factors, None, None


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.along = along
        return start_all_gather(x, along).wait().flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start_reduce_scatter(gradient.unflatten(0, (ctx.along.size, -1)), ctx.along).wait(), None


def gather_routing(index: torch.Tensor, weights: torch.Tensor, along: AxisGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather the router's choices and weights of a rank's own tokens, ``[T/s, k]``, to those of all, ``[T, k]``.

    The weights' gradients are summed over the ranks, which multiply them with different features.
    """
    if positions_are_whole():
        return index.int(), weights
    all_indices: torch.Tensor = start_all_gather(index.int(), along).wait().flatten(0, 1)
    return all_indices, _AllTokens.apply(weights, along)
