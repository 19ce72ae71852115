"""Cross-entropy of logits ``[B/b, S/h, V/s]`` without ever gathering the vocabulary.

Each rank reduces its part of the vocabulary. Maxima and sums are all-reduced over `sequence`, the total over `batch`
and `hidden`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    all_reduce,
    gather_dim,
    gather_positions,
    own_slice,
    rows_are_alike,
)
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis
from cuboid.tensor3d.layers.norm import statistics_dtype

#: Label of padding positions, and the default label of positions that are ignored.
PADDING = -100
#: Of a label, by the model's distribution: its log-probability, the distribution's entropy, 1 where no other token is
#: as probable, else 0, the mean of the logits, and the logarithm of the sum of all squared probabilities. All are 0
#: where the label is ignored.
TOKEN_VALUES = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")


class _TokenLosses(torch.autograd.Function):
    """``-log softmax(logits)[label]`` for each token, ``[B/b, S/h]``; 0 where the label is ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, vocabulary: int, mesh: Mesh
    ) -> torch.Tensor:
        local, elsewhere, beyond = _locate(labels, logits.shape[-1], vocabulary, mesh)
        wide = _masked(logits, beyond)
        maximum = all_reduce(wide.amax(-1), mesh.along("sequence"), dist.ReduceOp.MAX)
        target = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        total = wide.sub_(maximum.unsqueeze(-1)).exp_().sum(-1)
        total, target = all_reduce(torch.stack([total, target]), mesh.along("sequence"))
        log_total = maximum + total.log()
        ignored = labels == ignore_index
        # -1: another rank has the label's column.
        ctx.save_for_backward(logits, local.masked_fill(elsewhere, -1), log_total, ignored)
        ctx.beyond = beyond
        return (log_total - target).masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, local, log_total, ignored = ctx.saved_tensors
        # Recomputed, because forward would have to save it beside the logits.
        softmax = (_masked(logits, ctx.beyond) - log_total.unsqueeze(-1)).exp_()
        column = local.clamp(min=0).unsqueeze(-1)
        # softmax - 1 in the label's column, if this rank has it: the gradient of -log softmax.
        softmax.scatter_add_(-1, column, -(local >= 0).to(softmax.dtype).unsqueeze(-1))
        softmax *= gradient.masked_fill(ignored, 0).unsqueeze(-1)
        return softmax.to(logits.dtype), None, None, None, None


def _locate(labels: torch.Tensor, rows: int, vocabulary: int, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Labels as columns of this rank's logits, a mask of other ranks' labels, and the number of unpadded columns."""
    start = mesh.index("sequence") * rows
    local = labels - start
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere, max(0, min(rows, vocabulary - start))


def _masked(logits: torch.Tensor, real: int) -> torch.Tensor:
    """A copy in the dtype of statistics, with the columns that pad the vocabulary at the lowest finite number."""
    wide = logits.to(statistics_dtype(logits.dtype), copy=True)
    # Not -inf: a rank that has only padding would compute -inf - -inf.
    wide[..., real:] = torch.finfo(wide.dtype).min
    return wide


def token_values(
    logits: torch.Tensor, labels: torch.Tensor, *, vocabulary: int, mesh: Mesh, ignore_index: int = PADDING
) -> torch.Tensor:
    """What each token's distribution says: ``[5, B/b, S/h]``, in the order of :data:`TOKEN_VALUES`; without gradients.

    Arguments are those of :func:`token_sum`.
    """
    labels = own_slice(labels, 1, mesh.along("hidden")).to(logits.device)
    with torch.no_grad():
        log_probs = -_TokenLosses.apply(logits, labels, ignore_index, vocabulary, mesh)
        real, along = _locate(labels, logits.shape[-1], vocabulary, mesh)[2], mesh.along("sequence")
        wide = _masked(logits, real)
        logit_sum = wide[..., :real].sum(-1)
        own_maximum, column = wide.max(-1)
        maximum = all_reduce(own_maximum.clone(), along, dist.ReduceOp.MAX)
        # Of equal logits, the first one counts, as in argmax.
        first = (column + mesh.index("sequence") * logits.shape[-1]).masked_fill_(own_maximum < maximum, vocabulary)
        first = all_reduce(first, along, dist.ReduceOp.MIN)
        shifted_logits = wide.sub_(maximum.unsqueeze(-1))
        weights = shifted_logits.exp()
        squares = torch.linalg.vecdot(weights, weights)
        sums = torch.stack([weights.sum(-1), weights.mul_(shifted_logits).sum(-1), squares, logit_sum])
        total, weighted, squares, logit_sum = all_reduce(sums, along)
        entropy, is_top1 = total.log() - weighted / total, (first == labels).to(log_probs.dtype)
        values = torch.stack([log_probs, entropy, is_top1, logit_sum / vocabulary, squares.log() - 2 * total.log()])
        return values.masked_fill_(labels == ignore_index, 0)


class _SumOverMesh(torch.autograd.Function):
    """All-reduce the ranks' parts of the loss. Each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return all_reduce(part.clone(), mesh.along("batch", "hidden"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def token_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocabulary: int,
    mesh: Mesh,
    ignore_index: int = PADDING,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the losses of this rank's tokens; :func:`sum_over_mesh` turns it into the whole micro-batch's.

    Args:
        logits: ``[B/b, S/h, ⌈V/s⌉]``.
        labels: ``[B/b, S]``, already shifted: entry t is the token that position t predicts.
        vocabulary: V, without padding.
        ignore_index: label of tokens without a loss.
        weights: ``[B/b, S]``: multiply the tokens' losses.
    """
    own_labels = own_slice(labels, 1, mesh.along("hidden")).to(logits.device)
    if weights is not None:
        weights = own_slice(weights, 1, mesh.along("hidden")).to(logits.device)
    if mesh.size("sequence") == 1:
        dtype = statistics_dtype(logits.dtype)
        return whole_token_sum(logits[..., :vocabulary], own_labels, ignore_index, dtype, weights)
    losses: torch.Tensor = _TokenLosses.apply(logits, own_labels, ignore_index, vocabulary, mesh)
    return losses.sum() if weights is None else (losses * weights).sum()


def whole_token_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = PADDING,
    dtype: torch.dtype = torch.float32,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the losses of tokens whose logits ``[..., V]`` are whole.

    Args:
        logits: of any dtype.
        labels: ``[...]``, already shifted.
        ignore_index: label of tokens without a loss.
        dtype: of the softmax and the sum; by default that of Hugging Face's loss.
        weights: ``[...]``: multiply the tokens' losses.
    """
    # Its kernel for a wider result reads the logits as they are. Cast before, they would be copied, there and back.
    log_probs = nn.functional.log_softmax(logits, -1, dtype=dtype).flatten(0, -2)
    labels = labels.to(logits.device).flatten()
    if weights is None:
        return nn.functional.nll_loss(log_probs, labels, ignore_index=ignore_index, reduction="sum")
    losses = nn.functional.nll_loss(log_probs, labels, ignore_index=ignore_index, reduction="none")
    return losses @ weights.to(losses.device, losses.dtype).flatten()


def sum_over_mesh(part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum the ranks' :func:`token_sum`, differentiably, to the same scalar on every rank."""
    return _SumOverMesh.apply(part, mesh)


def divisor(
    labels: torch.Tensor, mesh: Mesh, items: torch.Tensor | float | None, ignore_index: int, like: torch.Tensor
) -> torch.Tensor:
    """The loss's divisor: ``items``, or the number of labels ``[B/b, S]`` in the micro-batch that aren't ignored.

    The result has the dtype and the device of ``like``.
    """
    if items is None:
        count = (labels != ignore_index).sum()
        return all_reduce(count.to(like.device, like.dtype), mesh.along("batch"))
    return torch.as_tensor(items, dtype=like.dtype, device=like.device)


def sharded_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocabulary: int,
    mesh: Mesh,
    items: torch.Tensor | float | None = None,
    ignore_index: int = PADDING,
) -> torch.Tensor:
    """The language-modelling loss of the mesh's whole micro-batch, the same scalar on every rank.

    Args:
        logits, labels, vocabulary, ignore_index: see :func:`token_sum`.
        items: what the sum over tokens is divided by (Hugging Face's ``num_items_in_batch``); by default the number
            of labels in the micro-batch that are not ignored.
    """
    part = token_sum(logits, labels, vocabulary=vocabulary, mesh=mesh, ignore_index=ignore_index)
    return sum_over_mesh(part, mesh) / divisor(labels, mesh, items, ignore_index, part)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, cuts: Sequence[tuple[int, Axis]]) -> torch.Tensor:
        ctx.mesh, ctx.cuts = mesh, cuts
        for dim, axis in cuts:
            if axis == "batch" and rows_are_alike():
                continue
            along = mesh.along(axis)
            x = gather_positions(x, along) if dim == SEQUENCE_DIM else gather_dim(x, dim, along)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # All ranks compute the same from the full tensor, so that each has its full gradient: nothing to reduce.
        for dim, axis in reversed(ctx.cuts):
            gradient = own_slice(gradient, dim, ctx.mesh.along(axis))
        return gradient.contiguous(), None, None


def gather_logits(logits: torch.Tensor, mesh: Mesh, *, rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """All-gather ``[B/b, S/h, ⌈V/s⌉]`` to ``[B, S, V]`` on every rank, differentiably, and cut off the padding.

    All ranks of the mesh must compute the same from the result: its gradient isn't reduced.
    """
    if mesh.shape.size > 1:
        logits = _Gather.apply(logits, mesh, ((2, "sequence"), (1, "hidden"), (0, "batch")))
    return logits[:rows, :length, :vocabulary]


def gather_hidden(hidden: torch.Tensor, mesh: Mesh, *, rows: int, length: int) -> torch.Tensor:
    """All-gather hidden states ``[B/b, S/s, H/h]`` to ``[B, S, H]``; as :func:`gather_logits`."""
    if mesh.shape.size > 1:
        hidden = _Gather.apply(hidden, mesh, ((2, "hidden"), (1, "sequence"), (0, "batch")))
    return hidden[:rows, :length]


def gather_rows(x: torch.Tensor, mesh: Mesh, *, rows: int) -> torch.Tensor:
    """All-gather ``[B/b, …]``, equal along `sequence` and `hidden`, to ``[B, …]``; as :func:`gather_logits`."""
    if mesh.size("batch") > 1:
        x = _Gather.apply(x, mesh, ((0, "batch"),))
    return x[:rows]


def shifted(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Shift labels ``[B, S]`` so that entry t is the token after t, as Hugging Face's causal loss does."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def predicted(labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """The targets of Hugging Face's causal loss: ``shift_labels`` if there are any, else the labels shifted."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = shifted(labels, ignore_index)
    # A sequence's padding for the mesh has this label, whichever label is ignored otherwise.
    return shift_labels if ignore_index == PADDING else shift_labels.masked_fill(shift_labels == PADDING, ignore_index)
