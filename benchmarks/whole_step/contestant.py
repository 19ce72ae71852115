"""What a rank needs to know of a contestant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Outcome:
    """Of one training step.

    Args:
        loss: mean over the rows that this rank was given, before the step.
        gradient_norm: of the whole gradient, before clipping; None where it wasn't asked for and the framework keeps
            it to itself.
    """

    loss: torch.Tensor
    gradient_norm: torch.Tensor | float | None


class Contestant(Protocol):
    """The model on this rank, with its optimizer. All ranks call its methods together."""

    def step(self, *, tell_norm: bool = False) -> Outcome:
        """Forward, backward, clipping and AdamW on the global batch.

        Args:
            tell_norm: whether the gradient norm is wanted even where that takes more work.
        """

    def sent(self) -> tuple[int, dict[str, int]]:
        """Bytes that this rank sent in the last step by the framework's own counter, and its collectives by axes;
        nothing where the framework doesn't count."""
