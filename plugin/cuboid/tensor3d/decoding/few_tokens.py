"""The products of one input with few tokens: at most one message before the products, and one after them.

Whole positions ``[B/b, S, …]``, with names as in :mod:`cuboid.tensor3d.layers.linear_op`. Weights stay sharded, so that
a rank multiplies the tokens of all rows with the shard that it has, which gives

* some features of the output: others are on the axes that shard the weight over its rows;
* a term of their sum: others are on the axes that cut the weight's in features.

All ranks along these axes send each other what they have, for all products together, and each adds and joins what it
needs. That is more bytes than a reduce-scatter sends, and fewer messages than one for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from cuboid.distributed.axis_collectives import all_gather, rows_are_alike
from cuboid.distributed.mesh import AxisGroup, Mesh
from cuboid.distributed.topology import RANK_ORDER, Axis
from cuboid.tensor3d.decoding.late_norm import PendingNorm
from cuboid.tensor3d.sharding.sharded_param import ShardedParam

#: Maximum bytes that a rank receives where a collective for each axis would send fewer.
_FEW_BYTES = 256 << 10


@dataclass(frozen=True)
class FewTokensProduct:
    """One of the products.

    Args:
        param: the weight, ``[out, in]`` or, with ``in_first``, ``[in, out]``.
        in_first: see there.
        rows: which out features of the weight's block are multiplied; None for all.
        summed: the ranks that cut the block's in features; None for none.
        select: from all of these out features, ``[…, out]``, to those that the rank's output has; None for all.
    """

    param: ShardedParam
    in_first: bool
    rows: slice | None
    summed: AxisGroup | None
    select: Callable[[torch.Tensor], torch.Tensor] | None

    @cached_property
    def slices_weight(self) -> bool:
        """Whether rows that aren't needed are left out of the product, rather than of its result."""
        return self.rows is not None and not self.in_first and self.param.ranks == 1

    @cached_property
    def term_axes(self) -> frozenset[Axis]:
        """The axes along which ranks have other terms of the same features."""
        axes = () if self.summed is None else self.summed.axes
        return frozenset((*axes, *self.param.along.axes) if self.in_first else axes)

    @cached_property
    def feature_axes(self) -> frozenset[Axis]:
        """The axes along which ranks have other features."""
        return frozenset(() if self.in_first else self.param.along.axes)


class _PlaceInMessage:
    """What the ranks' dims of a message ``[ranks, …, B/b, S, features]`` are to one of the products."""

    def __init__(self, product: FewTokensProduct, axes: Sequence[Axis], mesh: Mesh) -> None:
        #: Dims of ranks that have the same, the last one first, with the rank's own index.
        self.same: list[tuple[int, int]] = []
        kept: list[Axis] = []
        for dim, axis in reversed(list(enumerate(axes))):
            if axis in product.term_axes or axis in product.feature_axes:
                kept.insert(0, axis)
            else:
                self.same.append((dim, mesh.index(axis)))
        #: Of the dims that are left then, those with terms. The number of the others, and where they belong.
        self.terms = tuple(dim for dim, axis in enumerate(kept) if axis in product.term_axes)
        self.features = len(product.feature_axes)
        self.leading, self.last = tuple(range(self.features)), tuple(range(-1 - self.features, -1))


class FewTokens:
    """See the module.

    Args:
        products: of one input.
        gathers_features: whether the input's features are cut over `hidden`, and multiplied whole.
    """

    def __init__(self, products: Sequence[FewTokensProduct], *, gathers_features: bool) -> None:
        self._products = list(products)
        self._mesh = mesh = products[0].param.mesh
        self._is_sharded = any(product.param.ranks > 1 for product in products)
        in_use = frozenset[Axis]().union(*(product.term_axes | product.feature_axes for product in products))
        self._axes = [axis for axis in RANK_ORDER if axis in in_use]
        #: The ranks that the last message is between.
        self._along = mesh.along(*self._axes)
        self._sizes = [mesh.size(axis) for axis in self._axes]
        #: The rank's own place among them, without that over `hidden`.
        self._place = tuple(0 if axis == "hidden" else mesh.index(axis) for axis in self._axes)
        self._all_dims = tuple(range(len(self._axes)))
        #: Whether all ranks have terms of all products.
        self._are_sums = all(product.term_axes == in_use for product in products)
        self._places = [_PlaceInMessage(product, self._axes, mesh) for product in products]
        cuts: tuple[Axis, ...] = ("hidden",) if gathers_features and mesh.size("hidden") > 1 else ()
        self._alone = mesh.along(*cuts)
        self._with_rows = mesh.along("batch", *cuts)
        self._batch = mesh.along("batch")
        self._takes_norms = not gathers_features and all("hidden" in product.term_axes for product in products)
        shapes = [product.param.spec.shard_shape(mesh.shape) for product in products]
        #: The number of features in the last message, for each token.
        self._height = sum(shape[1 if product.in_first else 0] for shape, product in zip(shapes, products, strict=True))
        self._elements = sum(math.prod(product.param.block_shape) for product in products)

    def takes(self, x: torch.Tensor | PendingNorm) -> bool:
        """Whether there are so few tokens, as ``[B/b, S, …]``; the same on all ranks."""
        shape = (x.statistics if isinstance(x, PendingNorm) else x).shape
        if len(shape) != 3:
            return False
        tokens = shape[0] * shape[1] * (self._batch.size if self._gathers_rows else 1)
        received = tokens * self._height * self._along.size
        if self._is_sharded:
            # Otherwise the weights would be sent to the tokens.
            return received < self._elements
        return self._along.size == 1 or received * x.dtype.itemsize <= _FEW_BYTES

    @property
    def _gathers_rows(self) -> bool:
        return self._is_sharded and self._batch.size > 1 and not rows_are_alike()

    def __call__(self, x: torch.Tensor | PendingNorm, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Multiply.

        Args:
            x: the rank's part of the input, ``[B/b, S, I/…]``, or the norm that it is of.
            weights: the rank's shards.
        """
        norm = x if isinstance(x, PendingNorm) and self._takes_norms and x.is_pending else None
        if isinstance(x, PendingNorm):
            x = x.values() if norm is None else x.own_terms()
        statistics = None if norm is None else norm.statistics
        own_rows: slice | None = None
        if self._gathers_rows:
            own_rows = slice(self._batch.index * x.shape[0], (self._batch.index + 1) * x.shape[0])
            if statistics is None:
                x = self._input(x, self._with_rows)
            else:
                width, sent = x.shape[-1], torch.cat([x, _as_features(statistics, x.dtype)], -1)
                received = self._input(sent, self._with_rows)
                x, statistics = received[..., :width], _as_statistics(received[..., width:], statistics.dtype)
        elif self._alone.size > 1:
            x = self._input(x, self._alone)
        shape = x.shape[:2]
        if norm is not None and norm.constants:
            # Beside the tokens, in one more row.
            x = torch.cat([x.flatten(0, 1), torch.stack(list(norm.constants)).to(x.dtype)]).unsqueeze(0)
        outs = [_product(x, product, weight) for product, weight in zip(self._products, weights, strict=True)]
        if self._along.size == 1:
            return [_own_output(out, product) for out, product in zip(outs, self._products, strict=True)]
        dtype, widths = outs[0].dtype, [out.shape[-1] for out in outs]
        if norm is None or statistics is None:
            stacked = self._exchanged(outs)
            if own_rows is not None:
                stacked = stacked[..., own_rows, :, :]
        else:
            stacked = self._exchanged_with(norm, statistics, outs, shape, own_rows)
        return self._completed(stacked, widths, dtype)

    def _exchanged(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What all ranks have, one part's features after another's: ``[ranks, …, B, S, features]``."""
        stacked = all_gather(parts[0] if len(parts) == 1 else torch.cat(list(parts), -1), self._along)
        return stacked if len(self._sizes) == 1 else stacked.unflatten(0, self._sizes)

    def _exchanged_with(
        self,
        norm: PendingNorm,
        statistics: torch.Tensor,
        outs: Sequence[torch.Tensor],
        shape: torch.Size,
        own_rows: slice | None,
    ) -> torch.Tensor:
        """The same with a norm's statistics, by which the terms are then weighted: ``[ranks, …, B/b, S, features]``."""
        features, count, tokens = _as_features(statistics, outs[0].dtype), len(norm.constants), shape.numel()
        if count:
            features = torch.nn.functional.pad(features.reshape(1, tokens, -1), (0, 0, 0, count))
        stacked, constants = self._exchanged([*outs, features]), None
        width = stacked.shape[-1] - features.shape[-1]
        if count:
            constants = stacked[..., 0, tokens:, :width]
            stacked = stacked[..., 0, :tokens, :].unflatten(-2, shape)
        if own_rows is not None:
            stacked = stacked[..., own_rows, :, :]
        others = _as_statistics(stacked[..., width:], statistics.dtype)
        return norm.weighted(stacked[..., :width], constants, others, self._axes.index("hidden"), self._place)

    def _input(self, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        """All rows and features, ``[B, S, I]``, from the parts of these ranks."""
        rows, length, width = x.shape
        stacked = all_gather(x, along)
        if along.axes == ("batch",):
            return stacked.flatten(0, 1)
        # [b · h, B/b, S, I/h] -> [B, S, I]
        by_axis = stacked.view(-1, self._alone.size, rows, length, width)
        return by_axis.permute(0, 2, 3, 1, 4).reshape(-1, length, self._alone.size * width)

    def _completed(self, stacked: torch.Tensor, widths: list[int], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The rank's outputs, from what all ranks have of them."""
        if self._are_sums:
            total = stacked.sum(self._all_dims, dtype=dtype)
            parts = (total,) if len(widths) == 1 else total.split(widths, -1)
        else:
            pairs = zip(stacked.split(widths, -1), self._products, self._places, strict=True)
            parts = tuple([self._joined(part, product, place, dtype) for part, product, place in pairs])
        return [_own_output(part, product) for part, product in zip(parts, self._products, strict=True)]

    def _joined(
        self, part: torch.Tensor, product: FewTokensProduct, place: _PlaceInMessage, dtype: torch.dtype
    ) -> torch.Tensor:
        """One product's features ``[B/b, S, out]``, from what the ranks along all axes have."""
        for dim, index in place.same:
            part = part.select(dim, index)
        if place.terms:
            part = part.sum(place.terms, dtype=dtype)
        elif part.dtype != dtype:
            part = part.to(dtype)
        if not place.features:
            return part
        shape, height = part.shape[place.features :], product.param.block_shape[0]
        # [ranks, …, B/b, S, features] -> [B/b, S, ranks · … · features], without the last shard's padding
        if shape[0] * shape[1] > 1:
            part = part.movedim(place.leading, place.last)
        joined = part.reshape(*shape[:2], -1)
        return joined if joined.shape[-1] == height else joined[..., :height]


def _product(x: torch.Tensor, product: FewTokensProduct, weight: torch.Tensor) -> torch.Tensor:
    """The rank's features or terms of one output."""
    if product.in_first:
        if product.param.ranks > 1:
            # The shard has some of the block's in features; the last one is padded.
            start = product.param.along.index * weight.shape[0]
            x = x[..., start : start + weight.shape[0]]
            weight = weight[: x.shape[-1]]
        return torch.matmul(x, weight)
    return torch.nn.functional.linear(x, weight[product.rows] if product.slices_weight else weight)


def _own_output(out: torch.Tensor, product: FewTokensProduct) -> torch.Tensor:
    if product.rows is not None and not product.slices_weight:
        out = out[..., product.rows]
    if product.select is not None:
        out = product.select(out)
    return out.contiguous()


def _as_features(statistics: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Statistics ``[…, k]`` as features of a dtype, bit by bit."""
    return statistics if statistics.dtype == dtype else statistics.view(dtype)


def _as_statistics(features: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`_as_features`."""
    return features if features.dtype == dtype else features.contiguous().view(dtype)
