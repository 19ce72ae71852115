"""A micro-batch on one rank: this rank's rows, the bounds of its segments, and what the segments share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.models.architectures.certificate import Inputs
from cuboid.models.attention.forward_context import Unit
from cuboid.models.attention.segments import prepare_masks, visible_to_all
from cuboid.models.attention.whole_sequence import Replay, WholeSequence
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.local_batch import TOKEN_TYPES, LocalBatch, take_local_batch
from cuboid.models.kinds.model_kind import TARGETS, ModelKind
from cuboid.seq1f1b.attention.kv_cache import KVCache


@dataclass
class SegmentedBatch:
    """One micro-batch as this rank sees it, with sequences padded from S to S' positions.

    Args:
        ids, positions: ``[B/b, S']``, or ``[1, S']`` for positions that all rows share.
        labels: ``[B/b, S']``: entry t is what position t predicts, for causal models the token after t. None if the
            model's own forward computes the loss from ``arguments``.
        bounds: start of each segment, and the end of the last, in 0 … S'.
        attention_mask, packed: see :func:`cuboid.models.attention.segments.prepare_masks`.
        visible: see :func:`cuboid.models.attention.segments.visible_to_all`.
        length: S, without padding.
        optional_inputs: ``position_ids``, ``attention_mask`` and ``token_type_ids`` ``[B/b, S']``, those that the user
            gave.
        arguments: the whole micro-batch, for a model whose own forward computes the loss.
        items: number of tokens or rows that this loss is the mean of.
        local: this rank's part, as a sharded model's forward takes it.
        whole_sequence: what the rank's base model computed for it; None until recorded, or if not needed.
        weights: of a loss that a script computes: ``[B/b, S']`` of the labels' losses, or ``[B, outputs]`` of the
            outputs of a head that labels rows. None for the model's own loss.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor | None
    bounds: tuple[int, ...]
    attention_mask: torch.Tensor | None
    packed: torch.Tensor | None
    visible: int
    length: int
    optional_inputs: dict[str, torch.Tensor]
    arguments: MicroBatch = field(default_factory=dict)
    items: int = 0
    local: LocalBatch | None = None
    whole_sequence: WholeSequence | None = None
    weights: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        lengths: Sequence[int],
        config: PretrainedConfig,
        mesh: Mesh,
        kind: ModelKind,
        inputs: Inputs = "embeddings",
    ) -> SegmentedBatch:
        """Take this rank's rows of a whole micro-batch, and pad them to the sum of the segments' ``lengths``.

        If the mesh's `batch` axis doesn't divide the rows, copies of the last row without labels are added.

        Raises:
            CuboidError: shapes that contradict each other.
        """
        runs_own_head = kind.runs_own_head
        tensors = {name: x for name, x in batch.items() if not runs_own_head or name not in TARGETS}
        types = (TOKEN_TYPES,) if TOKEN_TYPES in batch else ()
        taken = take_local_batch(tensors, config, mesh, at_least=sum(lengths), inputs=inputs, types=types)
        local = taken.tensors
        length = local["input_ids"].shape[1]
        attention_mask, packed = prepare_masks(
            local.get("attention_mask"),
            local["position_ids"][:, : taken.length] if "position_ids" in batch else None,
            length,
            local.get("shift_labels"),
            is_causal=kind.is_causal,
        )
        return cls(
            ids=local["input_ids"],
            # Models that compute positions themselves run whole sequences and are given none; the zeros are unused.
            positions=local.get("position_ids", local["input_ids"].new_zeros((1, length))),
            labels=local.get("shift_labels"),
            bounds=tuple(accumulate(lengths, initial=0)),
            attention_mask=attention_mask,
            packed=packed,
            visible=visible_to_all(attention_mask),
            length=taken.length,
            optional_inputs={
                name: local[name] for name in ("position_ids", "attention_mask", TOKEN_TYPES) if name in batch
            },
            arguments=batch if runs_own_head else {},
            items=int(kind.items(batch)) if runs_own_head else 0,
            local=taken,
        )

    @property
    def is_cut(self) -> bool:
        """Whether there are several segments or padded positions, so that no forward sees exactly the sequence."""
        return len(self.bounds) > 2 or self.bounds[-1] != self.length

    def ends_with(self, segment: int) -> bool:
        """Whether a segment is the last one."""
        return segment == len(self.bounds) - 2

    def whole_inputs(self) -> dict[str, torch.Tensor]:
        """The arguments, besides ids, of a base model on a mesh for whole sequences."""
        assert self.local is not None
        inputs = ("position_ids", "attention_mask", TOKEN_TYPES)
        return {name: x for name, x in self.local.tensors.items() if name in inputs}

    def segment_length(self, segment: int) -> int:
        """L, the positions of a segment over all ranks of the mesh's `sequence` axis."""
        return self.bounds[segment + 1] - self.bounds[segment]

    def unit(self, segment: int, store: KVCache) -> Unit:
        """The :class:`Unit` of a segment for attention, on the stage whose KV cache is ``store``."""
        start, stop = self.bounds[segment : segment + 2]
        replay = None if self.whole_sequence is None else Replay(self.whole_sequence, start, stop)
        return Unit(store, start, stop, self.bounds[-1], self.attention_mask, self.packed, replay, visible=self.visible)

    def token_weights(self, segment: int, mesh: Mesh) -> torch.Tensor:
        """``[B/b · L/s]`` weights of the rank's tokens in a segment: 0 for padded positions and rows, else 1."""
        assert self.local is not None
        start, stop = self.bounds[segment : segment + 2]
        positions = torch.arange(start, stop, device=self.ids.device) < self.length
        # Copies of the last row, which make the number of rows divisible, have no labels, but are routed all the same.
        count, first = len(self.ids), mesh.along("batch").index * len(self.ids)
        rows = torch.arange(first, first + count, device=self.ids.device) < self.local.rows
        weights = rows[:, None] & positions
        mask = self.optional_inputs.get("attention_mask")
        weights = weights if mask is None else weights * self.cut(mask, segment)
        return own_slice(weights, 1, mesh.along("sequence")).flatten()

    def cut(self, tensor: torch.Tensor, segment: int) -> torch.Tensor:
        """A segment's part ``[B/b, L]`` of ``[B/b, S']``."""
        return tensor[:, self.bounds[segment] : self.bounds[segment + 1]]
