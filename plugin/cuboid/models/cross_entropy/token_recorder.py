"""Records what the last stage's head says of each label token, for scripts that report or compute with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

from cuboid.distributed.axis_collectives import gather_dim
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.vocab_cross_entropy import TOKEN_VALUES, gather_rows, token_values


class TokenRecorder:
    """Values of the label tokens of a step's micro-batches, on the mesh that has the head.

    Logits exist for one chunk of one segment at a time, so the values are taken there, and put together afterwards.

    Args:
        mesh: that the head is sharded over; perhaps of one rank.
        vocabulary: V, without padding.
    """

    def __init__(self, mesh: Mesh, vocabulary: int) -> None:
        self._mesh, self._vocabulary = mesh, vocabulary
        #: By micro-batch: the values of each segment's chunks, ``[5, B/b, S/h]``.
        self._chunks: dict[int, list[list[torch.Tensor]]] = defaultdict(list)

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """The shape of a micro-batch's values."""
        return len(TOKEN_VALUES), rows, length

    def of_segment(self, micro_batch: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Begin a micro-batch's next segment; returns its ``ChunkedCrossEntropy.observe``."""
        chunks: list[torch.Tensor] = []
        self._chunks[micro_batch].append(chunks)
        return partial(self._add, chunks)

    def _add(self, chunks: list[torch.Tensor], logits: torch.Tensor, labels: torch.Tensor) -> None:
        chunks.append(token_values(logits, labels, vocabulary=self._vocabulary, mesh=self._mesh))

    def whole(self, micro_batch: int, *, rows: int, length: int) -> torch.Tensor:
        """The values of a whole micro-batch, ``[5, B, S]`` in the order of ``TOKEN_VALUES``; collective over the mesh.

        Args:
            micro_batch: its index in the step. All of its segments have run.
            rows: B, without padding.
            length: S, without padding.
        """
        segments = [self._joined(chunks) for chunks in self._chunks.pop(micro_batch)]
        values = torch.cat(segments, dim=2)[..., :length]
        # [B/b, 5, S], whose rows are the ranks' along `batch`.
        return gather_rows(values.transpose(0, 1).contiguous(), self._mesh, rows=rows).transpose(0, 1)

    def _joined(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """A segment's values ``[3, B/b, L]`` in the order of its positions, from those of its chunks."""
        sequence, along = self._mesh.size("sequence"), self._mesh.along("hidden")
        # A chunk has a slice of each rank's positions along `sequence`, which `hidden` cuts.
        by_rank = [gather_dim(chunk, 2, along).unflatten(2, (sequence, -1)) for chunk in chunks]
        return torch.cat(by_rank, dim=3).flatten(2)
