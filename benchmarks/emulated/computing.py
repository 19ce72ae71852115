"""What a stage really computes, and the sleep that stands for what a real one would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from network.rate import sleep_until
from torch import nn

from cuboid.seq1f1b.schedule.actions import Action
from emulated.work import Work


class Sleeper:
    """Makes units take as long as they should.

    Args:
        duration_s: of a unit's forward or backward.
    """

    def __init__(self, duration_s: Callable[[Action], float]) -> None:
        self._duration_s = duration_s

    @contextmanager
    def unit(self, action: Action) -> Iterator[None]:
        """Compute inside; the rest of the unit's time is slept."""
        end_s = time.perf_counter() + self._duration_s(action)
        yield
        sleep_until(end_s)


class Gradients(NamedTuple):
    """Of a segment's hidden states ``[1, L, W]``, of the sum before it ``[1, 1, W]``, and of the parameters ``[W]``."""

    given: torch.Tensor
    before: torch.Tensor
    weight: torch.Tensor
    mix: torch.Tensor


class Parameters(nn.Module):
    """A stage's parameters, ``[W]`` each, and its arithmetic on hidden states ``[1, L, W]`` of a segment.

    ``before`` and ``after``, ``[1, 1, W]``, are for a segment what keys and values and their gradients are in
    attention: the sum of all hidden states of earlier segments, and the gradient of the sum up to here from later ones.
    """

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        weight, mix = work.parameters(stage)
        self.weight, self.mix = nn.Parameter(weight), nn.Parameter(mix)
        self._length = work.length

    def run_forward(self, given: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the next stage, and the sums up to each token."""
        sums = given.cumsum(dim=1)
        if before is not None:
            sums = sums + before
        return self.weight * given + (self.mix / self._length) * sums, sums

    def run_backward(
        self, gradient: torch.Tensor, after: torch.Tensor | None, given: torch.Tensor, sums: torch.Tensor
    ) -> Gradients:
        """Gradients, from that of :meth:`run_forward`'s hidden states."""
        through = (gradient * (self.mix / self._length)).flip(1).cumsum(dim=1).flip(1)
        if after is not None:
            through = through + after
        return Gradients(
            given=self.weight * gradient + through,
            before=through[:, :1].clone(),
            weight=(gradient * given).sum(dim=(0, 1)),
            mix=(gradient * sums).sum(dim=(0, 1)) / self._length,
        )
