"""A loss that a script computes from what the last stage's head says, and whose derivatives a pipeline then trains.

A micro-batch's loss may be any function of the log-probabilities of its label tokens, or of the outputs that a head has
for its rows. A forward of its own gives these values; the script's code computes the loss and its derivatives by them;
and the units of the step train the sum of the same values times their derivatives, which has the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cuboid.distributed.axis_collectives import own_slice, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.stages.units import SegmentedBatch

#: How far what a step computes may be from what its derivatives were taken at, relative to the sum of magnitudes.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class GivenLoss:
    """The loss of one micro-batch.

    Args:
        loss: its value, a scalar.
        values: by which it was differentiated: ``[B, S]`` log-probabilities of what each position predicts, or
            ``[B, outputs]``.
        gradient: its derivatives, of the same shape.
    """

    loss: torch.Tensor
    values: torch.Tensor
    gradient: torch.Tensor

    def weigh(self, batch: SegmentedBatch, mesh: Mesh) -> None:
        """Have the last stage train this loss of a micro-batch."""
        assert batch.local is not None
        weights = self.gradient.to(batch.ids.device)
        if batch.labels is None:
            batch.weights = weights
            return
        # The head computes negative log-probabilities. Rows and positions that pad have no labels.
        rows, length = weights.shape
        more = padded_length(rows, mesh.size("batch")) - rows
        padded = nn.functional.pad(-weights, (0, batch.bounds[-1] - length, 0, more))
        batch.weights = own_slice(padded, 0, mesh.along("batch"))

    @property
    def sums(self) -> torch.Tensor:
        """The loss, what the units are to compute, and the sum of the magnitudes of its terms."""
        terms = (self.values * self.gradient).double()
        return torch.stack([self.loss.detach().double(), terms.sum(), terms.abs().sum()])


def check_same_values(expected: torch.Tensor, actual: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Check that the units of a step computed what the losses were differentiated at. All ranks give the same.

    Raises:
        CuboidError: they didn't.
    """
    if abs(float(actual - expected)) > _TOLERANCE * float(magnitude):
        raise CuboidError(
            "compute_loss was given other outputs of the model than the pipeline then trained: "
            f"{float(actual):.6g} in place of {float(expected):.6g}; the model must compute the same twice, so switch "
            "off dropout and whatever else draws random numbers"
        )


def total_sums(losses: Sequence[GivenLoss]) -> torch.Tensor:
    """:attr:`GivenLoss.sums` of all micro-batches of a replica."""
    return torch.stack([one.sums for one in losses]).sum(0)
