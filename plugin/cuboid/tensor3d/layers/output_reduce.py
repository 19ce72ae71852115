"""How partial sums of products become a rank's own pieces of their sums, and gradients the partial sums' again.

Several products of one input share one output reduce, so that query, key and value need one collective and not three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    start_all_gather,
    start_all_reduce,
    start_gather_dim,
    start_scatter,
    start_scatter_parts,
)
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis
from cuboid.tensor3d.layers.matmul import Pieces, multiply, multiply_by_position

#: Of one weight ``[O, I]``: the columns that belong to each of the input's pieces.
Columns = Sequence[torch.Tensor]


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

    def put_rows(self, whole: torch.Tensor, product: int, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """Where a gradient of these rows goes: features of the piece, and the rows of ``whole`` ``[out, in]``."""
        ...


@dataclass(frozen=True)
class ScatterFeatures:
    """Reduce-scatter over one axis onto the features.

    Args:
        mesh: of the ranks.
        axis: over which they are.
        parts: for each product, of how many parts its features consist, each of which is cut separately.
    """

    mesh: Mesh
    axis: Axis
    parts: tuple[int, ...] = (1,)

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        ranks = self.mesh.size(self.axis)
        if ranks == 1:
            return AsyncResult([multiply(x, columns) for columns in weights])
        weights = list(weights)
        shapes = [(*x[0].shape[:-1], columns[0].shape[0] // ranks) for columns in weights]
        sizes = [math.prod(shape) for shape in shapes]
        slots = x[0].new_empty((ranks, sum(sizes)))
        for number, (columns, shape, slot) in enumerate(zip(weights, shapes, slots.split(sizes, 1), strict=True)):
            by_rank = zip(*(self.rows(weight, number) for weight in columns), strict=True)
            for own, out in zip(by_rank, slot, strict=True):
                multiply(x, own, out.view(shape))
        return start_scatter_parts(slots, shapes, self.mesh, (self.axis,))

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        if self.mesh.size(self.axis) == 1:
            return AsyncResult([(gradient,) for gradient in gradients])
        sizes = [gradient.numel() for gradient in gradients]
        shapes = [gradient.shape for gradient in gradients]

        def cut(slots: torch.Tensor) -> Sequence[Pieces]:
            parts = slots.split(sizes, 1)
            return [[own.view(shape) for own in part] for part, shape in zip(parts, shapes, strict=True)]

        return start_all_gather(_end_to_end(gradients), self.mesh, (self.axis,)).then(cut)

    def rows(self, weight: torch.Tensor, product: int) -> Sequence[torch.Tensor]:
        """See :class:`OutputReduce`. With several parts these are copies, which are small beside activations."""
        by_part = weight.unflatten(0, (self.parts[product], self.mesh.size(self.axis), -1))
        return [own.flatten(0, 1) for own in by_part.unbind(1)]

    def put_rows(self, whole: torch.Tensor, product: int, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """See :class:`OutputReduce`."""
        own = whole.unflatten(0, (self.parts[product], self.mesh.size(self.axis), -1))[:, piece]
        height = own.shape[1]
        return [(slice(part * height, (part + 1) * height), own[part]) for part in range(self.parts[product])]


class _InOnePiece:
    """For reductions whose :meth:`OutputReduce.start_transpose` gives all rows together."""

    def rows(self, weight: torch.Tensor, product: int) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return (weight,)

    def put_rows(self, whole: torch.Tensor, product: int, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:  # noqa: ARG002
        """See :class:`OutputReduce`."""
        return ((slice(None), whole),)


@dataclass(frozen=True)
class ScatterSequence(_InOnePiece):
    """Reduce-scatter of one product over one axis onto the sequence."""

    mesh: Mesh
    axis: Axis

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        (columns,) = weights
        ranks, (batch, length) = self.mesh.size(self.axis), x[0].shape[:2]
        if ranks == 1:
            return AsyncResult([multiply(x, columns)])
        own = length // ranks
        slots = x[0].new_empty((ranks, batch, own, columns[0].shape[0]))
        for rank, slot in enumerate(slots):
            multiply_by_position(x, columns, slot, rank * own, (rank + 1) * own)
        return start_scatter(slots, self.mesh, (self.axis,)).then(lambda sum_: [sum_])

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        (gradient,) = gradients
        return start_gather_dim(gradient, SEQUENCE_DIM, self.mesh, (self.axis,)).then(lambda whole: [(whole,)])


@dataclass(frozen=True)
class SelectHeads(_InOnePiece):
    """Sum over `hidden` and keep the heads that this rank's queries attend to (GQA with few KV heads).

    Where the KV heads don't divide by sequence × hidden a reduce-scatter can't hand them out: neighbours need the
    same head. All ranks get the sum of ``heads`` heads and keep those in ``keep`` (which may repeat).
    """

    mesh: Mesh
    head_dim: int
    heads: int
    keep: tuple[int, ...]

    def start(self, x: Pieces, weights: Iterable[Columns]) -> AsyncResult[Sequence[torch.Tensor]]:
        """See :class:`OutputReduce`."""
        weights = list(weights)
        shape = (*x[0].shape[:-1], self.heads * self.head_dim)
        wholes = x[0].new_empty((len(weights), *shape))
        for columns, whole in zip(weights, wholes, strict=True):
            multiply(x, columns, whole)
        return start_all_reduce(wholes, self.mesh, ("hidden",)).then(self._select)

    def _select(self, wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        by_head = wholes.unflatten(-1, (self.heads, self.head_dim))
        return [whole[..., list(self.keep), :].flatten(-2) for whole in by_head]

    def start_transpose(self, gradients: Sequence[torch.Tensor]) -> AsyncResult[Sequence[Pieces]]:
        """See :class:`OutputReduce`."""
        kept = torch.stack(list(gradients)).unflatten(-1, (len(self.keep), self.head_dim))
        wholes = kept.new_zeros((*kept.shape[:-2], self.heads, self.head_dim))
        wholes.index_add_(-2, torch.tensor(self.keep, device=kept.device), kept)
        summed = start_all_reduce(wholes.flatten(-2), self.mesh, ("hidden",))
        return summed.then(lambda gradients: [(gradient,) for gradient in gradients])


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


def _end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in a row; without a copy where there is one contiguous tensor."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
