"""What verdicts rest on: the micro-batches of a small model, what it computes itself, and comparisons with that.

:mod:`cuboid.verify` compares by :func:`tensor_errors` too. It compares more, in processes and by checkpoints, and by a
tensor's largest element, where a verdict has the norm: an error in one element has to be seen there, but doesn't decide
whether an architecture is right. There, what a side lacks is an error, and what is mere rounding noise isn't.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.errors import CuboidError
from cuboid.models.architectures.certificate import LABELLED, BatchKind
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import LONGEST, Case, cases
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.probe_rows import CannotProbe

#: Tensors far smaller than the largest of their kind are rounding noise (such as a gradient that is zero in exact
#: arithmetic): their errors are relative to at least this fraction of the largest one.
LEAST_SHARE = 1e-6
#: What the rows of a micro-batch are.
Cases = tuple[tuple[BatchKind, Case], ...]
#: Of a micro-batch and what is expected of it, the largest error of a side and where it is. It may raise.
SideError = Callable[[MicroBatch, "ProbeOutcome"], tuple[float, str]]


@dataclass(frozen=True)
class Attempt:
    """The precision of a comparison.

    Parts that models cast to float32 on purpose hide small differences, but some models don't run without the casts.

    Args:
        dtype: of the weights.
        precision: makes the context to compute in.
        tolerance: the largest relative error that passes.
        default: torch's default dtype, in which models create tensors of their own.
    """

    dtype: torch.dtype
    precision: Callable[[], AbstractContextManager[Any]]
    tolerance: float
    default: torch.dtype = torch.float32


ATTEMPTS = (
    Attempt(torch.float64, KeepFloat64, 1e-8),
    # XGLM's attention makes float64's smallest number in the default dtype, which can't hold it.
    Attempt(torch.float64, KeepFloat64, 1e-8, default=torch.float64),
    Attempt(torch.float64, nullcontext, 1e-4),
    Attempt(torch.float32, nullcontext, 1e-3),
)


@dataclass
class ProbeOutcome:
    """The result of a step.

    Args:
        loss, gradients: of the step.
        shifts_labels: whether the model's own loss compares each position with the next label, or with its own; None
            if it isn't the mean cross-entropy of its logits at all.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    shifts_labels: bool | None = None


@dataclass(frozen=True)
class Trial:
    """A micro-batch of the probe.

    Args:
        cases: what its rows are.
        batch: the rows of all cases, one after the other.
        expected: what the model itself computes; the reason if it fails, or has a loss that there is no rule for.
    """

    cases: Cases
    batch: MicroBatch
    expected: ProbeOutcome | str


class Trials:
    """The micro-batches of a small model, and what it computes from each.

    Args:
        groups: what the rows of each micro-batch are; empty ones are left out, but count.
        batch_of: makes a micro-batch of a group, whose number it is given.
        run: runs the model itself.
        tolerance: the largest relative error that passes.

    Attributes:
        all: the micro-batches.
        one_case: makes a micro-batch of a single case, to tell which case of a wrong micro-batch is to blame.

    Raises:
        CannotProbe: the model fails on the first one.
    """

    def __init__(
        self,
        groups: Iterable[Cases],
        batch_of: Callable[[Cases, int], MicroBatch],
        run: Callable[[MicroBatch], ProbeOutcome | str],
        tolerance: float,
    ) -> None:
        self._batch_of, self._run, self.tolerance = batch_of, run, tolerance
        self.one_case = functools.cache(lambda case: self._trial((case,)))
        self.all = [self._trial(group, number) for number, group in enumerate(groups) if group]

    def _trial(self, group: Cases, number: int = 1) -> Trial:
        batch = self._batch_of(group, number)
        try:
            return Trial(group, batch, self._run(batch))
        except Exception as error:
            if number == 0:
                raise CannotProbe(f"a small one doesn't run: {type(error).__name__}: {error}") from error
            return Trial(group, batch, f"the model itself fails there: {type(error).__name__}: {error}")

    def refusals(self, compare: SideError, *, says_length: bool = True) -> tuple[dict[BatchKind, str], float]:
        """Compare all micro-batches, up to the first of whole rows that is wrong.

        Args:
            compare: with a side.
            says_length: whether the reasons of failures have the length of the rows.

        Returns:
            The wrong kinds with their reasons, and the largest error of the others.
        """
        refused: dict[BatchKind, str] = {}
        largest = 0.0
        pending = collections.deque(self.all)
        while pending and "whole rows" not in refused:
            trial = pending.popleft()
            if all(kind in refused for kind, _ in trial.cases):
                continue
            kind, case = trial.cases[0]
            error, reason = self.difference(compare, trial)
            if reason is None:
                largest = max(largest, error or 0.0)
            elif len(trial.cases) > 1:
                pending.extendleft(map(self.one_case, reversed(trial.cases)))
            else:
                length = f", {case.length} tokens" if says_length or error is not None else ""
                refused.setdefault(kind, f"{reason} ({case.name}{length})")
        return refused, largest

    def difference(
        self, compare: SideError, trial: Trial, expected: ProbeOutcome | None = None
    ) -> tuple[float | None, str | None]:
        """The largest error of a micro-batch, None if a side fails; and what is wrong in words, None if nothing is."""
        right = expected or trial.expected
        if isinstance(right, str):
            return None, right
        try:
            error, name = compare(trial.batch, right)
        except Exception as failure:
            return None, words_of(failure)
        return error, None if error <= self.tolerance else words_of_error(name, error)


def batch_of_kind(kind: ModelKind, model: PreTrainedModel, group: Cases, *, has_types: bool) -> MicroBatch:
    """The rows of all cases of a group as a micro-batch of a model's kind, perhaps with token types."""
    return joined(
        kind.probe_batch(case, model, has_types=has_types, has_labels=rows in LABELLED.values()) for rows, case in group
    )


def joined(batches: Iterable[MicroBatch]) -> MicroBatch:
    """Micro-batches of the same tensors, as one."""
    micro_batches = list(batches)
    return {name: torch.cat([batch[name] for batch in micro_batches]) for name in micro_batches[0]}


def probe_cases(config: PretrainedConfig) -> Iterator[tuple[BatchKind, Case]]:
    """Whole rows of all lengths that matter, the longest first; then the longest with padding, and packed rows."""
    all_cases = cases(config, LONGEST)
    longest = max(case.length for case in all_cases if not case.packed)
    for case in all_cases:
        if case.padding == "none" and not case.packed:
            yield "whole rows", case
    for case in all_cases:
        if case.packed:
            yield "packed sequences", case
        elif case.padding != "none" and case.length == longest and not case.first_position:
            kind: BatchKind = "padding on the left" if case.padding == "left" else "padding on the right"
            yield kind, case
            yield LABELLED[kind], case


def probe_groups(config: PretrainedConfig) -> list[tuple[tuple[BatchKind, Case], ...]]:
    """:func:`probe_cases`, grouped by what can be one micro-batch: rows with the same padding, and packed rows."""
    groups: dict[object, list[tuple[BatchKind, Case]]] = {}
    for kind, case in probe_cases(config):
        groups.setdefault(case if kind == "whole rows" else case.padding, []).append((kind, case))
    return [tuple(group) for group in groups.values()]


def words_of(failure: Exception) -> str:
    """What a verdict says of a failure."""
    return str(failure) if isinstance(failure, CuboidError) else f"{type(failure).__name__}: {failure}"


def words_of_error(name: str, error: float) -> str:
    """What is wrong with the tensor that has the largest error."""
    return f"{name} differs by {error:.1e}" if math.isfinite(error) else f"{name} isn't finite, or of another shape"


def largest_error(actual: ProbeOutcome, expected: ProbeOutcome) -> tuple[float, str]:
    """The largest relative error of loss and gradients, by their norms, and of which."""
    errors = {
        "the loss": relative_error(expected.loss, actual.loss, LEAST_SHARE, norm),
        **tensor_errors(expected.gradients, actual.gradients, norm, lacking_is_zero=True),
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def tensor_errors(
    reference: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    size_of: Callable[[torch.Tensor], float],
    *,
    lacking_is_zero: bool = False,
    noise: int = 0,
) -> dict[str, float]:
    """Relative errors of tensors of one kind, such as gradients, by name; the reference's first.

    Args:
        reference: what is right.
        other: what is compared with it.
        size_of: :func:`magnitude` or :func:`norm`.
        lacking_is_zero: whether a tensor that one side lacks is zero there; else its error is infinite.
        noise: in multiples of the dtype's epsilon times the largest size. If both sides of a tensor are smaller, it is
            only rounding noise, such as the gradient of a key bias without rotary embeddings, and its error is
            relative to the largest size.
    """
    largest = max(map(size_of, reference.values()), default=1.0)
    errors: dict[str, float] = {}
    for name in dict.fromkeys([*reference, *other]):
        right, actual = reference.get(name), other.get(name)
        if right is None or actual is None:
            known = right if actual is None else actual
            assert known is not None
            zero = torch.zeros_like(known) if lacking_is_zero else None
            right, actual = (zero if right is None else right), (zero if actual is None else actual)
        if right is None or actual is None:
            errors[name] = math.inf
            continue
        floor = LEAST_SHARE * largest
        if noise and right.is_floating_point():
            most = noise * torch.finfo(right.dtype).eps * largest
            floor = largest if max(size_of(right), size_of(actual)) <= most else floor
        errors[name] = relative_error(right, actual, floor, size_of)
    return errors


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 if there is none."""
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def norm(tensor: torch.Tensor) -> float:
    """The root of the sum of squares."""
    return tensor.double().norm().item()


def relative_error(
    reference: torch.Tensor,
    other: torch.Tensor,
    floor: float = 0.0,
    size_of: Callable[[torch.Tensor], float] = magnitude,
) -> float:
    """The size of a difference over that of ``reference`` (at least ``floor``).

    Args:
        reference: what is right.
        other: with another shape, or with numbers that aren't finite, its error is infinite.
        floor: the least size that a difference is relative to.
        size_of: :func:`magnitude` or :func:`norm`.
    """
    if reference.shape != other.shape:
        return math.inf
    difference = size_of(reference.double() - other.double())
    if not math.isfinite(difference):
        return math.inf
    scale = max(size_of(reference), floor)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
