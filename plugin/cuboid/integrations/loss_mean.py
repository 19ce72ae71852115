"""The mean loss over the tokens of many batches, however unevenly they are filled, and of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuboid.distributed.collectives import sum_over_ranks


class LossMean:
    """Adds up losses of batches, each a mean over its items: the tokens, or rows, that it counts.

    All ranks of a replica add the same, so that the mean over all ranks is that over all replicas.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, items: Tensor | int) -> None:
        """Add a batch of this replica's: its mean, and the number of items that it is over, both without dims."""
        count = torch.as_tensor(items, dtype=torch.float64, device=self._sums.device)
        # A batch without any has no mean, but NaN.
        weighted = torch.where(count > 0, loss.detach().to(count) * count, 0)
        self._sums += torch.stack([weighted, count])

    def over_ranks(self, others: Sequence[float] = ()) -> tuple[float, list[float]]:
        """The mean over all ranks, NaN if there were no items; and in the same all-reduce, the sums of other numbers.

        Collective over the world.
        """
        weighted, count, *sums = sum_over_ranks([*self._sums.tolist(), *others], self._sums.device)
        return (weighted / count if count else float("nan")), sums
