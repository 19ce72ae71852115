"""Compare two outcomes tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, get_args

import torch

from cuboid.models.certification.trials import magnitude, relative_error, tensor_errors
from cuboid.verify.training import RunOutcome, Tensors

ComparedKind = Literal[
    "activation", "logits", "loss", "gradient", "scale", "norm", "moment", "weight", "dropout", "sum", "resume"
]  # fmt: skip
#: Kinds that are checked on the sharded side alone.
OWN: tuple[ComparedKind, ...] = ("dropout", "sum", "resume")
#: Kinds that both sides produce. A ``"scale"`` check is derived from gradients or moments.
KINDS: tuple[ComparedKind, ...] = tuple(kind for kind in get_args(ComparedKind) if kind not in ("scale", *OWN))

#: Name of a check on all parameters.
ALL = "all parameters together"

#: Up to how many epsilons of the largest value of a kind a tensor is only rounding noise; see :func:`tensor_errors`.
_NOISE = 16

#: An error may be this many times that of plain transformers in the same precision.
FACTOR = 3.0
#: Rounding in float32 explains no larger error. Where plain transformers' own is larger, another expert was chosen.
_LARGEST_ROUNDING = 1e-3


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        kind: what is compared.
        name: the module, the parameter, or the step.
        error: largest absolute difference over largest absolute value; infinite if one side lacks the tensor, or has
            another shape or a number that isn't finite. :mod:`cuboid.verify.noise` uses other measures.
        magnitude: largest absolute value in plain transformers.
        tolerance: the largest error that passes.
        step: of the optimizer, from 1, for gradients.
    """

    kind: ComparedKind
    name: str
    error: float
    magnitude: float
    tolerance: float
    step: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is finite and within tolerance."""
        return math.isfinite(self.error) and self.error <= self.tolerance


def compare(
    reference: RunOutcome,
    other: RunOutcome,
    tolerance: float,
    *,
    kinds: Collection[ComparedKind] = KINDS,
    padding: Sequence[torch.Tensor] = (),
) -> list[Check]:
    """Compare two outcomes.

    Args:
        reference: of plain transformers.
        other: of Cuboid.
        tolerance: for every check.
        kinds: what to compare.
        padding: ``[B, S]`` for each length, true where the probed micro-batch has padding; outputs of that length are
            undefined there and ignored.

    Returns:
        The checks, kind by kind in the order of :data:`KINDS`, activations in forward order.
    """
    checks: list[Check] = []
    for kind in kinds_in_order(kinds):
        if kind in ("loss", "norm"):
            checks += _compare_steps(kind, numbers_of(reference, kind), numbers_of(other, kind), tolerance)
        for step, theirs, ours in tensors_of(kind, reference, other, padding):
            checks += _compare_tensors(kind, theirs, ours, tolerance, step)
    return checks


def allow_rounding(checks: Sequence[Check], plain: Sequence[Check]) -> list[Check]:
    """The checks, which pass up to :data:`FACTOR` times plain transformers' own error if that is more than before.

    Args:
        checks: of two outcomes in float32.
        plain: the same checks of plain transformers in float32 against float64.
    """
    rounding = {(check.kind, check.name, check.step): check.error for check in plain if math.isfinite(check.error)}
    allowed = (
        min(FACTOR * rounding.get((check.kind, check.name, check.step), 0.0), _LARGEST_ROUNDING) for check in checks
    )
    return [
        replace(check, tolerance=max(check.tolerance, of_rounding))
        for check, of_rounding in zip(checks, allowed, strict=True)
    ]


def kinds_in_order(kinds: Collection[ComparedKind]) -> list[ComparedKind]:
    """The given kinds, in the order of :data:`KINDS`."""
    return [kind for kind in KINDS if kind in kinds]


def numbers_of(outcome: RunOutcome, kind: ComparedKind) -> list[float]:
    """Losses or norms, by step."""
    return outcome.losses if kind == "loss" else outcome.norms


def tensors_of(
    kind: ComparedKind, reference: RunOutcome, other: RunOutcome, padding: Sequence[torch.Tensor]
) -> Iterator[tuple[int | None, Tensors, Tensors]]:
    """Tensors of a kind on both sides, for each step if there are several; nothing for losses and norms."""
    if kind == "activation":
        # Only outputs that the sharded side could assemble: those sharded as the residual stream is.
        shared = {name: x for name, x in reference.activations.items() if name in other.activations}
        parts = {name: other.activations[name] for name in shared}
        yield None, _zero_padding(shared, padding), _zero_padding(parts, padding)
    elif kind == "logits":
        yield None, _zero_padding(reference.logits, padding), _zero_padding(other.logits, padding)
    elif kind == "gradient":
        missing: Tensors = {}
        both = zip_longest(reference.gradients, other.gradients, fillvalue=missing)
        yield from ((step, theirs, ours) for step, (theirs, ours) in enumerate(both, start=1))
    elif kind == "moment":
        yield None, reference.moments, other.moments
    elif kind == "weight":
        yield None, reference.weights, other.weights


def own_checks(outcome: RunOutcome) -> list[Check]:
    """The checks of the sharded side alone."""
    errors_by_kind = ((kind, outcome.own_checks.get(kind, {})) for kind in OWN)
    return [
        Check(kind, name, error, 1.0, most) for kind, errors in errors_by_kind for name, (error, most) in errors.items()
    ]


def first_difference(checks: Sequence[Check]) -> str | None:
    """Where the two sides begin to differ, as a sentence; None if they don't.

    That is the first module in forward whose output differs. If none does, it is the last parameter, in the model's
    order, whose gradient differs, because backward computes that one first.
    """
    wrong = [check for check in checks if not check.passed]
    if not wrong:
        return None
    first = {check.kind: check for check in reversed(wrong)}
    if "activation" in first:
        return f"forward: the first output that differs is that of {first['activation'].name}"
    if "logits" in first:
        return "forward: the layers agree, the logits don't"
    # Only the first step's: later gradients differ because the weights do by then.
    backward = [check for check in wrong if check.kind in ("gradient", "scale") and check.step in (1, None)]
    first_loss_agrees = next((check.passed for check in checks if check.kind == "loss"), True)
    if backward and first_loss_agrees:
        last = [check for check in backward if check.kind == backward[0].kind][-1]
        if last.name == ALL:
            return "backward: the loss agrees; the gradients are all too long, or too short, by one factor"
        return f"backward: the loss agrees; coming from it, {last.name} has the first gradient that differs"
    step = f" in step {wrong[0].step}" if wrong[0].step else ""
    return f"{wrong[0].kind}: {wrong[0].name}{step} is the first that differs"


def _compare_tensors(
    kind: ComparedKind, reference: Tensors, other: Tensors, tolerance: float, step: int | None
) -> Iterator[Check]:
    for name, error in tensor_errors(reference, other, magnitude, noise=_NOISE).items():
        size = magnitude(reference[name]) if name in reference else 0.0
        # A parameter that no loss depends on has no gradient or moments on one side, and zeros on another.
        is_unused = name not in reference and kind in ("gradient", "moment") and not magnitude(other[name])
        yield Check(kind, name, 0.0 if is_unused else error, size, tolerance, step)


def _compare_steps(kind: ComparedKind, reference: list[float], other: list[float], tolerance: float) -> Iterator[Check]:
    for step, (expected, actual) in enumerate(zip(reference, other, strict=True), start=1):
        error = relative_error(torch.tensor(expected, dtype=torch.float64), torch.tensor(actual, dtype=torch.float64))
        yield Check(kind, f"step {step}", error, abs(expected), tolerance)


def _zero_padding(tensors: Tensors, padding: Sequence[torch.Tensor]) -> Tensors:
    by_shape = {mask.shape: mask for mask in padding}
    masks = {name: by_shape.get(x.shape[:2]) for name, x in tensors.items()}
    return {
        name: x if (mask := masks[name]) is None else x.masked_fill(mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0)
        for name, x in tensors.items()
    }
