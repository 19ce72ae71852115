"""Products in fp8 in a graph: they send and round what :mod:`cuboid.tensor3d.layers.linear_op` does outside of one.

Forward multiplies an input that was rounded before it was gathered, by rows of the weight; backward multiplies the
gradient by the weight's columns. The input as it is, which the weight's gradient needs, is gathered in backward alone:
forward has no use for it, and partitions leave there what has none.

A block over `batch` that is sent in fp8 has no values: a tensor of NaN stands for it, whose gradient is the block's.
Its rows and columns come as the ranks' messages: rows before forward's graph runs, columns before backward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuboid.distributed.axis_collectives import SEQUENCE_DIM
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.compiled.collectives import gather, scatter, scatter_parts, stack
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.fp8.quantized import SCALE_BYTES
from cuboid.tensor3d.layers.input_gather import GatherFeatures, GatherSequence, InputGather
from cuboid.tensor3d.layers.output_reduce import OutputReduce, ScatterFeatures, ScatterSequence
from cuboid.tensor3d.sharding.fp8_blocks import columns_of, rows_of

#: Of what is gathered in fp8.
MESSAGE_DTYPE = torch.uint8
#: Values in fp8, and their scales.
Rounded = tuple[torch.Tensor, torch.Tensor]


def round_and_gather(x: torch.Tensor, input_gather: InputGather) -> Rounded:
    """From the rank's own part of a product's input to the whole one in fp8, in n pieces: ``[n, B/b, S, I/n]``."""
    if isinstance(input_gather, GatherSequence):
        return _gather_sequence(rowwise.quantize(x.detach()), input_gather.along)
    along = input_gather.along if isinstance(input_gather, GatherFeatures) else None
    return _stack(rowwise.quantize(x.detach()), along)


def _gather_sequence(rounded: Rounded, along: AxisGroup) -> Rounded:
    values, scales = rounded if along.size == 1 else _unpacked(gather(_packed(rounded), SEQUENCE_DIM, along))
    return values.unsqueeze(0), scales.unsqueeze(0)


def _stack(rounded: Rounded, along: AxisGroup | None) -> Rounded:
    if along is not None and along.size > 1:
        return _unpacked(stack(_packed(rounded), along))
    values, scales = rounded
    return values.unsqueeze(0), scales.unsqueeze(0)


def _packed(rounded: Rounded) -> torch.Tensor:
    """Each row with its scale behind it, ``[..., K + 4]`` bytes: one message."""
    values, scales = rounded
    return torch.cat([values.view(MESSAGE_DTYPE), scales.view(MESSAGE_DTYPE)], -1)


def _unpacked(message: torch.Tensor) -> Rounded:
    values, scales = message.split([message.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    return values.contiguous().view(rowwise.DTYPE), scales.contiguous().view(torch.float32)


@dataclass(frozen=True)
class Fp8Call:
    """What a product in fp8 is, besides its tensors.

    Attributes:
        output_reduce: reduces the product's partial sums, if it is a reduce-scatter.
        height: rows of a shard of a block that is sent in fp8.
        sends_fp8: whether the output's gradient is gathered in fp8 where the weight's gradient doesn't need it.
    """

    output_reduce: OutputReduce
    height: int
    sends_fp8: bool

    @property
    def pieces(self) -> int:
        """Of the outputs' gradients, along the features."""
        return self.output_reduce.along.size if isinstance(self.output_reduce, ScatterFeatures) else 1


def multiply(
    x: torch.Tensor,
    rounded: Rounded,
    weight: torch.Tensor,
    messages: Sequence[torch.Tensor | None],
    call: Fp8Call,
) -> torch.Tensor:
    """Multiply, differentiably, and reduce-scatter the partial sums.

    Args:
        x: ``[B/b, S, I]`` in bf16.
        rounded: what stands for it in fp8.
        weight: ``[O, I]``; without values if there are messages.
        messages: the block's rows and columns in fp8, the columns' largest magnitudes and the rows' order, or nothing.
        call: the product.
    """
    rowwise.check_dtypes(x, weight)
    rows, columns, largest, order = messages or (None, None, None, None)
    y: torch.Tensor = _Product.apply(x, weight, *rounded, rows, columns, largest, order, call)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        rows: torch.Tensor | None,
        columns: torch.Tensor | None,
        largest: torch.Tensor | None,
        order: torch.Tensor | None,
        call: Fp8Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, columns, largest, order)
        ctx.call = call
        pieces = values.shape[0]
        if rows is None:
            by_piece = rowwise.quantize(weight.detach().unflatten(1, (pieces, -1)).movedim(1, 0))
        else:
            by_piece = gathered_rows(rows, call.height, weight.shape[0], weight.shape[1], pieces)
        y = _sum_of_products((values, scales), by_piece, fast=True).unflatten(0, x.shape[:-1])
        output_reduce = call.output_reduce
        if isinstance(output_reduce, ScatterFeatures):
            return scatter_parts(y, output_reduce.parts[0], output_reduce.along)
        return scatter(y, SEQUENCE_DIM, output_reduce.along) if isinstance(output_reduce, ScatterSequence) else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, columns, largest, order = ctx.saved_tensors
        call: Fp8Call = ctx.call
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if needs_x:
            if needs_weight or not call.sends_fp8:
                rounded = rowwise.quantize(_gathered_pieces(dy, call))
            elif isinstance(call.output_reduce, ScatterSequence):
                rounded = _gather_sequence(rowwise.quantize(dy), call.output_reduce.along)
            else:
                along = call.output_reduce.along if isinstance(call.output_reduce, ScatterFeatures) else None
                rounded = _stack(rowwise.quantize(dy), along)
            if columns is None:
                by_piece = rowwise.quantize(_rows_by_piece(weight, call).mT)
            else:
                by_piece = gathered_columns(columns, largest, order, call.height, weight.shape[0], dy)
            dx = _sum_of_products(rounded, by_piece, fast=False).unflatten(0, x.shape[:-1])
        if needs_weight:
            tokens = _in_order_of_rows(_gathered_pieces(dy, call), call).flatten(0, -2)
            dweight = tokens.t().mm(x.flatten(0, -2))
        return dx, dweight, None, None, None, None, None, None, None


def _sum_of_products(x: Rounded, weight: Rounded, *, fast: bool) -> torch.Tensor:
    """Over the pieces ``[n, ..., K]`` and ``[n, N, K]``: ``[tokens, N]``, each term rounded to bf16."""
    terms = []
    for factors in zip(*x, *weight, strict=True):
        values, scales, weight_values, weight_scales = factors
        terms.append(
            rowwise.multiply_quantized(
                values.flatten(0, -2), scales.flatten(0, -2), weight_values, weight_scales, fast=fast
            )
        )
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _gathered_pieces(dy: torch.Tensor, call: Fp8Call) -> torch.Tensor:
    """The gradients of the partial sums, ``[n, B/b, S, O/n]``."""
    if isinstance(call.output_reduce, ScatterFeatures):
        along = call.output_reduce.along
        return stack(dy, along) if along.size > 1 else dy.unsqueeze(0)
    if isinstance(call.output_reduce, ScatterSequence):
        dy = gather(dy, SEQUENCE_DIM, call.output_reduce.along)
    return dy.unsqueeze(0)


def _parts(call: Fp8Call) -> int:
    return call.output_reduce.parts[0] if isinstance(call.output_reduce, ScatterFeatures) else 1


def _in_order_of_rows(pieces: torch.Tensor, call: Fp8Call) -> torch.Tensor:
    """``[n, ..., O/n]`` to ``[..., O]``, in the order of the weight's rows: each rank has a piece of every part."""
    by_part = pieces.unflatten(-1, (_parts(call), -1))
    # [n, ..., parts, k] -> [..., parts, n, k]
    return by_part.movedim(0, -2).flatten(-3)


def _rows_by_piece(weight: torch.Tensor, call: Fp8Call) -> torch.Tensor:
    """A weight's rows for each piece of its outputs' gradients, ``[n, O/n, I]``."""
    by_part = weight.unflatten(0, (_parts(call), call.pieces, -1))
    return by_part.transpose(0, 1).flatten(1, 2)


# Operators, since a graph's partition may run in forward whatever doesn't follow from a gradient, and before forward
# there are no columns. So they take the gradient, too.


@torch.library.custom_op("cuboid::fp8_rows", mutates_args=())
def gathered_rows(
    slots: torch.Tensor, height: int, outputs: int, inputs: int, pieces: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' messages as rows ``[pieces, O, I/pieces]`` and scales ``[pieces, O, 1]``."""
    return rows_of(slots, height, outputs, inputs, pieces)


@gathered_rows.register_fake
def _rows_shape(
    slots: torch.Tensor, _: int, outputs: int, inputs: int, pieces: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        slots.new_empty((pieces, outputs, inputs // pieces), dtype=rowwise.DTYPE),
        slots.new_empty((pieces, outputs, 1), dtype=torch.float32),
    )


@torch.library.custom_op("cuboid::fp8_columns", mutates_args=())
def gathered_columns(
    slots: torch.Tensor,
    largest: torch.Tensor,
    order: torch.Tensor | None,
    height: int,
    outputs: int,
    gradient: torch.Tensor,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' messages as columns ``[n, I, O/n]`` and scales ``[n, I, 1]``; before the gradient, there are none."""
    return columns_of(slots, largest, order, height, outputs)


@gathered_columns.register_fake
def _columns_shape(
    slots: torch.Tensor, largest: torch.Tensor, _: torch.Tensor | None, __: int, outputs: int, ___: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pieces, inputs = largest.shape
    return (
        slots.new_empty((pieces, inputs, outputs // pieces), dtype=rowwise.DTYPE),
        slots.new_empty((pieces, inputs, 1), dtype=torch.float32),
    )
