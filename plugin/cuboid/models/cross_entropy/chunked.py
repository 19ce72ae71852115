"""Cross-entropy in chunks of tokens, so that the head's logits exist for one chunk only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.autograd_graph import IS_OUTPUT, graph_of
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.vocab_cross_entropy import sum_over_mesh, token_sum, whole_token_sum
from cuboid.tensor3d.unshard import UnshardedParam

#: Default size of a chunk's logits in float32.
CHUNK_BYTES = 64 * 2**20
#: Fewest tokens of a chunk on an accelerator. Each chunk writes the gradient of the head's whole weight, so a small one
#: is memory-bound: with a vocabulary of 128k and 4,096 features, 64 MiB are 130 tokens.
CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Cross-entropy summed over tokens, times ``scale``, computed in chunks of tokens.

    Args:
        head: the head of a whole model or a last stage.
        labels: ``[B, L]`` (on a mesh ``[B/b, L]``), already shifted: entry t is the token that position t predicts, or
            ``ignore_index``.
        scale: one over the number of labels in the global batch, times any other factor of the loss.
        vocabulary: V.
        mesh: the mesh that the head is sharded over, if it is. Methods are then collective over it.
        chunk_bytes: largest size of a chunk's logits in float32, on one rank. A chunk has at least one position of each
            row (on a mesh up to s·h), whatever its size. None for 64 MiB and, on an accelerator, at least 2048 tokens.
        ignore_index: label of tokens without a loss.
        observe: called with each chunk's logits, as the head returns them, and the labels that belong to them.
        weights: of the tokens' losses, of the labels' shape; None for 1.
    """

    head: Head
    labels: torch.Tensor
    scale: torch.Tensor | float
    vocabulary: int
    mesh: Mesh | None = None
    chunk_bytes: int | None = None
    ignore_index: int = IGNORE_INDEX
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    weights: torch.Tensor | None = None

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss alone, a scalar; on a mesh the same on every rank.

        Args:
            hidden: ``[B, L, H]`` from the base model; on a mesh ``[B/b, L/s, H/h]``.
        """
        with torch.no_grad():
            return self._total(
                hidden,
                (self._loss(hidden[:, positions], labels, positions) for positions, labels in self._chunks(hidden)),
            )

    def value_and_gradients(
        self, hidden: torch.Tensor, unsharded: Sequence[UnshardedParam], factor: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss times ``factor``, and its gradient with respect to ``hidden``, None if that requires none.

        Logits are computed once. Gradients of the head's parameters are added to ``unsharded``.
        """
        leaf = hidden.detach()
        gradient = torch.empty_like(leaf) if hidden.requires_grad else None
        chunks = list(self._chunks(leaf))

        def losses() -> Iterator[torch.Tensor]:
            for positions, labels in chunks:
                part = leaf[:, positions].requires_grad_(gradient is not None)
                yield self._differentiate(
                    self._loss(part, labels, positions) * factor, part, unsharded, alone=len(chunks) == 1
                )
                if gradient is not None:
                    assert part.grad is not None
                    gradient[:, positions] = part.grad

        # Hide what chunks save for backward from outer saved-tensor hooks, such as activation offloading: each chunk
        # runs backward at once.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
            return self._total(hidden, losses()), gradient

    def _differentiate(
        self, loss: torch.Tensor, part: torch.Tensor, unsharded: Sequence[UnshardedParam], *, alone: bool
    ) -> torch.Tensor:
        """Run a chunk's backward into ``part.grad`` and ``unsharded``, and return the detached loss."""
        if not loss.requires_grad:
            # All that is trained is an adapter of the head that is merged or disabled now.
            return loss
        known = {id(part), *[id(param.block) for param in unsharded]}
        for node in graph_of(loss):
            leaf = getattr(node, "variable", None)
            # A parameter of the base model would miss this part of its gradient.
            if leaf is not None and id(leaf) not in known:
                raise UnsupportedModelError(
                    f"the head of {type(self.head.model).__name__} computes with a parameter of its base model "
                    f"({list(leaf.shape)}), for which there is no rule"
                )
        root: Any = loss.grad_fn
        root.metadata[IS_OUTPUT] = True
        torch.autograd.backward(loss)
        for param in unsharded:
            if param.block.grad is not None:
                param.add(param.block.grad, alone=alone)
                param.block.grad = None
        return loss.detach()

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, positions: slice) -> torch.Tensor:
        """A chunk's scaled loss; on a mesh this rank's part of it."""
        logits = self.head.logits(hidden)
        if self.observe is not None:
            self.observe(logits.detach(), labels)
        weights = None if self.weights is None else self._by_rank(self.weights)[:, :, positions].flatten(1)
        if self.mesh is None:
            losses = whole_token_sum(logits, labels, self.ignore_index, weights=weights)
        else:
            losses = token_sum(
                logits,
                labels,
                vocabulary=self.vocabulary,
                mesh=self.mesh,
                ignore_index=self.ignore_index,
                weights=weights,
            )
        return losses * self.scale

    def _total(self, hidden: torch.Tensor, losses: Iterator[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=statistics_dtype(hidden.dtype), device=hidden.device)
        for loss in losses:
            total += loss
        return total if self.mesh is None else sum_over_mesh(total, self.mesh).detach()

    def _chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        columns = self.vocabulary if self.mesh is None else math.ceil(self.vocabulary / self.mesh.size("sequence"))
        return head_chunks(hidden, self.labels, self.mesh, columns, self.chunk_bytes)

    def _by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, s, L/s]`` of ``[B, L]``, by the ranks along `sequence`."""
        return x.unflatten(1, (1 if self.mesh is None else self.mesh.size("sequence"), -1))


def chunked_loss(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: torch.Tensor | float,
    vocabulary: int,
    mesh: Mesh | None = None,
    chunk_bytes: int | None = None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss of a last stage's hidden states, and its gradient with respect to them.

    If gradients are enabled, those of the head's parameters are added to their ``.grad``. The caller must still run
    ``hidden.backward(gradient)``.

    Args:
        hidden: ``[B, L, H]`` from the last stage's base model; on a mesh ``[B/b, L/s, H/h]``.
        head, labels, scale, vocabulary, mesh, chunk_bytes, observe, weights: see :class:`ChunkedCrossEntropy`.

    Returns:
        The detached loss (on a mesh the same on every rank), and the gradient, shaped as ``hidden``; None if gradients
        are disabled.
    """
    loss = ChunkedCrossEntropy(head, labels, scale, vocabulary, mesh, chunk_bytes, observe=observe, weights=weights)
    with head.unsharded() as unsharded:
        if not torch.is_grad_enabled():
            return loss.value(hidden), None
        value, gradient = loss.value_and_gradients(hidden.detach().requires_grad_(), unsharded)
        gradients = [(param.parameter, param.gradient()) for param in unsharded]
    for parameter, parameter_gradient in gradients:
        if parameter_gradient is not None:
            torch.autograd.backward(parameter, parameter_gradient)
    return value, gradient


def least_positions(mesh: Mesh | None) -> int:
    """The fewest own positions that a rank's head takes: those gathered over `sequence` must divide by `hidden`."""
    return 1 if mesh is None else mesh.size("hidden") // math.gcd(mesh.size("sequence"), mesh.size("hidden"))


def head_chunks(
    hidden: torch.Tensor, labels: torch.Tensor, mesh: Mesh | None, columns: int, chunk_bytes: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of the rank's own positions, each with the labels of the logits that the head computes for it.

    On a mesh, the head gathers one slice from each of the s ranks along `sequence`, and gives each rank along `hidden`
    a part of the logits. The slices start L/s positions apart in the sequence, so the labels are taken alike.

    Args:
        hidden: ``[B, L, H]``, on a mesh ``[B/b, L/s, H/h]``.
        labels: ``[B, L]``, on a mesh ``[B/b, L]``.
        mesh: that the head is sharded over, if it is.
        columns: of the vocabulary, in the block that the head is multiplied with.
        chunk_bytes: see :class:`ChunkedCrossEntropy`.
    """
    sequence, spread = (1, 1) if mesh is None else (mesh.size("sequence"), mesh.size("hidden"))
    rows, length, _ = hidden.shape
    count = (CHUNK_BYTES if chunk_bytes is None else chunk_bytes) * spread // (4 * rows * sequence * columns)
    if chunk_bytes is None and hidden.device.type != "cpu":
        count = max(count, math.ceil(CHUNK_TOKENS / (rows * sequence)))
    grain = least_positions(mesh)
    step = max(1, count // grain) * grain
    by_rank = labels.to(hidden.device).unflatten(1, (sequence, length))
    for start in range(0, length, step):
        positions = slice(start, min(start + step, length))
        yield positions, by_rank[:, :, positions].flatten(1)
