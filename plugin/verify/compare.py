"""How far two outcomes are apart, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from cuboid.verify.training import Outcome, Tensors

Kind = Literal["activation", "logits", "loss", "gradient", "norm", "weight"]

#: Tensors far smaller than the largest of their kind are rounding noise (a gradient that is zero in exact arithmetic):
#: their errors are taken relative to this share of that largest one.
FLOOR = 1e-6


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        kind: what is compared.
        name: the module, the parameter, or the step.
        error: largest absolute difference over largest absolute value; infinite where one side has no such tensor,
            another shape, or a number that isn't finite.
        magnitude: largest absolute value on the side of plain transformers.
        tolerance: the largest error that passes.
    """

    kind: Kind
    name: str
    error: float
    magnitude: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within tolerance."""
        return self.error <= self.tolerance


def compare(reference: Outcome, other: Outcome, tolerance: float, padding: torch.Tensor | None) -> list[Check]:
    """Compare everything that both outcomes can have.

    Args:
        reference: of plain transformers. Where it has activations, logits or gradients and ``other`` has none at all,
            that kind is left out.
        other: of Cuboid.
        tolerance: for every check.
        padding: ``[B, S]``, true where the probed micro-batch has padding: what a model computes there is nobody's
            business. None where nothing was probed.

    Returns:
        The checks, kind by kind: activations in forward order, logits, losses, gradients, norms, weights.
    """
    checks: list[Check] = []
    if other.activations:
        # Layers whose output is no plain part of the residual stream can't be put together, and aren't compared.
        shared = {name: x for name, x in reference.activations.items() if name in other.activations}
        parts = {name: other.activations[name] for name in shared}
        checks += _compare_tensors("activation", _blank(shared, padding), _blank(parts, padding), tolerance)
    if other.logits:
        checks += _compare_tensors(
            "logits", _blank(reference.logits, padding), _blank(other.logits, padding), tolerance
        )
    checks += _compare_steps("loss", reference.losses, other.losses, tolerance)
    if other.gradients:
        checks += _compare_tensors("gradient", reference.gradients, other.gradients, tolerance)
    checks += _compare_steps("norm", reference.norms, other.norms, tolerance)
    checks += _compare_tensors("weight", reference.weights, other.weights, tolerance)
    return checks


def relative_error(reference: torch.Tensor, other: torch.Tensor, floor: float = 0.0) -> float:
    """Largest absolute difference over largest absolute value of ``reference`` (at least ``floor``)."""
    if reference.shape != other.shape:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    difference = (reference.double() - other.double()).abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    scale = max(_magnitude(reference), floor)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)


def first_difference(checks: Sequence[Check]) -> str | None:
    """Where the two sides part, in a sentence; None if they don't.

    The first module of the forward that differs. Where none does, the last parameter, in the model's order, whose
    gradient differs: backward comes there first.
    """
    wrong = [check for check in checks if not check.passed]
    by_kind = {kind: [check for check in wrong if check.kind == kind] for kind in ("activation", "gradient")}
    if by_kind["activation"]:
        first = by_kind["activation"][0]
        return f"forward: the first output that differs is that of {first.name} (error {first.error:.1e})"
    if any(check.kind == "logits" for check in wrong):
        return "forward: the layers agree, the logits don't"
    if by_kind["gradient"]:
        last = by_kind["gradient"][-1]
        return f"backward: outputs agree; coming from the loss, {last.name} has the first gradient that differs"
    if wrong:
        return f"{wrong[0].kind}: {wrong[0].name} is the first that differs (error {wrong[0].error:.1e})"
    return None


def _compare_tensors(kind: Kind, reference: Tensors, other: Tensors, tolerance: float) -> Iterator[Check]:
    floor = FLOOR * max((_magnitude(tensor) for tensor in reference.values()), default=0.0)
    for name, tensor in reference.items():
        error = relative_error(tensor, other[name], floor) if name in other else math.inf
        yield Check(kind, name, error, _magnitude(tensor), tolerance)
    for name in other:
        if name not in reference:
            yield Check(kind, name, math.inf, 0.0, tolerance)


def _compare_steps(kind: Kind, reference: list[float], other: list[float], tolerance: float) -> Iterator[Check]:
    for step, (ours, theirs) in enumerate(zip(reference, other, strict=True), start=1):
        error = relative_error(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
        yield Check(kind, f"step {step}", error, abs(ours), tolerance)


def _magnitude(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def _blank(tensors: Tensors, padding: torch.Tensor | None) -> Tensors:
    if padding is None:
        return tensors
    return {name: x.masked_fill(padding.unsqueeze(-1), 0) for name, x in tensors.items()}
