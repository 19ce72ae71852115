"""How far two outcomes are apart, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from cuboid.verify.training import Outcome, Tensors

Kind = Literal["activation", "logits", "loss", "gradient", "norm", "weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)

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


def compare(
    reference: Outcome,
    other: Outcome,
    tolerance: float,
    *,
    kinds: Collection[Kind] = KINDS,
    padding: torch.Tensor | None = None,
) -> list[Check]:
    """Compare two outcomes.

    Args:
        reference: of plain transformers.
        other: of Cuboid.
        tolerance: for every check.
        kinds: what to compare.
        padding: ``[B, S]``, true where the probed micro-batch has padding: what a model computes there is nobody's
            business.

    Returns:
        The checks, kind by kind in the order of :data:`KINDS`, activations in forward order.
    """
    # Outputs that are no plain part of the residual stream can't be put together.
    shared = {name: x for name, x in reference.activations.items() if name in other.activations}
    parts = {name: other.activations[name] for name in shared}
    checks: dict[Kind, Iterable[Check]] = {
        "activation": _compare_tensors("activation", _blank(shared, padding), _blank(parts, padding), tolerance),
        "logits": _compare_tensors(
            "logits", _blank(reference.logits, padding), _blank(other.logits, padding), tolerance
        ),
        "loss": _compare_steps("loss", reference.losses, other.losses, tolerance),
        "gradient": _compare_tensors("gradient", reference.gradients, other.gradients, tolerance),
        "norm": _compare_steps("norm", reference.norms, other.norms, tolerance),
        "weight": _compare_tensors("weight", reference.weights, other.weights, tolerance),
    }
    return [check for kind in KINDS if kind in kinds for check in checks[kind]]


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

    That is the first module of the forward whose output differs. Where none does, it is the last parameter, in the
    model's order, whose gradient differs: backward comes there first.
    """
    wrong = [check for check in checks if not check.passed]
    if not wrong:
        return None
    first = {check.kind: check for check in reversed(wrong)}
    if "activation" in first:
        return f"forward: the first output that differs is that of {first['activation'].name}"
    if "logits" in first:
        return "forward: the layers agree, the logits don't"
    if "gradient" in first and not _first_loss_differs(checks):
        last = [check for check in wrong if check.kind == "gradient"][-1]
        return f"backward: the loss agrees; coming from it, {last.name} has the first gradient that differs"
    return f"{wrong[0].kind}: {wrong[0].name} is the first that differs"


def _first_loss_differs(checks: Sequence[Check]) -> bool:
    return not next((check.passed for check in checks if check.kind == "loss"), True)


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
