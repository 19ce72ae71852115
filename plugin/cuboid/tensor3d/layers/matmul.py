"""Matrix products whose operands come in pieces, as collectives deliver them, and whose results go out in pieces.

An all-gather leaves the ranks' tensors one behind the other, and a reduce-scatter wants them so. Where that isn't the
order of the dim in question, a product of the whole would need a copy of it before, and another one after. These
multiply piece by piece instead, straight out of one buffer and into the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: A tensor that is cut along its last dim, its features: what one would concatenate to have the whole.
Pieces = Sequence[torch.Tensor]


def multiply(x: Pieces, weights: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ.

    Args:
        x: pieces ``[..., I_i]``.
        weights: for each piece the columns ``[O, I_i]`` of W.
        out: contiguous ``[..., O]`` that takes the result; made if None.
    """
    if out is None:
        out = x[0].new_empty((*x[0].shape[:-1], weights[0].shape[0]))
    rows = out.view(-1, out.shape[-1])
    for index, (piece, weight) in enumerate(zip(x, weights, strict=True)):
        flat = piece.reshape(-1, piece.shape[-1])
        if index == 0:
            torch.mm(flat, weight.t(), out=rows)
        else:
            rows.addmm_(flat, weight.t())
    return out


def multiply_by_position(
    x: Pieces, weights: Sequence[torch.Tensor], out: torch.Tensor, first: int, stop: int
) -> torch.Tensor:
    """As :func:`multiply`, of the positions ``first`` to ``stop`` (exclusive) of each row.

    Args:
        x: pieces ``[B, S, I_i]``.
        weights: as there.
        out: contiguous ``[B, stop - first, O]``.
        first, stop: positions in 0 … S.
    """
    # A row's positions lie together, those of several rows don't.
    for row in range(out.shape[0]):
        multiply([piece[row, first:stop] for piece in x], weights, out[row])
    return out


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """dyᵀ x into ``out`` ``[O, I]``, any part of a gradient; its transpose is multiplied where that is how it lies."""
    dy_2d, x_2d = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if out.stride(0) == 1 and out.stride(1) != 1:
        torch.mm(x_2d.t(), dy_2d, out=out.t())
    else:
        torch.mm(dy_2d.t(), x_2d, out=out)
