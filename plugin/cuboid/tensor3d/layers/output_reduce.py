"""Matrix products, and how their partial sums become a rank's own pieces of the sums; for gradients, the transpose.

A collective leaves and takes the ranks' tensors one behind the other. Where that isn't the order of the dim in
question, a product of the whole would need a copy before it and another one after it. These multiply piece by piece
instead, straight out of one collective's buffer and into the other's. Several products of one input share one output
reduce, so that query, key and value need one collective and not three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter_parts,
)
from cuboid.distributed.mesh import AxisGroup

#: A tensor that is cut along its last dim, its features: what one would concatenate to have the whole.
Pieces = Sequence[torch.Tensor]
#: Of one weight ``[O, I]``: the columns that belong to each of the input's pieces.
Columns = Sequence[torch.Tensor]
#: oneDNN multiplies these on a CPU, where a batched product of several rows takes half as long again as one by one.
_ONE_BY_ONE = (torch.bfloat16, torch.float16)


class OutputReduce(Protocol):
    """What happens to partial sums ``[B/b, S, rows]`` of some products of one input, and its transpose."""

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """x Wᵀ of each weight, as partial sums, to the rank's own piece of their sum. Weights may come one by one."""
        ...

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """Gradients of the own pieces to those of the partial sums, whole or in pieces along the rows."""
        ...

    def rows(self, weight: torch.Tensor, product: int) -> Sequence[torch.Tensor]:
        """The rows of a product's ``[out, in]`` that belong to each of :meth:`start_transpose`'s pieces."""
        ...

    def places(self, whole: torch.Tensor, product: int) -> Sequence[Sequence[tuple[slice, torch.Tensor]]]:
        """Where the gradients of these rows go, for each piece: some of its features, and their rows of ``whole``."""
        ...


def multiply(x: Pieces, weights: Columns, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ.

    Args:
        x: pieces ``[..., I_i]``.
        weights: for each piece the columns ``[O, I_i]`` of W.
        out: contiguous ``[..., O]`` that takes the result; made if None.
    """
    if out is None:
        out = x[0].new_empty((*x[0].shape[:-1], weights[0].shape[0]))
    rows = out.view(-1, out.shape[-1])
    torch.mm(x[0].reshape(-1, x[0].shape[-1]), weights[0].t(), out=rows)
    for piece, weight in zip(x[1:], weights[1:], strict=True):
        rows.addmm_(piece.reshape(-1, piece.shape[-1]), weight.t())
    return out


def multiply_positions(x: Pieces, weights: Columns, out: torch.Tensor, first: int) -> None:
    """As :func:`multiply`, of some positions of each row.

    Args:
        x: pieces ``[B, S, I_i]``.
        weights: as there.
        out: contiguous ``[B, n, O]``, of the positions from ``first`` on.
        first: position in 0 … S - n.
    """
    count, length, _ = out.shape
    # These positions are contiguous within a row of the batch, but not from row to row: flattening them for a single
    # product would be a copy, so each row has a product of its own.
    for number, (piece, weight) in enumerate(zip(x, weights, strict=True)):
        own, by_in = piece.narrow(1, first, length), weight.t()
        if count > 1 and (out.is_cuda or out.dtype not in _ONE_BY_ONE):
            factors = own, by_in.expand(count, -1, -1)
            out.baddbmm_(*factors) if number else torch.bmm(*factors, out=out)
        else:
            for each, target in zip(own.unbind(), out.unbind(), strict=True):
                target.addmm_(each, by_in) if number else torch.mm(each, by_in, out=target)


@dataclass(frozen=True)
class ScatterFeatures:
    """Reduce-scatter over one axis onto the features.

    Args:
        along: the ranks of that axis.
        parts: for each product, of how many parts its features consist, each of which is cut separately.
    """

    along: AxisGroup
    parts: tuple[int, ...] = (1,)

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        ranks = self.along.size
        if ranks == 1:
            return AsyncResult([multiply(x, columns) for columns in weights])
        # For each product, the rows of its pieces' columns that belong to each rank, and the shape of its result there.
        rows, shapes = [], []
        for number, columns in enumerate(weights):
            rows.append(list(map(self.rows, columns, repeat(number))))
            shapes.append((*x[0].shape[:-1], columns[0].shape[0] // ranks))
        sizes = list(map(math.prod, shapes))
        slots = x[0].new_empty((ranks, sum(sizes)))
        for by_piece, shape, slot in zip(rows, shapes, slots.split(sizes, 1), strict=True):
            for of_rank, out in zip(zip(*by_piece, strict=True), slot.unbind(), strict=True):
                multiply(x, of_rank, out.view(shape))
        return start_reduce_scatter_parts(slots, shapes, self.along)

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        if self.along.size == 1:
            return AsyncResult([(gradient,) for gradient in gradients])
        flat = list(map(torch.ravel, gradients))

        def cut(slots: torch.Tensor) -> Sequence[Pieces]:
            pieces = []
            for own, part in zip(gradients, slots.split(list(map(len, flat)), 1), strict=True):
                pieces.append(part.view(-1, *own.shape).unbind())
            return pieces

        return start_all_gather(flat[0] if len(flat) == 1 else torch.cat(flat), self.along, cut)

    def rows(self, weight: torch.Tensor, product: int) -> Sequence[torch.Tensor]:
        """See :class:`OutputReduce`. With several parts these are copies, which are small beside activations."""
        parts = self.parts[product]
        if parts == 1:
            return weight.chunk(self.along.size)
        return weight.unflatten(0, (parts, self.along.size, -1)).transpose(0, 1).flatten(1, 2).unbind()

    def places(self, whole: torch.Tensor, product: int) -> Sequence[Sequence[tuple[slice, torch.Tensor]]]:
        """See :class:`OutputReduce`."""
        parts = self.parts[product]
        by_part = whole.unflatten(0, (parts, self.along.size, -1))
        height = by_part.shape[2]
        if parts == 1:
            return [((slice(height), own),) for own in by_part[0].unbind()]
        features = [slice(part * height, (part + 1) * height) for part in range(parts)]
        return [list(zip(features, own, strict=True)) for own in by_part.unbind(1)]


class _InOnePiece:
    """For reductions whose :meth:`OutputReduce.start_transpose` gives all rows together."""

    def rows(self, weight: torch.Tensor, product: int) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return (weight,)

    def places(self, whole: torch.Tensor, product: int) -> Sequence[Sequence[tuple[slice, torch.Tensor]]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return (((slice(None), whole),),)


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
        own = length // ranks
        slots = x[0].new_empty((ranks, batch, own, columns[0].shape[0]))
        for rank, slot in enumerate(slots.unbind()):
            multiply_positions(x, columns, slot, rank * own)
        return start_reduce_scatter_parts(slots, (slots.shape[1:],), self.along)

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        (gradient,) = gradients
        if self.along.size == 1:
            return AsyncResult((gradients,))
        return start_all_gather(
            gradient, self.along, lambda stacked: ((stacked.movedim(0, SEQUENCE_DIM).flatten(1, 2),),)
        )


@dataclass(frozen=True)
class SelectHeads(_InOnePiece):
    """Sum over `hidden` and keep the heads that this rank's queries attend to (GQA with few KV heads).

    Where the KV heads don't divide by sequence × hidden a reduce-scatter can't hand them out: neighbours need the
    same head. All ranks get the sum of ``heads`` heads and keep those in ``keep`` (which may repeat).
    """

    along: AxisGroup
    head_dim: int
    heads: int
    keep: tuple[int, ...]
    #: ``keep`` on each device. Made for every call, the copy to the device would make the host wait.
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        weights = list(weights)
        if x[0].device not in self._indices:
            self._indices[x[0].device] = torch.tensor(self.keep, device=x[0].device)
        shape = (*x[0].shape[:-1], self.heads * self.head_dim)
        wholes = x[0].new_empty((len(weights), *shape))
        for columns, whole in zip(weights, wholes, strict=True):
            multiply(x, columns, whole)
        return start_all_reduce(wholes, self.along, self._select)

    def _select(self, wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        by_head = wholes.unflatten(-1, (self.heads, self.head_dim))
        keep = self._indices[wholes.device]
        return [whole.index_select(-2, keep).flatten(-2) for whole in by_head]

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        kept = torch.stack(list(gradients)).unflatten(-1, (len(self.keep), self.head_dim))
        wholes = kept.new_zeros((*kept.shape[:-2], self.heads, self.head_dim))
        wholes.index_add_(-2, self._indices[kept.device], kept)
        return start_all_reduce(wholes.flatten(-2), self.along, lambda summed: list(zip(summed, strict=True)))


@dataclass(frozen=True)
class NoReduce(_InOnePiece):
    """No reduction: the partial sums are what is wanted."""

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        return AsyncResult([multiply(x, columns) for columns in weights])

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        return AsyncResult([(gradient,) for gradient in gradients])


def share_reduces(reduces: Sequence[OutputReduce]) -> list[tuple[OutputReduce, list[int]]]:
    """Let products with the same kind of reduction share one: each, and the numbers of its products."""
    shared: dict[OutputReduce, list[int]] = {}
    for number, reduce in enumerate(reduces):
        key = replace(reduce, parts=()) if isinstance(reduce, ScatterFeatures) else reduce
        shared.setdefault(key, []).append(number)
    return [(_with_parts(key, [reduces[number] for number in numbers]), numbers) for key, numbers in shared.items()]


def _with_parts(key: OutputReduce, members: Sequence[OutputReduce]) -> OutputReduce:
    if not isinstance(key, ScatterFeatures):
        return key
    return replace(key, parts=tuple(part for m in members if isinstance(m, ScatterFeatures) for part in m.parts))
