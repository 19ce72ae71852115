"""What a criterion makes of a model's own loss, the only thing that a pipeline can show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuboid.errors import CuboidError

_TOLD = (
    "a pipeline computes the model's own loss, in pieces on the last stage, so a criterion can only return "
    "outputs.loss, perhaps times a number; leave it None for the loss itself"
)


class _LossOnly:
    """Stands for a model's outputs, of which there is nothing but the loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        raise CuboidError(f"the criterion asks for outputs.{name}, but {_TOLD}")

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key in ("loss", 0):
            return self.loss
        raise CuboidError(f"the criterion asks for outputs[{key!r}], but {_TOLD}")


class _NoInputs:
    """Stands for a batch, which isn't in one place either."""

    def __getattr__(self, name: str) -> Any:
        raise CuboidError(f"the criterion asks for inputs.{name}, but {_TOLD}")

    def __getitem__(self, key: Any) -> Any:
        raise CuboidError(f"the criterion asks for inputs[{key!r}], but {_TOLD}")


def scale_of(criterion: Callable[..., Any] | None) -> float:
    """What a criterion multiplies the model's own loss by.

    Args:
        criterion: of ``execute_pipeline``: takes outputs and inputs. None leaves the loss as it is.

    Raises:
        CuboidError: it needs something else than the loss, or isn't a multiple of it.
    """
    if criterion is None:
        return 1.0
    # Powers of two, so that no factor rounds one and not the other.
    values = [_apply(criterion, loss) for loss in (1.0, 2.0, 4.0)]
    if not (values[1] == 2 * values[0] and values[2] == 4 * values[0]):
        raise CuboidError(f"of losses 1, 2 and 4 the criterion makes {values}, but {_TOLD}")
    return values[0]


def _apply(criterion: Callable[..., Any], loss: float) -> float:
    with torch.no_grad():
        return float(criterion(_LossOnly(torch.tensor(loss, dtype=torch.float64)), _NoInputs()))
