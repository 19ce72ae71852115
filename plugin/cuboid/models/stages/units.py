"""A micro-batch on one rank: this rank's part of it, where its segments lie, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.attention.segments import Unit, prepare_masks, visible_to_all
from cuboid.models.attention.whole_sequence import Replay, WholeSequence
from cuboid.models.batch.batch import IGNORE_INDEX, take_local_batch
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted


def with_shifted_labels(batch: MicroBatch, *, shifts: bool = True) -> MicroBatch:
    """The same micro-batch with ``shift_labels`` in place of ``labels``.

    They are shifted before the sequence is cut, or each segment would lose the label of its last token.

    Args:
        batch: as the user gave it.
        shifts: whether the model's own loss compares positions with the label after them. Masked language models, and
            some decoders of encoder-decoders, compare them with their own, and labels stay as they are.

    Raises:
        CuboidError: it has neither.
    """
    rest = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if "shift_labels" in rest:
        return rest
    if "labels" not in batch:
        raise CuboidError("a pipeline's micro-batch needs labels; add labels: input_ids, with -100 for padding")
    return {**rest, "shift_labels": shifted(batch["labels"], IGNORE_INDEX) if shifts else batch["labels"]}


def label_tokens(batch: MicroBatch) -> torch.Tensor:
    """Tokens of a whole micro-batch with shifted labels that have a loss, a tensor of no dims."""
    return (batch["shift_labels"] != IGNORE_INDEX).sum()


@dataclass
class SegmentedBatch:
    """One micro-batch as this rank sees it.

    Args:
        ids, positions: ``[B/b, S']``, or ``[1, S']`` for positions that all rows share.
        labels: ``[B/b, S']``: entry t is what position t predicts, for causal models the token after t.
        bounds: start of each segment, and the end of the last, in 0 … S'.
        attention_mask, packed: see :func:`cuboid.models.attention.segments.prepare_masks`.
        visible: see :func:`cuboid.models.attention.segments.visible_to_all`.
        length: S, without what was filled up.
        given: ``position_ids`` and ``attention_mask`` ``[B/b, S']``, where the user gave them.
        whole: what the rank's base model made of the whole sequence; None until that is known, or where it needn't be.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    bounds: tuple[int, ...]
    attention_mask: torch.Tensor | None
    packed: torch.Tensor | None
    visible: int
    length: int
    given: dict[str, torch.Tensor]
    whole: WholeSequence | None = None

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        lengths: Sequence[int],
        config: PretrainedConfig,
        mesh: Mesh,
        *,
        is_causal: bool = True,
    ) -> SegmentedBatch:
        """Take this rank's rows of a whole micro-batch with shifted labels; fill them up to the sum of ``lengths``.

        Args:
            batch: see :func:`with_shifted_labels`.
            lengths: of the segments.
            config: of the model.
            mesh: of this rank.
            is_causal: whether no position sees later ones.

        Raises:
            CuboidError: the mesh's batch axis doesn't divide the rows.
        """
        taken = take_local_batch(dict(batch), config, mesh, at_least=sum(lengths))
        local = taken.tensors
        attention_mask, packed = prepare_masks(
            local.get("attention_mask"),
            local["position_ids"][:, : taken.length] if "position_ids" in batch else None,
            local["input_ids"].shape[1],
            local["shift_labels"],
            is_causal=is_causal,
        )
        return cls(
            ids=local["input_ids"],
            positions=local["position_ids"],
            labels=local["shift_labels"],
            bounds=tuple(accumulate(lengths, initial=0)),
            attention_mask=attention_mask,
            packed=packed,
            visible=visible_to_all(attention_mask),
            length=taken.length,
            given={name: local[name] for name in ("position_ids", "attention_mask") if name in batch},
        )

    @property
    def is_cut(self) -> bool:
        """Whether there are several segments, or filled up positions, so that no forward sees just the sequence."""
        return len(self.bounds) > 2 or self.bounds[-1] != self.length

    def segment_length(self, segment: int) -> int:
        """L of a segment, over all ranks of the mesh's `sequence` axis."""
        return self.bounds[segment + 1] - self.bounds[segment]

    def unit(self, segment: int, store: KVCache) -> Unit:
        """What attention must know of a segment, on the stage whose keys and values are in ``store``."""
        start, stop = self.bounds[segment : segment + 2]
        replay = None if self.whole is None else Replay(self.whole, start, stop)
        return Unit(store, start, stop, self.bounds[-1], self.attention_mask, self.packed, replay, visible=self.visible)

    def token_weights(self, segment: int, mesh: Mesh) -> torch.Tensor:
        """0 for padding and 1 for all else: ``[B/b · L/s]`` for the rank's tokens of a segment."""
        start, stop = self.bounds[segment : segment + 2]
        weights = torch.arange(start, stop, device=self.ids.device) < self.length
        mask = self.given.get("attention_mask")
        weights = weights.expand(len(self.ids), -1) if mask is None else weights * self.cut(mask, segment)
        return own_slice(weights, 1, mesh.along("sequence")).flatten()

    def cut(self, tensor: torch.Tensor, segment: int) -> torch.Tensor:
        """A segment's part of ``[B/b, S']``."""
        return tensor[:, self.bounds[segment] : self.bounds[segment + 1]]
