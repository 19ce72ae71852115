"""A weight's block in fp8, rounded shard by shard: the bits are those that rounding the gathered block would give.

Forward multiplies by rows of the block, backward by its columns, and both are rounded by scales of their own. A row is
whole in its shard. A column is cut, and a scale depends on its largest element alone, which ranks find together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.fp8.quantized import Quantized, packed, unpacked


class BlockForm(Enum):
    """What a block is unsharded as."""

    #: In the weight's own dtype, for any product.
    WIDE = "wide"
    #: In fp8, for forward.
    ROWS = "rows"
    #: In fp8, for the gradient of the input.
    COLUMNS = "columns"


class Fp8Blocks:
    """How a block ``[O, I]`` is rounded.

    Args:
        places: for each of n pieces of the outputs, its rows of the block, ``[n, O/n]``; columns of pieces have scales
            of their own.
        inputs: p, the pieces of the inputs; rows of pieces have scales of their own.
        along: the ranks that have the shards.
        height: rows of a shard; the last shard's may be padding.
    """

    def __init__(self, places: torch.Tensor, inputs: int, along: AxisGroup, height: int) -> None:
        self._inputs, self._along, self.height = inputs, along, height
        self._shape = tuple(places.shape)
        rows = places.flatten()
        #: None if the pieces' rows follow one another.
        self.order = None if bool((rows.diff() == 1).all()) else rows
        piece_of_row = torch.empty_like(rows)
        piece_of_row[rows] = torch.arange(len(places)).repeat_interleave(places.shape[1])
        start = along.index * height
        numbers, counts = piece_of_row[start : start + height].unique_consecutive(return_counts=True)
        #: The shard's rows in order: a piece, and how many rows of it follow.
        self._runs = list(zip(numbers.tolist(), counts.tolist(), strict=True))

    def rows_message(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard ``[rows, I]`` in fp8 for forward, with its scales."""
        values, scales = rowwise.quantize(shard.unflatten(1, (self._inputs, -1)).flatten(0, 1))
        return packed([(values, scales)])

    def rows(self, slots: torch.Tensor, width: int) -> list[Quantized]:
        """Of the ranks' messages, for each piece of the inputs the columns ``[O, I/p]`` that multiply it."""
        rows = rows_of(slots, self.height, self._shape[0] * self._shape[1], width, self._inputs)
        return Quantized(*rows).unbind()

    def largest(self, shard: torch.Tensor) -> torch.Tensor:
        """The largest magnitudes in the shard's columns, ``[n, I]``; zeros for pieces of which it has no rows."""
        most = shard.new_zeros(self._shape[0], shard.shape[1])
        start = 0
        for piece, count in self._runs:
            most[piece] = torch.maximum(most[piece], shard[start : start + count].abs().amax(0))
            start += count
        return most

    def columns_message(self, shard: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """The shard in fp8 for the gradient of the input, by the largest magnitudes in the block's columns."""
        values = torch.zeros_like(shard, dtype=torch.uint8)
        start = 0
        for piece, count in self._runs:
            rounded, _ = rowwise.quantize_by(shard[start : start + count], largest[piece])
            values[start : start + count] = rounded.view(torch.uint8)
            start += count
        return values.flatten()

    def columns(self, slots: torch.Tensor, largest: torch.Tensor) -> Quantized:
        """Of the ranks' messages, the block's columns ``[n, I, O/n]``."""
        return Quantized(*columns_of(slots, largest, self.order, self.height, self._shape[0] * self._shape[1]))


def rows_of(
    slots: torch.Tensor, height: int, outputs: int, inputs: int, pieces: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' messages as the block's rows in fp8, ``[pieces, O, I/pieces]``, and their scales.

    Args:
        slots: of :meth:`Fp8Blocks.rows_message`, ``[ranks, bytes]``.
        height: rows of a shard; the last ones may be padding.
        outputs, inputs: O and I.
        pieces: of the inputs.
    """
    (block,) = unpacked(slots, [(height, inputs)], [pieces])
    values = block.values.flatten(0, 1)[:outputs].unflatten(1, (pieces, -1))
    scales = block.scales.flatten(0, 1)[:outputs]
    return values.movedim(1, 0).contiguous(), scales.movedim(1, 0).unsqueeze(-1).contiguous()


def columns_of(
    slots: torch.Tensor, largest: torch.Tensor, order: torch.Tensor | None, height: int, outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' messages as the block's columns in fp8, ``[n, I, O/n]``, and their scales.

    Args:
        slots: of :meth:`Fp8Blocks.columns_message`, ``[ranks, bytes]``.
        largest: see :meth:`Fp8Blocks.largest`.
        order: see :attr:`Fp8Blocks.order`.
        height: rows of a shard.
        outputs: O.
    """
    values = slots.unflatten(1, (height, -1)).flatten(0, 1)
    values = values[:outputs] if order is None else values[order.to(values.device)]
    values = values.unflatten(0, (largest.shape[0], -1)).mT.contiguous().view(rowwise.DTYPE)
    return values, rowwise.scales(largest).unsqueeze(-1)


def start_largest(blocks: Sequence[Any], shards: Sequence[torch.Tensor]) -> None:
    """Start to find the largest magnitudes in the columns of some parameters' blocks, with one message.

    Args:
        blocks: parameters with the same ranks, whose blocks are rounded.
        shards: theirs.
    """
    parts = [param.fp8.largest(shard.detach()) for param, shard in zip(blocks, shards, strict=True)]
    message, along = torch.cat([part.flatten() for part in parts]), blocks[0].along
    along.counted["all_reduce", message.nbytes] += 1
    work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=along.process_group, async_op=True)
    reducing = AsyncResult[torch.Tensor](message, (work,))
    start = 0
    for param, part in zip(blocks, parts, strict=True):
        param.largest = _LargestOfBlock(reducing, start, part)
        start += part.numel()


class _LargestOfBlock:
    """One parameter's part of a message."""

    def __init__(self, message: AsyncResult[torch.Tensor], start: int, like: torch.Tensor) -> None:
        self._message, self._start, self._shape = message, start, like.shape

    def wait(self) -> torch.Tensor:
        """``[n, I]``."""
        return self._message.wait()[self._start : self._start + self._shape.numel()].view(self._shape)
