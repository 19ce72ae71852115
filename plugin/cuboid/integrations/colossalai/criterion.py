"""The factor by which a criterion scales the model's own loss, the only output that a pipeline can pass to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuboid.errors import CuboidError

_TOLD = (
    "a pipeline computes the model's own loss, in pieces on the last stage, so a criterion can only return "
    "outputs.loss, perhaps times a number; leave it None for the loss itself"
)

#: Losses at which a criterion is tried. Powers of two, so that a factor's products have the same rounding; most of them
#: where losses are in training, and some far outside, where a criterion may be clamped or have a term added.
_LOSSES = [2.0**power for power in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, -1, -2, -3, -4, -6, -8, -12, -16, -32, -64)]


class _LossOnly:
    """Stand-in for a model's outputs that has only the loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        raise CuboidError(f"the criterion asks for outputs.{name}, but {_TOLD}")

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key in ("loss", 0):
            return self.loss
        raise CuboidError(f"the criterion asks for outputs[{key!r}], but {_TOLD}")


class _NoInputs:
    """Stand-in for the batch, which isn't in one place either."""

    def __getattr__(self, name: str) -> Any:
        raise CuboidError(f"the criterion asks for inputs.{name}, but {_TOLD}")

    def __getitem__(self, key: Any) -> Any:
        raise CuboidError(f"the criterion asks for inputs[{key!r}], but {_TOLD}")


def scale_of(criterion: Callable[..., Any] | None) -> float:
    """The factor by which a criterion of ``execute_pipeline`` multiplies the model's own loss; 1 without a criterion.

    Raises:
        CuboidError: it needs anything but the loss, or isn't a multiple of it.
    """
    if criterion is None:
        return 1.0
    factor = _apply(criterion, 1.0)
    for loss in _LOSSES:
        value = _apply(criterion, loss)
        if not value == factor * loss:
            raise CuboidError(
                f"the criterion makes {factor:g} of a loss of 1 but {value:g} of a loss of {loss:g}, but {_TOLD}"
            )
    return factor


def _apply(criterion: Callable[..., Any], loss: float) -> float:
    with torch.no_grad():
        return float(criterion(_LossOnly(torch.tensor(loss, dtype=torch.float64)), _NoInputs()))
