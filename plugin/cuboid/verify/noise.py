"""Comparison in half precision: a run may deviate from float32 as much as plain half precision does, and no more.

Rounding makes every number wrong by about a percent, so that no fixed tolerance finds a mistake of that size. But plain
transformers in the same precision has the same rounding. So there are three runs from the same weights: plain in
float32, plain in half precision, and Cuboid in half precision. The distance of the third from the first may be that of
the second from the first, times a factor for chance.

Distances hide scale errors: with noise of 2 %, a gradient that is 2 % too large is only 1.4 times as far away. But the
noise is spread over all directions, of which the exact tensor is one among thousands, while a scale error is along that
direction. So the component along it is checked separately, as the slope of the regression on the exact tensor, which
noise hardly changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from cuboid.verify.compare import ALL, FACTOR, Check, ComparedKind, kinds_in_order, numbers_of, tensors_of
from cuboid.verify.training import RunOutcome, Tensors

#: A slope may deviate by this many standard deviations.
_DEVIATIONS = 6.0
#: Allowance on the slope of all parameters together, whose rounding errors aren't independent of one another.
_TOGETHER = 1.75
#: Errors within a matrix product are correlated by rows and columns: a slope averages over at most this many
#: independent ones.
_INDEPENDENT = 64
#: Relative errors of a loss and of a norm that always pass in half precision.
_FLOORS: dict[ComparedKind, float] = {"loss": 2.0**-8, "norm": 2.0**-7}
#: A tensor with a larger distance is all noise, as a gradient that is zero in exact arithmetic.
_ALL_NOISE = 0.5


@dataclass(frozen=True)
class Deviation:
    """A tensor's deviation from the exact one.

    Args:
        distance: norm of the difference over the exact norm.
        slope: of the regression on the exact tensor, minus 1.
        weight: square of the exact norm.
        elements: number of elements.
    """

    distance: float
    slope: float
    weight: float
    elements: int

    @classmethod
    def of(cls, exact: torch.Tensor, other: torch.Tensor | None) -> Deviation:
        """Measure it; infinite if the other tensor is missing, has another shape, or a number isn't finite."""
        if other is None or exact.shape != other.shape or not bool(other.isfinite().all() & exact.isfinite().all()):
            return cls(math.inf, math.inf, 0.0, exact.numel())
        exact, difference = exact.double().flatten(), (other.double() - exact.double()).flatten()
        weight = exact.square().sum().item()
        if weight == 0:
            same = not bool(difference.any())
            return cls(0.0 if same else math.inf, 0.0 if same else math.inf, 0.0, exact.numel())
        distance = math.sqrt(difference.square().sum().item() / weight)
        return cls(distance, (difference @ exact).item() / weight, weight, exact.numel())


def compare_noisy(
    exact: RunOutcome,
    plain: RunOutcome,
    other: RunOutcome,
    *,
    kinds: Collection[ComparedKind],
    padding: Sequence[torch.Tensor] = (),
) -> list[Check]:
    """Compare two outcomes in half precision by their distances from an exact one.

    A check's error is a distance; for losses and norms it is the relative error. Gradients and moments have one more
    check each, of kind ``"scale"``, whose error is the slope minus 1. Tolerances follow from plain transformers' errors
    in half precision.

    Args:
        exact: of plain transformers in float32, from weights that half precision can hold.
        plain: of plain transformers in half precision.
        other: of Cuboid in half precision.
        kinds, padding: see :func:`cuboid.verify.compare.compare`.
    """
    checks: list[Check] = []
    for kind in kinds_in_order(kinds):
        if kind in _FLOORS:
            checks += _compare_numbers(kind, *(numbers_of(outcome, kind) for outcome in (exact, plain, other)))
        theirs = tensors_of(kind, exact, plain, padding)
        ours = tensors_of(kind, exact, other, padding)
        for (step, tensors, noisy), (_, shared, sharded) in zip(theirs, ours, strict=True):
            # Tensors that couldn't be assembled from their shards aren't compared; surplus tensors fail.
            checks += _compare_distances(kind, {name: tensors[name] for name in shared}, noisy, sharded, step)
            checks += [Check(kind, name, math.inf, 0.0, 0.0, step) for name in sharded if name not in tensors]
            if kind in ("gradient", "moment"):
                checks += _compare_slopes(tensors, noisy, sharded, step)
    return checks


def _compare_numbers(kind: ComparedKind, exact: list[float], plain: list[float], other: list[float]) -> Iterator[Check]:
    errors = [abs(noisy / true - 1) if true else abs(noisy) for true, noisy in zip(exact, plain, strict=True)]
    typical = math.sqrt(sum(error**2 for error in errors) / len(errors))
    tolerance = max(_DEVIATIONS * typical, _FLOORS[kind])
    for step, (true, number) in enumerate(zip(exact, other, strict=True), start=1):
        error = abs(number / true - 1) if true else abs(number)
        yield Check(kind, f"step {step}", error if math.isfinite(error) else math.inf, abs(true), tolerance)


def _compare_distances(
    kind: ComparedKind, exact: Tensors, plain: Tensors, other: Tensors, step: int | None
) -> Iterator[Check]:
    noise = _noise(exact, plain)
    for name, tensor in exact.items():
        deviation = Deviation.of(tensor, other.get(name))
        # The fewer elements, the larger the role of chance.
        factor = FACTOR * (1 + 2 / math.sqrt(max(deviation.elements, 1)))
        magnitude = tensor.abs().max().item() if tensor.numel() else 0.0
        yield Check(kind, name, deviation.distance, magnitude, factor * noise[name], step)


def _compare_slopes(exact: Tensors, plain: Tensors, other: Tensors, step: int | None) -> Iterator[Check]:
    noise = _noise(exact, plain)
    deviations = {name: Deviation.of(tensor, other.get(name)) for name, tensor in exact.items()}
    total = sum(deviation.weight for deviation in deviations.values()) or 1.0
    shares: list[float] = []
    for name, deviation in deviations.items():
        tolerance = _DEVIATIONS * noise[name] / math.sqrt(max(1, min(deviation.elements, _INDEPENDENT)))
        shares.append(deviation.weight / total * tolerance)
        if noise[name] < _ALL_NOISE or not math.isfinite(deviation.slope):
            yield Check("scale", name, abs(deviation.slope), math.sqrt(deviation.weight), tolerance, step)
    slope = abs(
        sum(deviation.weight * deviation.slope for deviation in deviations.values() if deviation.weight) / total
    )
    tolerance = min(_TOGETHER * math.hypot(*shares), sum(shares))
    yield Check("scale", ALL, slope, math.sqrt(total), tolerance, step)


def _noise(exact: Tensors, plain: Tensors) -> dict[str, float]:
    """Distances of plain half precision; at least their median, since a small one may be luck."""
    distances = {name: Deviation.of(tensor, plain.get(name)).distance for name, tensor in exact.items()}
    middle = sorted(distances.values())[len(distances) // 2] if distances else 0.0
    # If plain half precision isn't finite, no tolerance can be derived: the check passes only with no error at all.
    return {name: max(distance, middle) if math.isfinite(distance) else 0.0 for name, distance in distances.items()}
