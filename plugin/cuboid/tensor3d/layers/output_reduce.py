"""Matrix products whose partial sums are reduced, each rank getting its own piece; for gradients, the transpose.

A collective reads and writes the ranks' tensors one after another in memory. Where that isn't the order of the tensor's
dims, one large product would need a copy before or after it. The products here read one collective's buffer directly
and write into the next one's: as one batched product where each rank's piece is a separate result, and piece by piece
where the pieces are summed, or where their strides are not those of a batched product. Several products of one input
share one output reduce, so that q, k and v need one collective instead of three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    own_slice,
    positions_are_whole,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter_parts,
)
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.fp8.quantized import Quantized, start_gather

#: A tensor in pieces along its last dim, the features; concatenated they are the whole tensor. Pieces of one size may
#: be stacked, as a collective writes them. For products in fp8 they may be :class:`Quantized` already.
Pieces = Any
#: Of one weight ``[O, I]``: the columns that multiply each of the input's pieces.
Columns = Sequence[torch.Tensor]


class Fp8Columns(list[Any]):
    """Columns, or rows, of weights some of which multiply in fp8; these may be :class:`Quantized` already.

    Attributes:
        are_fp8: for each, whether it does.
        fast: see :func:`~cuboid.tensor3d.fp8.rowwise.multiply`.
    """

    def __init__(self, weights: Iterable[Any], are_fp8: Sequence[bool], *, fast: bool) -> None:
        super().__init__(weights)
        self.are_fp8, self.fast = are_fp8, fast

    def map(self, change: Callable[[Any], Any]) -> Fp8Columns:
        """The same of a view of each."""
        return Fp8Columns(map(change, self), self.are_fp8, fast=self.fast)


#: On a CPU, oneDNN multiplies these dtypes; there, a batched product takes 1.5 times as long as single products.
_ONE_BY_ONE = (torch.bfloat16, torch.float16)


class OutputReduce(Protocol):
    """Reduces the partial sums ``[B/b, S, rows]`` of some products of one input; and the transpose of that.

    Attributes:
        along: the ranks whose partial sums are added; None for none.
    """

    @property
    def along(self) -> AxisGroup | None:
        """See above."""
        ...

    def own_features(self, total: torch.Tensor, product: int) -> torch.Tensor:
        """Of a product's complete ``[B/b, S, rows]``, those that the rank gets where positions are whole."""
        ...

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """Multiply x Wᵀ for each weight, and start to reduce these partial sums to the rank's own piece of their sum.

        ``weights`` may be an iterator that waits for each weight's all-gather.
        """
        ...

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:
        """From the gradients of the rank's own pieces to those of the partial sums, as n stacked pieces along the rows:
        ``[n, B/b, S, rows/n]``. With ``in_fp8`` they may be :class:`Quantized`.
        """
        ...

    def rows(self, weight: torch.Tensor, product: int) -> torch.Tensor:
        """The rows of a product's weight ``[out, in]`` for each of :meth:`start_transpose`'s n pieces:
        ``[n, out/n, in]``.
        """
        ...

    def places(self, dweight: torch.Tensor, product: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """Where the rows of ``dweight`` ``[out, in]`` are written: pairs of a slice of every piece's features, and the
        rows of these features, ``[n, ..., in]``, a view.
        """
        ...


def multiply(x: Pieces, weights: Columns, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ.

    Args:
        x: pieces ``[..., I_i]``.
        weights: for each piece the columns ``[O, I_i]`` of W.
        out: contiguous ``[..., O]`` that receives the result; allocated if None.
    """
    if out is None and len(x) == 1 and positions_are_whole() and type(weights) is not Fp8Columns:
        # Of few tokens, the calls count.
        return torch.nn.functional.linear(x[0], weights[0])
    if out is None:
        out = x[0].new_empty((*x[0].shape[:-1], weights[0].shape[0]))
    rows = out.view(-1, out.shape[-1])
    if type(weights) is Fp8Columns:
        tokens = [piece.flatten(0, -2).unsqueeze(0) for piece in x]
        _multiply_in_fp8(tokens, weights.map(_as_batch), rows.unsqueeze(0))
        return out
    torch.mm(x[0].reshape(-1, x[0].shape[-1]), weights[0].t(), out=rows)
    for piece, weight in zip(x[1:], weights[1:], strict=True):
        rows.addmm_(piece.reshape(-1, piece.shape[-1]), weight.t())
    return out


def multiply_batch(x: Pieces, weights: Columns, out: torch.Tensor) -> None:
    """Do n products of ``x``, pieces ``[n, M, I_i]``, and weights ``[n, O, I_i]`` as :func:`multiply` does one; ``out``
    is ``[n, M, O]``.
    """
    if type(weights) is Fp8Columns:
        _multiply_in_fp8(x, weights, out)
        return
    is_batch = len(out) > 1 and (out.is_cuda or out.dtype not in _ONE_BY_ONE)
    for number, (piece, weight) in enumerate(zip(x, weights, strict=True)):
        if is_batch:
            out.baddbmm_(piece, weight.mT) if number else torch.bmm(piece, weight.mT, out=out)
        else:
            for factor, weight_t, target in zip(piece.unbind(), weight.mT.unbind(), out.unbind(), strict=True):
                target.addmm_(factor, weight_t) if number else torch.mm(factor, weight_t, out=target)


def _multiply_in_fp8(x: Pieces, weights: Fp8Columns, out: torch.Tensor) -> None:
    """As :func:`multiply_batch`; each piece of a row has a scale of its own."""
    for number, (piece, weight, is_fp8) in enumerate(zip(x, weights, weights.are_fp8, strict=True)):
        # Factors that are the same for the whole batch are rounded once.
        factors, columns = _distinct(piece), _distinct(weight)
        if is_fp8:
            factors, columns = list(map(_in_fp8, factors)), list(map(_in_fp8, columns))
        for place, target in enumerate(out):
            factor, weight_rows = factors[place % len(factors)], columns[place % len(columns)]
            if is_fp8:
                term = rowwise.multiply_quantized(*factor, *weight_rows, fast=weights.fast)
                target.add_(term) if number else target.copy_(term)
            else:
                target.addmm_(factor, weight_rows.t()) if number else torch.mm(factor, weight_rows.t(), out=target)


def _in_fp8(x: torch.Tensor | Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.values, x.scales) if isinstance(x, Quantized) else rowwise.quantize(x)


def _as_batch(weight: Any) -> Any:
    return weight.unsqueeze(0)


def _distinct(batch: Any) -> Sequence[Any]:
    """The members of a batch, or the only one if it is expanded."""
    return batch[:1].unbind() if len(batch) > 1 and batch.stride(0) == 0 else batch.unbind()


@dataclass(frozen=True)
class ScatterFeatures:
    """Reduce-scatter over one axis onto the features."""

    along: AxisGroup
    #: For each product, the number of parts of its features that are cut separately (3 for GPT-2's fused qkv); 0 if
    #: each rank gets the sums of all of its features.
    parts: tuple[int, ...] = (1,)

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        ranks = self.along.size
        if ranks == 1:
            return AsyncResult([multiply(x, columns) for columns in weights])
        # For each product: the weight's rows by target rank, and the shape of one rank's result.
        rows, shapes = [], []
        for number, columns in enumerate(weights):
            by_piece: list[torch.Tensor] = []
            if type(columns) is Fp8Columns:
                by_piece = columns.map(partial(self.rows, product=number))
            else:
                for weight in columns:
                    by_piece.append(self.rows(weight, number))
            rows.append(by_piece)
            shapes.append((*x[0].shape[:-1], columns[0].shape[0] // (ranks if self.parts[number] else 1)))
        sizes = list(map(math.prod, shapes))
        # The reduce-scatter's send buffer: for each target rank, its pieces of all products, one after another.
        slots = x[0].new_empty((ranks, sum(sizes)))
        # A batched product over the target ranks: all of them share the tokens. [B/b, S, I] -> [ranks, tokens, I].
        tokens = []
        for piece in x:
            tokens.append(piece.flatten(0, -2).expand(ranks, -1, -1))
        for by_piece, shape, slot, parts in zip(rows, shapes, slots.split(sizes, 1), self.parts, strict=True):
            out = slot.view(ranks, -1, shape[-1])
            if parts:
                multiply_batch(tokens, by_piece, out)
            else:
                multiply_batch([piece[:1] for piece in tokens], by_piece, out[:1])
                out[1:] = out[0]
        return start_reduce_scatter_parts(slots, shapes, self.along)

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:
        """See :class:`OutputReduce`."""
        if self.along.size == 1:
            return AsyncResult([gradient.unsqueeze(0) for gradient in gradients])
        if in_fp8:
            # Each rank's features are a piece, whose rows have scales of their own.
            return start_gather(gradients, self.along, list)
        flat = list(map(torch.ravel, gradients))

        # The reverse of `start`: each rank's gradients of all products, flattened into one message.
        def cut(slots: torch.Tensor) -> Sequence[torch.Tensor]:
            by_rank, stacked = slots.split(list(map(len, flat)), 1), []
            for gradient, part, parts in zip(gradients, by_rank, self.parts, strict=True):
                of_ranks = part.view(-1, *gradient.shape)
                stacked.append(of_ranks if parts else of_ranks.sum(0, keepdim=True))
            return stacked

        return start_all_gather(flat[0] if len(flat) == 1 else torch.cat(flat), self.along, cut)

    def own_features(self, total: torch.Tensor, product: int) -> torch.Tensor:
        """See :class:`OutputReduce`."""
        parts = self.parts[product]
        if parts <= 1:
            return own_slice(total, total.dim() - 1, self.along) if parts else total
        by_rank = total.unflatten(-1, (parts, self.along.size, -1))
        return by_rank[..., self.along.index, :].flatten(-2)

    def rows(self, weight: torch.Tensor, product: int) -> torch.Tensor:
        """See :class:`OutputReduce`. With several parts the rows are copied; weights are small beside activations."""
        if not self.parts[product]:
            return weight.unsqueeze(0)
        # [parts, ranks, out / (parts · ranks), in]: each rank has a piece of every part.
        by_part = weight.unflatten(0, (self.parts[product], self.along.size, -1))
        return by_part[0] if len(by_part) == 1 else by_part.transpose(0, 1).flatten(1, 2)

    def places(self, dweight: torch.Tensor, product: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """See :class:`OutputReduce`."""
        if not self.parts[product]:
            return ((slice(None), dweight.unsqueeze(0)),)
        by_part = dweight.unflatten(0, (self.parts[product], self.along.size, -1))
        if len(by_part) == 1:
            return ((slice(None), by_part[0]),)
        height = by_part.shape[2]
        return [(slice(part * height, (part + 1) * height), rows) for part, rows in enumerate(by_part.unbind())]


class _InOnePiece:
    """Base of reductions whose :meth:`OutputReduce.start_transpose` gives all rows in one piece."""

    def own_features(self, total: torch.Tensor, product: int) -> torch.Tensor:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return total

    def rows(self, weight: torch.Tensor, product: int) -> torch.Tensor:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return weight.unsqueeze(0)

    def places(self, dweight: torch.Tensor, product: int) -> Sequence[tuple[slice, torch.Tensor]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return ((slice(None), dweight.unsqueeze(0)),)


@dataclass(frozen=True)
class ScatterSequence(_InOnePiece):
    """Reduce-scatter of one product over one axis onto the sequence."""

    along: AxisGroup

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        (columns,) = weights
        ranks, (batch, length) = self.along.size, x[0].shape[:2]
        if ranks == 1:
            return AsyncResult((multiply(x, columns),))
        if positions_are_whole():
            return start_all_reduce(multiply(x, columns), self.along, _alone)
        own_length = length // ranks
        slots = x[0].new_empty((ranks, batch, own_length, columns[0].shape[0]))
        if batch == 1:
            # With one row, positions lie in the order of the ranks.
            multiply(x, columns, slots.view(1, length, -1))
        else:
            # A rank's positions are contiguous within a row of the batch, but not across rows: a single product would
            # need a copy, so each row has a product of its own.
            factors: list[torch.Tensor] = []
            if type(columns) is Fp8Columns:
                factors = columns.map(lambda weight: weight.expand(batch, -1, -1))
            else:
                for weight in columns:
                    factors.append(weight.expand(batch, -1, -1))
            for rank, slot in enumerate(slots.unbind()):
                positions = []
                for piece in x:
                    positions.append(piece.narrow(1, rank * own_length, own_length))
                multiply_batch(positions, factors, slot)
        return start_reduce_scatter_parts(slots, (slots.shape[1:],), self.along)

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:
        """See :class:`OutputReduce`."""
        (gradient,) = gradients
        if self.along.size == 1:
            return AsyncResult((gradient.unsqueeze(0),))
        if in_fp8:
            return start_gather(
                gradients, self.along, lambda stacked: [stacked[0].movedim(0, SEQUENCE_DIM).flatten(1, 2).unsqueeze(0)]
            )
        return start_all_gather(
            gradient,
            self.along,
            # [ranks, B/b, S/ranks, rows] -> [1, B/b, S, rows], a view if B/b is 1
            lambda stacked: (stacked.movedim(0, SEQUENCE_DIM).flatten(1, 2).unsqueeze(0),),
        )


def _alone(total: torch.Tensor) -> Sequence[torch.Tensor]:
    return (total,)


@dataclass(frozen=True)
class SelectHeads(_InOnePiece):
    """All-reduce over `hidden`, and keep the heads that this rank's queries attend to (GQA with few KV heads).

    With fewer KV heads than ranks a reduce-scatter doesn't work, because neighbouring ranks need the same head. All
    ranks get the sums of ``heads`` heads and keep those in ``keep``, which may contain a head several times.
    """

    along: AxisGroup
    head_dim: int
    heads: int
    keep: tuple[int, ...]
    #: ``keep`` as an index tensor, by device: a copy to the device in every call would make the host wait.
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        weights = list(weights)
        shape = (*x[0].shape[:-1], self.heads * self.head_dim)
        sums = x[0].new_empty((len(weights), *shape))
        for columns, out in zip(weights, sums, strict=True):
            multiply(x, columns, out)
        return start_all_reduce(sums, self.along, self._select)

    def _select(self, sums: torch.Tensor) -> Sequence[torch.Tensor]:
        by_head = sums.unflatten(-1, (self.heads, self.head_dim))
        if sums.device not in self._indices:
            self._indices[sums.device] = torch.tensor(self.keep, device=sums.device)
        keep = self._indices[sums.device]
        return [product.index_select(-2, keep).flatten(-2) for product in by_head]

    def own_features(self, total: torch.Tensor, product: int) -> torch.Tensor:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return self._select(total.unsqueeze(0))[0]

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        # A head that is in `keep` several times gets the sum of its gradients.
        dheads = torch.stack(list(gradients)).unflatten(-1, (len(self.keep), self.head_dim))
        dsums = dheads.new_zeros((*dheads.shape[:-2], self.heads, self.head_dim))
        dsums.index_add_(-2, self._indices[dheads.device], dheads)
        return start_all_reduce(dsums.flatten(-2), self.along, lambda summed: summed.unsqueeze(1).unbind())


@dataclass(frozen=True)
class SumFeatures(_InOnePiece):
    """All-reduce over one axis: each of its ranks gets all features."""

    along: AxisGroup

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        weights = list(weights)
        shapes = [(*x[0].shape[:-1], columns[0].shape[0]) for columns in weights]
        buffer = x[0].new_empty(sum(map(math.prod, shapes)))
        for columns, out in zip(weights, _views(buffer, shapes), strict=True):
            multiply(x, columns, out)
        return start_all_reduce(buffer, self.along, lambda summed: _views(summed, shapes))

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        shapes = [(1, *gradient.shape) for gradient in gradients]
        buffer = gradients[0].new_empty(sum(map(math.prod, shapes)))
        for gradient, view in zip(gradients, _views(buffer, shapes), strict=True):
            view.copy_(gradient)
        return start_all_reduce(buffer, self.along, lambda summed: _views(summed, shapes))


def _views(buffer: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Consecutive views of a flat tensor, with the given shapes."""
    return [part.view(shape) for part, shape in zip(buffer.split(list(map(math.prod, shapes))), shapes, strict=True)]


@dataclass(frozen=True)
class NoReduce(_InOnePiece):
    """No reduction: products are complete on each rank."""

    along = None

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        return AsyncResult([multiply(x, columns) for columns in weights])

    def start_transpose(self, gradients: Sequence[torch.Tensor], *, in_fp8: bool = False) -> AsyncResult[Sequence[Any]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return AsyncResult([gradient.unsqueeze(0) for gradient in gradients])


def share_reduces(reduces: Sequence[OutputReduce]) -> list[tuple[OutputReduce, list[int]]]:
    """Group products with the same reduction: for each group, the shared reduction and its products' numbers."""
    shared: dict[OutputReduce, list[int]] = {}
    for number, reduce in enumerate(reduces):
        key = replace(reduce, parts=()) if isinstance(reduce, ScatterFeatures) else reduce
        shared.setdefault(key, []).append(number)
    with_parts: list[tuple[OutputReduce, list[int]]] = []
    for key, numbers in shared.items():
        members = [reduces[number] for number in numbers]
        parts = tuple(part for member in members if isinstance(member, ScatterFeatures) for part in member.parts)
        with_parts.append((replace(key, parts=parts) if isinstance(key, ScatterFeatures) else key, numbers))
    return with_parts
