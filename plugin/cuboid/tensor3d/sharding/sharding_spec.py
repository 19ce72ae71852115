"""Which rank owns which part of a parameter: an immutable value, and arithmetic on it.

A parameter is split in two steps:

* the *block* is what one multiplication needs: each dim is cut over its ``tp_axes``;
* the *shard* is what a rank keeps: the block, cut along dim 0 over the axes that are left (``fsdp_axes``).

All-gathering the shards over ``fsdp_axes`` gives the block as one contiguous piece. Together both steps use every
axis of the mesh once, so each element has exactly one owner and each rank keeps 1/(b·s·h) of every parameter
(rounded up to whole rows of dim 0, which the last ranks fill with zeros).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import RANK_ORDER, Axis, Coordinate, MeshShape

Interval = tuple[int, int]


@dataclass(frozen=True)
class ShardingSpec:
    """Placement of one parameter on the mesh.

    Args:
        shape: the Hugging Face shape, unsplit.
        tp_axes: for each dim, the axes that cut the block, the first varying slowest.
        parts: for each dim, the number of equal parts that are cut separately, as the fused
            query|key|value of GPT-2 is (3); a block holds its slice of each part, side by side.
        ragged: whether dim 0 may be cut unevenly (vocabularies): blocks are rounded up, the last ones padded.
            Rounding ignores `hidden`, which cuts the other dim of a weight, so that it and its bias have the same rows.
    """

    shape: tuple[int, ...]
    tp_axes: tuple[tuple[Axis, ...], ...]
    parts: tuple[int, ...] = ()
    ragged: bool = False

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", (1,) * len(self.shape))
        used = [axis for axes in self.tp_axes for axis in axes]
        assert len(self.tp_axes) == len(self.shape) == len(self.parts), "one entry for each dim"
        assert len(used) == len(set(used)), "an axis cuts one dim only"
        assert not self.ragged or self.parts[0] == 1, "a fused dim is cut evenly"

    @cached_property
    def fsdp_axes(self) -> tuple[Axis, ...]:
        """Axes that cut the block into shards along dim 0, in rank order."""
        used = {axis for axes in self.tp_axes for axis in axes}
        return tuple(axis for axis in RANK_ORDER if axis not in used)

    def indivisible(self, mesh: MeshShape) -> list[tuple[int, int]]:
        """Dims that the mesh can't cut, as (size that is cut, number of pieces)."""
        cuts = []
        for dim, (size, axes, parts) in enumerate(zip(self.shape, self.tp_axes, self.parts, strict=True)):
            if size % (parts * mesh.of(*axes)) and not (self.ragged and dim == 0):
                cuts.append((size // parts, mesh.of(*axes)))
        return cuts

    def block_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        """Shape of the block, the same on every rank."""
        dims = zip(self.shape, self.tp_axes, self.parts, strict=True)
        shape = [size // parts // mesh.of(*axes) * parts for size, axes, parts in dims]
        if self.ragged:
            # Whole shards of a weight, so that the padding is all at the end of the last blocks.
            shards = mesh.of(*(axis for axis in self.fsdp_axes if axis != "hidden"))
            shape[0] = math.ceil(self.shape[0] / (mesh.of(*self.tp_axes[0]) * shards)) * shards
        return tuple(shape)

    def shard_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        """Shape of the shard, the same on every rank."""
        rows, *other_sizes = self.block_shape(mesh)
        return (math.ceil(rows / mesh.of(*self.fsdp_axes)), *other_sizes)

    def block_intervals(self, mesh: MeshShape, at: Coordinate) -> list[list[Interval]]:
        """For each dim, the intervals of the unsplit tensor that make up the block, in order."""
        intervals, block = [], self.block_shape(mesh)
        for size, block_size, axes, parts in zip(self.shape, block, self.tp_axes, self.parts, strict=True):
            # The block has a piece of each part.
            part, piece = size // parts, block_size // parts
            start = min(at.index(axes, mesh) * piece, part)
            stop = min(start + piece, part)
            intervals.append([(number * part + start, number * part + stop) for number in range(parts)])
        return intervals

    def shard_intervals(self, mesh: MeshShape, at: Coordinate) -> list[list[Interval]]:
        """For each dim, the intervals of the unsplit tensor that this rank owns, in order.

        Their total length can fall short of :meth:`shard_shape` along dim 0; the rest is padding.
        """
        row_intervals, *other_intervals = self.block_intervals(mesh, at)
        height = self.shard_shape(mesh)[0]
        start = at.index(self.fsdp_axes, mesh) * height
        # The part [start, start + height) of the block's rows; ``offset`` is how many are in the intervals before.
        rows, offset = list[Interval](), 0
        for low, high in row_intervals:
            left, right = max(start, offset), min(start + height, offset + high - low)
            if left < right:
                rows.append((low + left - offset, low + right - offset))
            offset += high - low
        return [rows, *other_intervals]


def take_shard(full: torch.Tensor, spec: ShardingSpec, mesh: Mesh, at: Coordinate | None = None) -> torch.Tensor:
    """Copy the shard of the rank at ``at``, by default this one, out of a whole tensor, padding included."""
    shard = full.new_zeros(spec.shard_shape(mesh.shape))
    for in_shard, in_full in shard_boxes(spec, mesh.shape, mesh.coordinate if at is None else at):
        shard[in_shard] = full[in_full]
    return shard


def pad_shard(rows: torch.Tensor, spec: ShardingSpec, mesh: MeshShape) -> torch.Tensor:
    """Pad a shard that was read without its padding to the common shape; a full one is returned unchanged."""
    padding_rows = spec.shard_shape(mesh)[0] - rows.shape[0]
    return rows if padding_rows == 0 else torch.cat([rows, rows.new_zeros((padding_rows, *rows.shape[1:]))])


def put_shard(full: torch.Tensor, shard: torch.Tensor, spec: ShardingSpec, mesh: MeshShape, at: Coordinate) -> None:
    """Write the shard of the rank at ``at`` into a whole tensor; the inverse of :func:`take_shard`."""
    for in_shard, in_full in shard_boxes(spec, mesh, at):
        full[in_full] = shard[in_shard].to(full.dtype)


def placed_boxes(
    spec: ShardingSpec, mesh: MeshShape, at: Coordinate, rows: slice
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """As :func:`shard_boxes` for a range of the shard's rows: pairs of (slices of those rows, of the whole tensor)."""
    for (shard_rows, *shard_dims), (full_rows, *full_dims) in shard_boxes(spec, mesh, at):
        low, high = max(shard_rows.start, rows.start), min(shard_rows.stop, rows.stop)
        if low < high:
            start = full_rows.start + low - shard_rows.start
            full_slice = slice(start, start + high - low)
            yield (slice(low - rows.start, high - rows.start), *shard_dims), (full_slice, *full_dims)


def shard_boxes(
    spec: ShardingSpec, mesh: MeshShape, at: Coordinate
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Pairs of (slices of the shard, slices of the whole tensor) that hold the same elements."""
    return _boxes(spec.shard_intervals(mesh, at))


def block_boxes(
    spec: ShardingSpec, mesh: MeshShape, at: Coordinate
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """As :func:`shard_boxes`, of the block."""
    return _boxes(spec.block_intervals(mesh, at))


def _boxes(intervals_of_dims: list[list[Interval]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    # For each dim, pairs of (slice of the part, slice of the whole tensor); a box takes one pair of each dim.
    for box in product(*(list(_slices(intervals)) for intervals in intervals_of_dims)):
        yield tuple(in_part for in_part, _ in box), tuple(in_full for _, in_full in box)


def _slices(intervals: list[Interval]) -> Iterator[tuple[slice, slice]]:
    """For intervals of one dim: pairs of (slice of their concatenation, slice of the whole dim)."""
    offset = 0
    for low, high in intervals:
        yield slice(offset, offset + high - low), slice(low, high)
        offset += high - low
