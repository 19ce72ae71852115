"""All contestants must compute what plain Hugging Face does, before anything is timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from network.layer_measuring import TIMEOUT_S, Record
from network.ranks import Ranks

from cuboid.errors import CuboidError
from whole_step.entries import Entry
from whole_step.rank import FirstSteps
from whole_step.workload import Reference


@dataclass(frozen=True)
class Tolerance:
    """How far a contestant may be from one process in float64, relatively.

    Args:
        loss: of both losses.
        norm: of the gradient norm.
    """

    loss: float
    norm: float


#: A norm is a sum of millions of squares, which frameworks add up in float32.
AGREEMENT = {"float32": Tolerance(1e-5, 5e-5), "bfloat16": Tolerance(0.02, 0.02)}


@dataclass(frozen=True)
class Checked:
    """A contestant that computes the right thing.

    Args:
        entry: who.
        losses: of the global batch, before and after a step.
        gradient_norm: of that step.
        record: of its steps.
    """

    entry: Entry
    losses: tuple[float, float]
    gradient_norm: float
    record: Record


def prepare(ranks: Ranks, entries: Sequence[Entry], reference: Reference, dtype: str) -> list[Checked]:
    """Build every contestant and compare its first steps with the reference.

    Raises:
        CuboidError: one computes something else.
    """
    checked = []
    for entry in entries:
        told: list[FirstSteps] = ranks.call("prepare", entry, timeout_s=TIMEOUT_S)
        checked.append(check(entry, told, reference, AGREEMENT[dtype]))
    return checked


def check(entry: Entry, told: Sequence[FirstSteps], reference: Reference, tolerance: Tolerance) -> Checked:
    """Compare what all ranks tell with the reference; each replica has as many ranks and rows as any other, so that
    the mean of the ranks' losses is that of the batch.

    Raises:
        CuboidError: it differs, on any rank.
    """
    first, second = (statistics.fmean(rank.losses[number] for rank in told) for number in range(2))
    norms = [rank.gradient_norm for rank in told]
    found = [
        _Value("the first loss", first, reference.losses[0], tolerance.loss),
        _Value("the loss after a step", second, reference.losses[1], tolerance.loss),
        *(
            _Value(f"the gradient norm on rank {rank}", norm, reference.gradient_norm, tolerance.norm)
            for rank, norm in enumerate(norms)
        ),
    ]
    for value in found:
        if value.error > value.allowed:
            raise CuboidError(
                f"{entry.name} doesn't compute what plain Hugging Face does: {value.what} is {value.found:.7g} instead "
                f"of {value.right:.7g}, {value.error:.1e} away, where {value.allowed:g} is allowed"
            )
    return Checked(entry, (first, second), norms[0], Record(entry.key, entry.name, max(v.error for v in found)))


@dataclass(frozen=True)
class _Value:
    what: str
    found: float
    right: float
    allowed: float

    @property
    def error(self) -> float:
        """Relative; infinite for what isn't a number."""
        return abs(self.found / self.right - 1) if math.isfinite(self.found) else math.inf
