"""How partial sums of a product become a rank's own piece of their sum, and its gradient the partial sums' again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import all_gather, all_reduce, gather_dim, reduce_scatter
from cuboid.tensor3d.products import Pieces, multiply, multiply_by_position
from cuboid.tensor3d.sequence import SEQUENCE_DIM
from cuboid.topology import Axis


class Exchange(Protocol):
    """What happens to partial sums ``[B/b, S, rows]`` of a product, and its transpose."""

    def multiply(self, x: Pieces, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """x Wᵀ as partial sums, reduced to the rank's own piece of their sum."""
        ...

    def transpose(self, gradient: torch.Tensor) -> Pieces:
        """Gradient of the own piece to the gradient of the partial sums, whole or in pieces along the rows."""
        ...

    def rows(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of ``[out, in]`` that belong to each of :meth:`transpose`'s pieces."""
        ...

    def put_rows(self, whole: torch.Tensor, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """Where a gradient of these rows goes: features of the piece, and the rows of ``whole`` ``[out, in]``."""
        ...


@dataclass(frozen=True)
class ScatterFeatures:
    """Reduce-scatter over one axis onto the features, which may consist of several parts, each cut separately."""

    mesh: Mesh
    axis: Axis
    parts: int = 1

    def multiply(self, x: Pieces, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :class:`Exchange`."""
        ranks, features = self.mesh.size(self.axis), weights[0].shape[0]
        stacked = x[0].new_empty((ranks, *x[0].shape[:-1], features // ranks))
        by_rank = list(zip(*(self.rows(weight) for weight in weights), strict=True))
        for own, out in zip(by_rank, stacked, strict=True):
            multiply(x, own, out)
        return reduce_scatter(stacked, self.mesh, (self.axis,))

    def transpose(self, gradient: torch.Tensor) -> Pieces:
        """See :class:`Exchange`."""
        return all_gather(gradient, self.mesh, (self.axis,)).unbind(0)

    def rows(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :class:`Exchange`. With several parts these are copies, which are small beside activations."""
        by_part = weight.unflatten(0, (self.parts, self.mesh.size(self.axis), -1))
        return [own.flatten(0, 1) for own in by_part.unbind(1)]

    def put_rows(self, whole: torch.Tensor, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:
        """See :class:`Exchange`."""
        own = whole.unflatten(0, (self.parts, self.mesh.size(self.axis), -1))[:, piece]
        height = own.shape[1]
        return [(slice(part * height, (part + 1) * height), own[part]) for part in range(self.parts)]


class _InOnePiece:
    """For exchanges whose :meth:`Exchange.transpose` gives all rows together."""

    def rows(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :class:`Exchange`."""
        return (weight,)

    def put_rows(self, whole: torch.Tensor, piece: int) -> Sequence[tuple[slice, torch.Tensor]]:  # noqa: ARG002
        """See :class:`Exchange`."""
        return ((slice(None), whole),)


@dataclass(frozen=True)
class ScatterSequence(_InOnePiece):
    """Reduce-scatter over one axis onto the sequence."""

    mesh: Mesh
    axis: Axis

    def multiply(self, x: Pieces, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :class:`Exchange`."""
        ranks, (batch, length) = self.mesh.size(self.axis), x[0].shape[:2]
        own = length // ranks
        stacked = x[0].new_empty((ranks, batch, own, weights[0].shape[0]))
        for rank in range(ranks):
            multiply_by_position(x, weights, stacked[rank], rank * own, (rank + 1) * own)
        return reduce_scatter(stacked, self.mesh, (self.axis,))

    def transpose(self, gradient: torch.Tensor) -> Pieces:
        """See :class:`Exchange`."""
        return (gather_dim(gradient, SEQUENCE_DIM, self.mesh, (self.axis,)),)


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

    def multiply(self, x: Pieces, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :class:`Exchange`."""
        whole = all_reduce(multiply(x, weights), self.mesh, ("hidden",))
        return whole.unflatten(-1, (self.heads, self.head_dim))[..., list(self.keep), :].flatten(-2)

    def transpose(self, gradient: torch.Tensor) -> Pieces:
        """See :class:`Exchange`."""
        kept = gradient.unflatten(-1, (len(self.keep), self.head_dim))
        whole = gradient.new_zeros((*kept.shape[:-2], self.heads, self.head_dim))
        whole.index_add_(-2, torch.tensor(self.keep, device=gradient.device), kept)
        return (all_reduce(whole.flatten(-2), self.mesh, ("hidden",)),)
