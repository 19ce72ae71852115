"""The products of one input with the weights of a transformer block, on a batch × sequence × hidden mesh.

Bian et al., arXiv 2105.14450 (section 3), generalised to axes of any sizes and to the order in which Hugging Face
blocks multiply. Per rank, with O and I the weight's out and in features as Hugging Face counts them:

========  ==================  ====================  ================================
tensor    up (q k v gate up)  down (o, down)        LM head
========  ==================  ====================  ================================
input     [B/b, S/s, I/h]     [B/b, S, I/(s·h)]     [B/b, S/s, I/h]
shard     [O/(s·b), I/h]      [O/(h·b), I/s]        [O/(s·b), I/h]
block     [O/s, I/h]          [O/h, I/s]            [O/s, I/h]
output    [B/b, S, O/(s·h)]   [B/b, S/s, O/h]       [B/b, S/h, O/s]
========  ==================  ====================  ================================

With G the gather before (:mod:`.input_gather`) and R the reduction after the product (:mod:`.output_reduce`), forward,
dgrad and wgrad are

    y = R(G(x) Wᵀ)      dx = Gᵀ(Rᵀ(dy) W)      dW = Rᵀ(dy)ᵀ G(x), reduce-scattered over `batch`.

The transpose of an all-gather is the reduce-scatter along the same axis, and the other way round. The input and the
weights are saved as shards and gathered again in backward. There, all gathers are started before the first of them is
needed, dx's reduction overlaps with dW's product, and dW's reduction with what backward computes next. Where the
collectives cross a network, the batch's rows are cut into parts: one part is multiplied while others are in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    positions_are_whole,
    scatter_dim,
)
from cuboid.tensor3d.decoding.few_tokens import FewTokens, FewTokensProduct
from cuboid.tensor3d.decoding.late_norm import PendingNorm
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.fp8.quantized import Quantized
from cuboid.tensor3d.layers.input_gather import GatherFeatures, GatherSequence, InputGather
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.output_reduce import (
    Columns,
    Fp8Columns,
    OutputReduce,
    SelectHeads,
    multiply_batch,
    share_reduces,
)
from cuboid.tensor3d.sharding.bucketing import find_largest, start_reduce_scatters, start_unshards
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm
from cuboid.tensor3d.sharding.sharded_param import ShardedParam, is_recomputing
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore, new_edge

T = TypeVar("T")

_hooks_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
#: Maximum number of parts that the batch's rows are cut into, and minimum bytes of a part.
_PARTS, _PART_BYTES = 4, 512 << 10
#: Maximum bytes of a gathered input that the previous backward starts to gather. A longer one would be there while the
#: previous product's tensors, of as many tokens, are still needed. Its gather hides behind little: such rows compute
#: attention most of the time.
EARLY_BYTES = 2 << 30


@dataclass(frozen=True)
class Product:
    """The constants of one layer's product."""

    weight: ShardedParam
    output_reduce: OutputReduce
    #: Whether the weight is stored ``[in, out]``, as in Hugging Face's Conv1D.
    in_first: bool = False
    #: First and last (exclusive) out row of the block to multiply; None for all. A block has more rows than a rank
    #: needs where key/value heads are fewer than ranks.
    rows: tuple[int, int] | None = None
    #: Whether forward and dgrad multiply in fp8; see :mod:`cuboid.tensor3d.fp8.rowwise`.
    is_fp8: bool = False

    @cached_property
    def is_plain(self) -> bool:
        """Whether the block is multiplied without a transpose or a slice."""
        return self.rows is None and not self.in_first

    def out_in(self, block: torch.Tensor) -> torch.Tensor:
        """View of a block as ``[out, in]``, restricted to ``rows``."""
        view = block.t() if self.in_first else block
        return view if self.rows is None else view[slice(*self.rows)]


@dataclass(frozen=True)
class DeferredWeight:
    """A shard whose gradient isn't part of this backward: a later W action of the schedule computes it.

    The store collects the inputs and output gradients that W needs.
    """

    weight: torch.Tensor
    store: WeightGradientStore


@dataclass(frozen=True)
class Operand:
    """The operands of one call of a product: the weight's shard, and a bias ``[O']`` or None."""

    weight: torch.Tensor
    #: Waits for the reduction of the shard's gradient; None if the gradient must be complete when backward returns it.
    deferred: DeferredReduce | None = None
    bias: torch.Tensor | None = None
    #: Set if a later W action computes the weight's gradient; ``weight`` is detached then.
    deferred_weight: DeferredWeight | None = None


class LinearOp:
    """The products of one input, such as q, k and v: one all-gather, one reduction and one backward for all of them."""

    def __init__(self, input_gather: InputGather, products: Sequence[Product]) -> None:
        self.input_gather = input_gather
        self.products = tuple(products)
        self.params = [product.weight for product in products]
        self.mesh = self.params[0].mesh
        #: Whether any weight is sharded over its ``fsdp_axes``: only then is anything unsharded or reduce-scattered.
        self.is_sharded = any(param.unshards for param in self.params)
        #: The dtype that weights stored in 4 bits are restored in; None if all are stored as they are multiplied.
        self.restored_dtype = next((param.four_bits.dtype for param in self.params if param.four_bits), None)
        self.has_fp8 = any(map(attrgetter("is_fp8"), products))
        self.is_fp8 = all(map(attrgetter("is_fp8"), products))
        #: Whether forward gathers the input in fp8. Backward gathers it as it is, for the weights' gradients.
        self.gathers_fp8 = self.is_fp8 and input_gather.reduces
        #: Whether it may be a layer's last product: that of a "down" projection.
        self.may_be_last = isinstance(input_gather, GatherFeatures)
        #: Products whose results are reduced by one collective: the collective, and the products' numbers.
        self.groups = share_reduces([product.output_reduce for product in products])
        #: For each product, the number of its group and its index in the group.
        self.places = [
            next((group, numbers.index(number)) for group, (_, numbers) in enumerate(self.groups) if number in numbers)
            for number in range(len(products))
        ]

    def __call__(
        self,
        x: torch.Tensor,
        operands: Sequence[Operand],
        *,
        returns_input: bool = False,
        next_backward: weakref.ref[Node] | None = None,
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
        """Multiply, differentiably.

        Args:
            x: the rank's part of the input.
            operands: one for each product.
            returns_input: whether to return the gathered input too, differentiably.
            next_backward: the autograd node of the product whose backward runs right after this one's. This backward
                starts to gather that product's input.

        Returns:
            The gathered input or None, and the products' outputs.
        """
        if positions_are_whole():
            return None, self.without_graph(x, operands)
        weights, biases, deferrals, deferred_weights = [], [], [], []
        if self.has_fp8:
            rowwise.check_dtypes(x, operands[0].weight)
        for operand in operands:
            weights.append(operand.weight)
            biases.append(operand.bias)
            deferrals.append(operand.deferred)
            deferred_weights.append(operand.deferred_weight)
        edge = new_edge(x) if any(deferred_weights) else None
        saved = None
        # Whether hooks take what autograd saves, as those of activation checkpointing do.
        if self.may_be_last and _hooks_of_saved_tensors(True) is not None:
            keeps_input = any(deferred_weights) or any(map(attrgetter("requires_grad"), weights))
            first = _SavedOperands.apply(keeps_input, x, *weights)
            if first.requires_grad:
                edge, saved = first, first.grad_fn
        call = _ProductCall(self, deferrals, deferred_weights, returns_input, next_backward, saved)
        gathered, *outs = _LinearFunction.apply(x, call, edge, *weights, *biases)
        return gathered, outs

    def without_graph(self, x: torch.Tensor | PendingNorm, operands: Sequence[Operand]) -> Sequence[torch.Tensor]:
        """The products' outputs, of whole positions. ``x`` may be the norm that the input is of."""
        weights = [operand.weight for operand in operands]
        if not self.has_fp8 and self.restored_dtype is None and self._few_tokens.takes(x):
            outs = self._few_tokens(x, weights)
        else:
            outs = self._of_unsharded(x.values() if isinstance(x, PendingNorm) else x, weights)
        for out, operand in zip(outs, operands, strict=True):
            if operand.bias is not None:
                out.add_(operand.bias)
        return outs

    def _of_unsharded(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.has_fp8:
            rowwise.check_dtypes(x, weights[0])
        if self.restored_dtype is not None:
            x = x.to(self.restored_dtype)
        # In fp8, products round their inputs, row by row and piece by piece, as if they came rounded.
        pieces = self.input_gather.start(x).wait()
        if self.is_sharded:
            start_unshards(self.params, weights, BlockForm.ROWS)
        columns = [(reduce, self.columns(weights, numbers)) for reduce, numbers in self.groups]
        outs = self.in_order([reduce.start(pieces, of_group) for reduce, of_group in columns])
        for param in self.params:
            if param.unshards:
                param.reshard()
        return outs

    @cached_property
    def _few_tokens(self) -> FewTokens:
        few = []
        for product, (group, place) in zip(self.products, self.places, strict=True):
            reduce, _ = self.groups[group]
            rows = None if product.rows is None else slice(*product.rows)
            selects = isinstance(reduce, SelectHeads) or (reduce.along is not None and reduce.along.size > 1)
            select = partial(reduce.own_features, product=place) if selects else None
            few.append(FewTokensProduct(product.weight, product.in_first, rows, reduce.along, select))
        return FewTokens(few, gathers_features=isinstance(self.input_gather, GatherFeatures))

    def defer(self, weights: Sequence[DeferredWeight], x: torch.Tensor, dy: Sequence[torch.Tensor]) -> None:
        """Add what the weights' gradients need to their store: the rank's parts of the input and of outputs' gradients.

        For products that something else has computed.
        """
        parts = self.parts(x) if self.mesh.spans_nodes else 1
        weights[0].store.add(_DeferredWeights(self, parts, weights, x, dy))

    def parts(self, x: torch.Tensor) -> int:
        """Number of parts to cut the input's rows into: one part's collectives overlap with another's products."""
        if self.mesh.size("sequence", "hidden") == 1:
            return 1
        return max(1, min(_PARTS, x.shape[0], x.nbytes // _PART_BYTES))

    def block(self, weights: Sequence[torch.Tensor], number: int) -> Any:
        """A product's weight as ``[out, in]``, or in fp8 (see :class:`Fp8Blocks`); waits until it is unsharded."""
        product = self.products[number]
        block = product.weight.unsharded() if product.weight.unshards else weights[number]
        return block if product.is_plain else product.out_in(block)

    def columns(self, weights: Sequence[torch.Tensor], numbers: Sequence[int]) -> Iterable[Columns]:
        """For each of some products, the block's columns for each piece of the input; waits for blocks lazily."""
        if self.has_fp8:
            return map(partial(self._fp8_columns, weights), numbers)
        blocks = map(partial(self.block, weights), numbers)
        if self.input_gather.pieces == 1:
            return zip(blocks, strict=True)
        # [O, I] -> n of [O, I/n]. Not a generator, each step of which would be a Python call.
        return map(partial(torch.chunk, chunks=self.input_gather.pieces, dim=1), blocks)

    def _fp8_columns(self, weights: Sequence[torch.Tensor], number: int) -> Columns:
        block = self.block(weights, number)
        columns = block if isinstance(block, list) else torch.chunk(block, self.input_gather.pieces, 1)
        is_fp8 = self.products[number].is_fp8
        return Fp8Columns(columns, [is_fp8] * len(columns), fast=True) if is_fp8 else columns

    def in_order(self, by_group: Sequence[AsyncResult[Sequence[T]]]) -> Sequence[T]:
        """Wait for the groups' collectives, and return their results in the order of the products."""
        if len(by_group) == 1:
            return by_group[0].wait()
        results = [pending.wait() for pending in by_group]
        return [results[group][place] for group, place in self.places]

    def input_gradient(
        self, weights: Sequence[torch.Tensor], dy: Sequence[torch.Tensor]
    ) -> AsyncResult[Sequence[torch.Tensor]]:
        """dx = Σ dy W over the products; starts the reduce-scatter that leaves the rank its own part of dx."""
        # The terms of all products, as pieces of one long row of features, go into one call, which sums them in its
        # output buffer: dy n × [B/b, S, O/n], and the weights' rows, transposed, n × [I, O/n].
        pieces: list[Any] = []
        rows: list[Any] = []
        for output_reduce, numbers in self.groups:
            for place, number in enumerate(numbers):
                pieces += dy[number].unbind()
                block = self.block(weights, number)
                columns = block if isinstance(block, Quantized) else output_reduce.rows(block, place).mT
                rows += columns.unbind()
        if self.has_fp8:
            numbers_of_pieces = [number for _, numbers in self.groups for number in numbers for _ in dy[number]]
            rows = Fp8Columns(rows, [self.products[number].is_fp8 for number in numbers_of_pieces], fast=False)
        return self.input_gather.transpose.start(pieces, (rows,))

    def block_gradient(self, number: int, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dW = dyᵀ x of a block, ``[out, in]`` or ``[in, out]`` as stored; rows that weren't multiplied are zeros.

        Args:
            number: index of the product.
            dy: gradient of the product's output, ``[pieces, ..., features]``.
            x: the gathered input, ``[pieces, ..., features]``. At most one of the two has several pieces.
        """
        product = self.products[number]
        group, place = self.places[number]
        shape = product.weight.block_shape
        dweight = x.new_empty(shape) if product.rows is None else x.new_zeros(shape)
        block = dweight if product.is_plain else product.out_in(dweight)
        # [pieces, B/b, S, features] -> [pieces, tokens, features]
        dy, x = dy.flatten(1, -2), x.flatten(1, -2)
        if len(x) > 1:
            # Each piece of the input has its own columns of dW: view them as [pieces, out, in / pieces].
            assert len(dy) == 1, "pieces of both factors"
            places: Sequence[tuple[slice, torch.Tensor]] = [
                (slice(None), block.unflatten(1, (len(x), -1)).movedim(1, 0))
            ]
        else:
            places = self.groups[group][0].places(block, place)
        for features, out in places:
            # [pieces, tokens, features]: the factor that comes in one piece is used for all of them.
            gradients, inputs = dy[..., features].expand(len(out), -1, -1), x.expand(len(out), -1, -1)
            # A block that is stored [in, out] gets the transposed product, so that it is written without a copy.
            if product.in_first:
                multiply_batch((inputs.mT,), (gradients.mT,), out.mT)
            else:
                multiply_batch((gradients.mT,), (inputs.mT,), out)
        return dweight

    def reduce(self, blocks: dict[int, torch.Tensor]) -> dict[int, AsyncResult[torch.Tensor]]:
        """Start the reduce-scatters of block gradients, keyed by the products' numbers."""
        if self.params[0].gradient_sync is not None:
            # "gradient_sync": "step": gradients are summed here, and reduced once a sum is complete.
            totals = {number: self.params[number].to_reduce(block, is_own=True) for number, block in blocks.items()}
            blocks = {number: total for number, total in totals.items() if total is not None}
        reducing = start_reduce_scatters(list(map(self.params.__getitem__, blocks)), list(blocks.values()))
        return dict(zip(blocks, reducing, strict=True))


@dataclass(frozen=True)
class _ProductCall:
    linear_op: LinearOp
    deferrals: Sequence[DeferredReduce | None]
    deferred_weights: Sequence[DeferredWeight | None]
    returns_input: bool
    next_backward: weakref.ref[Node] | None
    #: The node that has saved the operands; None if the product's own is to.
    saved: Any


class _SavedOperands(torch.autograd.Function):
    """Saves a product's operands before the product is computed, rather than after it.

    A recomputation ends as soon as it has what the layer's forward saved. So it computes a layer's last product not
    again, and doesn't reduce it, as with torch's own linear layers.
    """

    @staticmethod
    def forward(ctx: Any, keeps_input: bool, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if keeps_input else None, *weights)
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, call: _ProductCall, edge: torch.Tensor | None, *operands: Any
    ) -> tuple[Any, ...]:
        # It only makes outputs require a gradient, so that backward runs even if all weights are detached; and it keeps
        # the node of the saved operands alive.
        del edge
        linear_op, count = call.linear_op, len(call.deferrals)
        weights, biases = operands[:count], operands[count:]
        if call.saved is None:
            # Of frozen weights, backward computes dx alone, for which the input isn't needed.
            keeps_input = any(ctx.needs_input_grad[3 : 3 + count]) or any(call.deferred_weights)
            ctx.save_for_backward(x if keeps_input else None, *weights)
        ctx.call, ctx.started, ctx.copies = call, None, None
        ctx.parts = linear_op.parts(x) if linear_op.mesh.spans_nodes else 1
        ctx.set_materialize_grads(False)
        # The input first, because weights have usually been prefetched. All ranks start collectives in this order.
        start: Callable[[torch.Tensor], AsyncResult[Any]] = linear_op.input_gather.start
        if linear_op.gathers_fp8:
            start = linear_op.input_gather.start_in_fp8
        gathering = list(map(start, x.tensor_split(ctx.parts)))
        if linear_op.is_sharded:
            # The backward of a recomputed forward needs other scales: it rounds the same block anew.
            start_unshards(linear_op.params, weights, BlockForm.WIDE if is_recomputing() else BlockForm.ROWS)
        inputs, started = [], []
        ctx.gathered_bytes = 0
        for gathered in gathering:
            pieces = gathered.wait()
            ctx.gathered_bytes += pieces.shape.numel() * x.dtype.itemsize
            if call.returns_input:
                inputs.append(pieces[0])
            part = []
            for output_reduce, numbers in linear_op.groups:
                # Blocks are waited for one by one: the first product starts as soon as the first weight is unsharded.
                part.append(output_reduce.start(pieces, linear_op.columns(weights, numbers)))
            started.append(part)
        if linear_op.is_sharded:
            if linear_op.has_fp8 and any(ctx.needs_input_grad) and not is_recomputing():
                # Hooks that take what autograd saves are, but for offloading, those of activation checkpointing.
                is_recomputed = _hooks_of_saved_tensors(True) is not None
                find_largest(linear_op.params, weights, is_recomputed=is_recomputed, needed=ctx.needs_input_grad[0])
            # Reshards, unless "weight_gather": "step" keeps the blocks for backward and for other forwards.
            keep = any(ctx.needs_input_grad)
            ctx.copies = [
                param.reshard_after_forward(w, keep=keep) for param, w in zip(linear_op.params, weights, strict=True)
            ]
        outs = linear_op.in_order(started[0]) if ctx.parts == 1 else _cat_rows(map(linear_op.in_order, started))
        ctx.shapes, ctx.dtype = [], x.dtype
        for out, bias in zip(outs, biases, strict=True):
            if bias is not None:
                out.add_(bias)
            ctx.shapes.append(out.shape)
        gathered_input = (inputs[0] if ctx.parts == 1 else torch.cat(inputs)) if call.returns_input else None
        return (gathered_input, *outs)

    @staticmethod
    def backward(ctx: Any, dgathered: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        linear_op: LinearOp = ctx.call.linear_op
        # 1. Start every gather: of the input (unless the previous backward has), the weights, and dy.
        early, ctx.started = _start_backward(ctx), None
        weights = early.weights
        needs_x, _, _, *needs = ctx.needs_input_grad
        # The numbers of the products whose weights need a gradient.
        dw_numbers = list(compress(range(len(weights)), needs))
        dy, dbiases, dy_parts = [], [], []
        for gradient, shape, needs_bias in zip(gradients, ctx.shapes, needs[len(weights) :], strict=True):
            # An output that nothing used has no gradient.
            dy.append(weights[0].new_zeros(shape, dtype=ctx.dtype) if gradient is None else gradient)
            dbiases.append(dy[-1].flatten(0, -2).sum(0) if needs_bias else None)
            dy_parts.append(dy[-1].tensor_split(ctx.parts))
        if needs_x and linear_op.is_sharded:
            start_unshards(linear_op.params, weights, BlockForm.COLUMNS)
        # Weights' gradients need dy as it is; where they are computed later, or not at all, dx alone needs it in fp8.
        in_fp8 = linear_op.is_fp8 and needs_x and not dw_numbers
        if any(ctx.call.deferred_weights):
            _DeferredWeights.add(ctx, early, dy)
        transposing = []
        for part in zip(*dy_parts, strict=True):
            started = []
            for output_reduce, numbers in linear_op.groups:
                started.append(output_reduce.start_transpose(list(map(part.__getitem__, numbers)), in_fp8=in_fp8))
            transposing.append(started)
        reducing: list[AsyncResult[Sequence[torch.Tensor]]] = []
        blocks: dict[int, torch.Tensor] = {}
        # 2. Multiply, part by part.
        for index, started in enumerate(transposing):
            full_dy = linear_op.in_order(started)
            # If dx is reduced, compute it before dW, so that its reduction overlaps with dW's product. Otherwise after
            # dW, which needs no weights and so overlaps with their all-gathers.
            if needs_x and linear_op.input_gather.reduces:
                reducing.append(linear_op.input_gradient(weights, full_dy))
            if index == ctx.parts - 1:
                # This backward waits for no collective started after this, so the next one's gather can't delay it.
                _start_next_backward(ctx.call.next_backward)
            for number in dw_numbers:
                block = linear_op.block_gradient(number, full_dy[number], early.gathering[index].wait())
                if ctx.parts > 1:
                    # Sum the parts in float32.
                    block = block.to(statistics_dtype(block.dtype))
                blocks[number] = blocks[number].add_(block) if number in blocks else block
            if needs_x and not linear_op.input_gather.reduces:
                reducing.append(linear_op.input_gradient(weights, full_dy))
        if ctx.parts > 1:
            blocks = {number: block.to(weights[number].dtype) for number, block in blocks.items()}
        # 3. Start dW's reduce-scatter, then wait for dx only: dW's is waited for by `deferred`, a layer later.
        scattering: dict[int, AsyncResult[torch.Tensor]] = {}
        if linear_op.is_sharded:
            scattering = linear_op.reduce(blocks)
        dx = None
        if needs_x:
            (dx,) = reducing[0].wait() if ctx.parts == 1 else _cat_rows(map(AsyncResult.wait, reducing))
        dweights: list[torch.Tensor | None] = [None] * len(weights)
        if not linear_op.is_sharded:
            dweights = list(map(blocks.get, range(len(weights))))
        else:
            # Frees the blocks. An unused all-gather is waited for first: its buffer must outlive it.
            for param in linear_op.params:
                param.discard()
            # With "weight_gather": "step", frees the blocks unless another forward's graph or the step refers to them.
            ctx.copies = None
            for number, reduced in scattering.items():
                deferred = ctx.call.deferrals[number]
                if deferred is not None:
                    deferred.defer(reduced)
                dweights[number] = reduced.wait() if deferred is None else reduced.incomplete()
        if dgathered is not None and dx is not None:
            # The gathered input was used elsewhere too: reduce-scatter its gradient, and add it.
            assert isinstance(linear_op.input_gather, GatherSequence)
            dx = dx + scatter_dim(dgathered, SEQUENCE_DIM, linear_op.input_gather.along)
        return dx, None, None, *dweights, *dbiases


@dataclass(frozen=True)
class _DeferredWeights:
    """The deferred weight gradients (W) of one backward, computed from the rank's own parts of x and dy.

    A :class:`~cuboid.tensor3d.sharding.weight_gradients.DeferredProduct`. The batch's rows are cut into ``parts``.
    """

    linear_op: LinearOp
    parts: int
    #: For each product; None if its gradient isn't deferred.
    weights: Sequence[DeferredWeight | None]
    x: torch.Tensor
    dy: Sequence[torch.Tensor]

    @classmethod
    def add(cls, ctx: Any, started: _StartedBackward, dy: Sequence[torch.Tensor]) -> None:
        """Add what the weight gradients of a backward need to their store."""
        assert started.x is not None
        call: _ProductCall = ctx.call
        store = next(deferred.store for deferred in call.deferred_weights if deferred is not None)
        # `data`, because any view of the input would keep its whole graph alive, and all tensors saved in it.
        x, dy = started.x.data, [gradient.data for gradient in dy]
        store.add(cls(call.linear_op, ctx.parts, call.deferred_weights, x, dy))

    @property
    def key(self) -> Hashable:
        """Equal for units with the same weights, whose gradients can be summed before they are reduced."""
        return tuple(None if deferred is None else id(deferred.weight) for deferred in self.weights)

    def gradients(self, others: Sequence[_DeferredWeights]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """The gradients of this unit and others with the same key, summed as blocks and reduce-scattered once."""
        linear_op = self.linear_op
        dw_numbers = [number for number, deferred in enumerate(self.weights) if deferred is not None]
        sums: dict[int, torch.Tensor] = {}
        is_sum = bool(others) or self.parts > 1
        for unit in (self, *others):
            dy_parts = [gradient.tensor_split(unit.parts) for gradient in unit.dy]
            for x, *dy in zip(unit.x.tensor_split(unit.parts), *dy_parts, strict=True):
                gathered = linear_op.input_gather.start(x)
                started = [
                    reduce.start_transpose([dy[number] for number in numbers]) for reduce, numbers in linear_op.groups
                ]
                full_dy, pieces = linear_op.in_order(started), gathered.wait()
                for number in dw_numbers:
                    block = linear_op.block_gradient(number, full_dy[number], pieces)
                    if is_sum:
                        block = block.to(statistics_dtype(block.dtype))
                    sums[number] = sums[number].add_(block) if number in sums else block
        blocks = {number: block.to(self.dy[number].dtype) for number, block in sums.items()}
        if linear_op.is_sharded:
            blocks = {number: reduced.wait() for number, reduced in linear_op.reduce(blocks).items()}
        weights = {number: deferred.weight for number, deferred in enumerate(self.weights) if deferred is not None}
        return [(weights[number], block.to(weights[number].dtype)) for number, block in blocks.items()]


@dataclass(frozen=True)
class _StartedBackward:
    """The part of a backward that doesn't depend on dy, and so may start during the previous backward."""

    #: The saved shards.
    weights: Sequence[torch.Tensor]
    #: The input's parts, in flight; empty if no weight needs a gradient.
    gathering: Sequence[AsyncResult[torch.Tensor]]
    #: The rank's own part of the input if weight gradients are deferred, else None.
    x: torch.Tensor | None


def _start_backward(ctx: Any) -> _StartedBackward:
    """Start a backward's gathers, unless the previous backward has."""
    if ctx.started is None:
        saved = ctx if ctx.call.saved is None else ctx.call.saved
        # Activation checkpointing allows only one unpacking.
        x, *weights = saved.saved_tensors
        # Unless the graph is retained, this frees the rank's own part of the input as soon as it is copied into the
        # all-gather's buffer.
        saved.maybe_clear_saved_tensors()
        needs_dw = any(ctx.needs_input_grad[3 : 3 + len(weights)])
        start = partial(ctx.call.linear_op.input_gather.start, in_place=True)
        gathering = list(map(start, x.tensor_split(ctx.parts))) if needs_dw else []
        ctx.started = _StartedBackward(weights, gathering, x if any(ctx.call.deferred_weights) else None)
    return ctx.started


def _start_next_backward(next_backward: weakref.ref[Node] | None) -> None:
    """Start the gathers of the next product's backward, if the running backward pass includes it and they are short."""
    node: Any = None if next_backward is None else next_backward()
    if node is not None and node.gathered_bytes <= EARLY_BYTES and torch._C._will_engine_execute_node(node):
        _start_backward(node)


def _cat_rows(by_part: Iterable[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Concatenate the rows of the parts, for each of several tensors."""
    return list(map(torch.cat, zip(*by_part, strict=True)))
