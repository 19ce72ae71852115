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

With G the gather before (:mod:`.source`) and R the reduction after the product (:mod:`.exchange`), forward, dgrad and
wgrad are

    y = R(G(x) Wᵀ)      dx = Gᵀ(Rᵀ(dy) W)      dW = Rᵀ(dy)ᵀ G(x), reduce-scattered over `batch`.

The transpose of an all-gather is the reduce-scatter along the same axis, and the other way round. The input and
the weights are saved as shards and gathered again in backward, where all gathers are under way before the first of
them is needed, dx's reduction runs behind dW's product, and dW's behind whatever comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuboid.pending import Pending
from cuboid.tensor3d.bundle import start_gathers, start_reductions
from cuboid.tensor3d.carry import Carry
from cuboid.tensor3d.collectives import SEQUENCE_DIM, scatter_dim
from cuboid.tensor3d.exchange import Columns, Exchange, share_exchanges
from cuboid.tensor3d.parameter import ParameterGather
from cuboid.tensor3d.products import Pieces, weight_gradient
from cuboid.tensor3d.source import Source, WholeSequence


@dataclass(frozen=True)
class Product:
    """The constant part of one layer's product.

    Args:
        weight: of the layer.
        exchange: of its partial sums.
        in_first: whether the weight is stored ``[in, out]``, as Hugging Face's Conv1D does.
        rows: first and last (exclusive) out row of the block that is multiplied; all by default.
    """

    weight: ParameterGather
    exchange: Exchange
    in_first: bool = False
    rows: tuple[int, int] | None = None

    def out_in(self, block: torch.Tensor) -> torch.Tensor:
        """View of a block as ``[out, in]``, restricted to ``rows``."""
        whole = block.t() if self.in_first else block
        return whole if self.rows is None else whole[slice(*self.rows)]


class Multiplication:
    """Products of one input, which share its gather, the exchanges of their results, and the gradient's way back."""

    def __init__(self, source: Source, products: Sequence[Product]) -> None:
        self.source = source
        self.products = tuple(products)
        self.groups = share_exchanges([product.exchange for product in products])

    def run(
        self, x: torch.Tensor, operands: Sequence[Operand], *, wants_input: bool = False
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
        """Multiply.

        Args:
            x: the rank's part of the input.
            operands: for each product.
            wants_input: whether the gathered input is wanted too, differentiably.

        Returns:
            The gathered input, if wanted, and what the products are.
        """
        weights, biases = [o.weight for o in operands], [o.bias for o in operands]
        call = _Call(self, [o.carry for o in operands], wants_input)
        given, *outs = _Multiply.apply(x, call, *weights, *biases)
        return given, outs

    def columns(self, numbers: Sequence[int]) -> Iterator[Columns]:
        """The columns of some products' weights, each as soon as its block is there."""
        for number in numbers:
            product = self.products[number]
            yield self.source.columns(product.out_in(product.weight.block()))


@dataclass(frozen=True)
class Operand:
    """What varies from one call to the next.

    Args:
        weight: the shard.
        carry: who waits for the shard's gradient; None if it must be complete at once.
        bias: added to the result, ``[O']``; perhaps None.
    """

    weight: torch.Tensor
    carry: Carry | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class _Call:
    multiplication: Multiplication
    carries: Sequence[Carry | None]
    wants_input: bool


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: _Call, *operands: torch.Tensor | None) -> tuple[Any, ...]:
        own, count = call.multiplication, len(call.carries)
        weights, biases = operands[:count], operands[count:]
        ctx.save_for_backward(x, *weights)
        ctx.call = call
        ctx.set_materialize_grads(False)
        gathering = own.source.start(x)
        _start_weights(own, weights)
        pieces = gathering.wait()
        started = [exchange.start(pieces, own.columns(numbers)) for exchange, numbers in own.groups]
        if not is_recomputing():
            for product in own.products:
                product.weight.reshard()
        outs = _in_order(own, [each.wait() for each in started])
        for out, bias in zip(outs, biases, strict=True):
            if bias is not None:
                out.add_(bias)
        ctx.shapes = [out.shape for out in outs]
        return (pieces[0] if call.wants_input else None, *outs)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        own: Multiplication = ctx.call.multiplication
        count = len(weights)
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        if needs_x:
            _start_weights(own, weights)
        gathering = own.source.start(x) if any(needs[:count]) else None
        dy = [
            x.new_zeros(shape) if gradient is None else gradient
            for gradient, shape in zip(gradients, ctx.shapes, strict=True)
        ]
        started = [exchange.start_transpose([dy[number] for number in numbers]) for exchange, numbers in own.groups]
        biases = [
            each.flatten(0, -2).sum(0) if wanted else None for each, wanted in zip(dy, needs[count:], strict=True)
        ]
        way = _WayBack(own, _in_order(own, [each.wait() for each in started]))
        dx, dweights = way.run(needs_x, needs[:count], gathering, ctx.call.carries)
        if given is not None and needs_x:
            assert isinstance(own.source, WholeSequence)
            dx = dx + scatter_dim(given, SEQUENCE_DIM, own.source.mesh, ("sequence",))
        for product in own.products:
            product.weight.discard()
        return dx, None, *dweights, *biases


def is_recomputing() -> bool:
    """Whether this forward runs inside of a backward, as activation checkpointing lets it: its weights stay gathered
    for the backward that follows."""
    return torch._C._current_graph_task_id() != -1


def _start_weights(own: Multiplication, weights: Sequence[torch.Tensor | None]) -> None:
    start_gathers([product.weight for product in own.products], [weight for weight in weights if weight is not None])


def _in_order(own: Multiplication, by_group: Sequence[Sequence[Any]]) -> list[Any]:
    """What the groups have, in the order of the products."""
    found = {
        number: each
        for (_, numbers), members in zip(own.groups, by_group, strict=True)
        for number, each in zip(numbers, members, strict=True)
    }
    return [found[number] for number in range(len(own.products))]


@dataclass(frozen=True)
class _WayBack:
    """The products of one backward; ``dy`` is what the exchanges' transposes gave, for each product."""

    own: Multiplication
    dy: Sequence[Pieces]

    def run(
        self,
        needs_x: bool,
        needs_weights: Sequence[bool],
        gathering: Pending[Pieces] | None,
        carries: Sequence[Carry | None],
    ) -> tuple[Any, list[torch.Tensor | None]]:
        """Gradients of the input and of the weights' shards."""
        reduces_dx = self.own.source.reduces
        dx = self._input_gradient() if needs_x and reduces_dx else None
        dweights = {} if gathering is None else self._weight_gradients(gathering.wait(), needs_weights)
        if needs_x and not reduces_dx:
            # Nothing to hide behind dW; but dW's product hides the rest of the weights' gather.
            dx = self._input_gradient()
        left = [_leave_or_wait(dweights.get(number), carry) for number, carry in enumerate(carries)]
        return None if dx is None else dx.wait()[0], left

    def _input_gradient(self) -> Pending[Sequence[torch.Tensor]]:
        """dy W, summed over the products, on its way to the rank's own part."""
        pieces: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for exchange, numbers in self.own.groups:
            for place, number in enumerate(numbers):
                product = self.own.products[number]
                own = exchange.rows(product.out_in(product.weight.block()), place)
                pieces += self.dy[number]
                rows += [each.t() for each in own]
        return self.own.source.transpose.start(pieces, [rows])

    def _weight_gradients(self, x: Pieces, needs: Sequence[bool]) -> dict[int, Pending[torch.Tensor]]:
        """Of the shards, on their way, by the product's number."""
        wanted = [number for number, needed in enumerate(needs) if needed]
        gathers = [self.own.products[number].weight for number in wanted]
        blocks = [self._block_gradient(number, x) for number in wanted]
        return dict(zip(wanted, start_reductions(gathers, blocks), strict=True))

    def _block_gradient(self, number: int, x: Pieces) -> torch.Tensor:
        """dyᵀ x, as ``[out, in]`` or ``[in, out]``, with zeros in the rows that were not multiplied."""
        product = self.own.products[number]
        exchange, place = self._exchange_of(number)
        shape, some = product.weight.layout.block_shape(product.weight.mesh.shape), x[0]
        whole = some.new_empty(shape) if product.rows is None else some.new_zeros(shape)
        by_column = self.own.source.columns(product.out_in(whole))
        for index, piece in enumerate(self.dy[number]):
            for features, columns in zip(x, by_column, strict=True):
                for part, out in exchange.put_rows(columns, place, index):
                    weight_gradient(piece[..., part], features, out)
        return whole

    def _exchange_of(self, number: int) -> tuple[Exchange, int]:
        return next((e, numbers.index(number)) for e, numbers in self.own.groups if number in numbers)


def _leave_or_wait(gradient: Pending[torch.Tensor] | None, carry: Carry | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    if carry is None:
        return gradient.wait()
    carry.leave(gradient)
    return gradient.incomplete()
