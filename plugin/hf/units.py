"""A micro-batch on one stage: this rank's part of it, where its segments lie, and what they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from transformers import PretrainedConfig

from cuboid.hf.batch import IGNORE_INDEX, take_local_batch
from cuboid.hf.feed import MicroBatch
from cuboid.hf.segments import Unit, prepare_masks
from cuboid.mesh import Mesh
from cuboid.seq1f1b.store import KeyValueStore
from cuboid.tensor3d.loss import shifted


def granule(mesh: Mesh) -> int:
    """What the length of a segment must be a multiple of."""
    return math.lcm(mesh.size("sequence"), mesh.size("hidden"))


def label_tokens(batch: MicroBatch) -> int:
    """Tokens of a whole micro-batch that have a loss."""
    labels = _shifted_labels(batch)
    return 0 if labels is None else int((labels != IGNORE_INDEX).sum())


def _shifted_labels(batch: MicroBatch) -> torch.Tensor | None:
    # Shifted before the sequence is cut, or each segment would lose the label of its last token.
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return shifted(batch["labels"], IGNORE_INDEX) if "labels" in batch else None


@dataclass
class SegmentedBatch:
    """One micro-batch as this rank sees it.

    Args:
        ids, positions: ``[B/b, S']``, or ``[1, S']`` for positions that all rows share.
        labels: ``[B/b, S']``, shifted: entry t is the token after t.
        bounds: start of each segment, and the end of the last, in 0 … S'.
        store: keys and values of this stage's layers.
        attention_mask, packed: see :func:`cuboid.hf.segments.prepare_masks`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor | None
    bounds: tuple[int, ...]
    store: KeyValueStore
    attention_mask: torch.Tensor | None
    packed: torch.Tensor | None

    @classmethod
    def of(
        cls, batch: MicroBatch, lengths: Sequence[int], store: KeyValueStore, config: PretrainedConfig, mesh: Mesh
    ) -> SegmentedBatch:
        """Take this rank's rows of a whole micro-batch and fill them up to the sum of ``lengths``.

        Raises:
            CuboidError: the mesh's batch axis doesn't divide the rows.
        """
        labels = _shifted_labels(batch)
        given = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
        if labels is not None:
            given["shift_labels"] = labels
        local = take_local_batch(given, config, mesh, at_least=sum(lengths)).tensors
        attention_mask, packed = prepare_masks(
            local.get("attention_mask"),
            local["position_ids"] if "position_ids" in batch else None,
            local["input_ids"].shape[1],
            local.get("shift_labels"),
        )
        return cls(
            ids=local["input_ids"],
            positions=local["position_ids"],
            labels=local.get("shift_labels"),
            bounds=tuple(accumulate(lengths, initial=0)),
            store=store,
            attention_mask=attention_mask,
            packed=packed,
        )

    def length(self, segment: int) -> int:
        """L of a segment, over all ranks of the mesh's `sequence` axis."""
        return self.bounds[segment + 1] - self.bounds[segment]

    def unit(self, segment: int) -> Unit:
        """What attention must know of a segment."""
        start, stop = list(pairwise(self.bounds))[segment]
        return Unit(self.store, start, stop, self.bounds[-1], self.attention_mask, self.packed)

    def cut(self, tensor: torch.Tensor, segment: int) -> torch.Tensor:
        """A segment's part of ``[B/b, S']``."""
        return tensor[:, self.bounds[segment] : self.bounds[segment + 1]]
