"""Records what the last stage's head says of each row, for scripts that report or compute with it."""

from __future__ import annotations

import torch


class ScoreRecorder:
    """The ``outputs`` numbers of a head that labels whole rows, of a step's micro-batches; all ranks of the mesh have
    them whole.
    """

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._scores: dict[int, torch.Tensor] = {}

    def shape(self, rows: int, length: int) -> tuple[int, ...]:  # noqa: ARG002
        """The shape of a micro-batch's values."""
        return rows, self._outputs

    def add(self, micro_batch: int, scores: torch.Tensor) -> None:
        """Record a micro-batch's outputs ``[B, outputs]``."""
        self._scores[micro_batch] = scores.detach()

    def whole(self, micro_batch: int, *, rows: int, length: int) -> torch.Tensor:  # noqa: ARG002
        """The outputs ``[B, outputs]`` of a micro-batch of the step, which has run."""
        return self._scores.pop(micro_batch)
