"""The last stage's end: logits and loss in chunks of tokens, so that no more than a chunk of logits ever exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.hf.batch import IGNORE_INDEX
from cuboid.hf.outline import Outline
from cuboid.mesh import Mesh
from cuboid.tensor3d.loss import sharded_cross_entropy
from cuboid.tensor3d.norm import statistics_dtype

#: Of logits in float32, for one chunk.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Head:
    """What turns final hidden states into logits: the causal language model's own forward around its base model.

    Soft-caps, scaling and biases are so the model's own.

    Args:
        model: a whole model or a last stage, perhaps sharded.
        outline: the model's.
        forward: the architecture's forward, unbound; by default that of the model's class.
    """

    model: PreTrainedModel
    outline: Outline
    forward: Callable[..., Any] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, L, H]`` to ``[B, L, V]``; on a mesh ``[B/b, L/s, H/h]`` to ``[B/b, L/h, ⌈V/s⌉]``."""
        forward = type(self.model).forward if self.forward is None else self.forward
        with self._base_returns(self.outline.output(last_hidden_state=hidden)):
            output = forward(self.model, inputs_embeds=hidden)
        # The class or, with config.return_dict off, a tuple; without labels, logits come first in both.
        logits: torch.Tensor = output[0]
        return logits

    @contextmanager
    def _base_returns(self, output: Any) -> Iterator[None]:
        base: Any = self.model.get_submodule(self.outline.base)
        base.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del base.forward


def chunked_loss(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: torch.Tensor | float,
    vocabulary: int,
    mesh: Mesh | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cross-entropy summed over tokens times ``scale``, and its gradient with respect to ``hidden``.

    The gradient is computed chunk by chunk, together with the loss, wherever gradients are enabled; those of the
    head's parameters add to their ``grad``. What remains to be done is ``hidden.backward(gradient)``.

    Args:
        head: of a whole model or a last stage.
        hidden: ``[B, L, H]`` from the last stage's base model; on a mesh ``[B/b, L/s, H/h]``.
        labels: ``[B, L]`` (``[B/b, L]``), already shifted: entry t is the token that position t predicts;
            ``IGNORE_INDEX`` where there is none.
        scale: one over the number of labels in the global batch, and any other factor of the loss.
        vocabulary: V.
        mesh: what the head is split over, if it is. All of its ranks must call.
        chunk_bytes: largest size of a chunk's logits in float32, on one rank. One position of each row (on a mesh up to
            s·h) is the least that a chunk has, however many bytes it takes.

    Returns:
        The loss, detached (on a mesh the same on every rank), and the gradient, None where none are enabled.
    """
    differentiates = torch.is_grad_enabled()
    leaf = hidden.detach()
    gradient = torch.empty_like(leaf) if differentiates else None
    total = torch.zeros((), dtype=statistics_dtype(hidden.dtype), device=hidden.device)
    for own, chunk_labels in _chunks(leaf, labels.to(hidden.device), vocabulary, mesh, chunk_bytes):
        part = leaf[:, own].requires_grad_(differentiates)
        loss = _token_sum(head.logits(part), chunk_labels, vocabulary, mesh) * scale
        if gradient is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            assert part.grad is not None
            gradient[:, own] = part.grad
        total += loss.detach()
    return total, gradient


def _token_sum(logits: torch.Tensor, labels: torch.Tensor, vocabulary: int, mesh: Mesh | None) -> torch.Tensor:
    """Sum of the tokens' losses; on a mesh over all of its ranks."""
    if mesh is not None:
        return sharded_cross_entropy(
            logits, labels, vocabulary=vocabulary, mesh=mesh, items=1.0, ignore_index=IGNORE_INDEX
        )
    # In float32, as Hugging Face does.
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _chunks(
    hidden: torch.Tensor, labels: torch.Tensor, vocabulary: int, mesh: Mesh | None, chunk_bytes: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of the rank's own positions, with the labels of what the head makes of them.

    On a mesh the head gathers every rank's piece over `sequence`, so the labels are those of s pieces, l apart.
    """
    sequence, spread = (1, 1) if mesh is None else (mesh.size("sequence"), mesh.size("hidden"))
    rows, length, _ = hidden.shape
    position_bytes = 4 * rows * sequence * math.ceil(vocabulary / sequence) / spread
    # The head scatters the gathered positions over `hidden`.
    grain = spread // math.gcd(sequence, spread)
    step = max(1, int(chunk_bytes / position_bytes) // grain) * grain
    by_rank = labels.unflatten(1, (sequence, length))
    for start in range(0, length, step):
        own = slice(start, min(start + step, length))
        yield own, by_rank[:, :, own].flatten(1)
