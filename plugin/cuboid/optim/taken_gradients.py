"""Parameters whose gradients an optimizer has taken: until it steps, their ``.grad`` raises an error.

There it is None, or not what is stepped on, and what a script does to it changes nothing: neither gradients that are
scaled ``if p.grad is not None``, nor a gradient that is set or taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cuboid.errors import CuboidError


class TakenParameter(nn.Parameter):
    """What a parameter is in the meantime; a subclass for each kind of optimizer.

    Attributes:
        refused: what is said of ``.grad``.
    """

    refused: str

    @property
    def grad(self) -> torch.Tensor | None:
        """Refused, to read and to set."""
        raise CuboidError(self.refused)

    @grad.setter
    def grad(self, _: torch.Tensor | None) -> None:
        raise CuboidError(self.refused)

    @grad.deleter
    def grad(self) -> None:
        raise CuboidError(self.refused)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = super().__deepcopy__(memo)
        copied.__class__ = nn.Parameter
        return copied


class TakenByZero(TakenParameter):
    """A parameter of a DeepSpeed engine with ZeRO."""

    refused = (
        ".grad between engine.backward and engine.step: ZeRO has taken this step's gradients, so that it is None, and "
        'what is changed there has no effect. To clip, write "gradient_clipping" into the config; to read or change '
        "gradients, import safe_get_full_grad or safe_update_full_grad_vectorized from deepspeed.utils; to drop them, "
        "call engine.zero_grad(); or take zero_optimization.stage 0 in float32, which leaves them in .grad"
    )


class TakenByBooster(TakenParameter):
    """A parameter that a Booster's optimizer steps in another precision, or of which it steps a replica's share."""

    refused = (
        ".grad between booster.backward and optimizer.step: the optimizer has added this step's gradients up "
        "elsewhere, in float32 or in parts, so that what is changed there has no effect. To clip, call "
        "clip_grad_by_norm or clip_grad_by_value of the optimizer that booster.boost returned, or set "
        "gradient_clipping in the config; to drop them, call its zero_grad(); or train in float32 without ZeRO, which "
        "leaves them in .grad"
    )


def take_gradients(parameters: Iterable[nn.Parameter], taken: type[TakenParameter]) -> None:
    """Refuse ``.grad`` of parameters, until they are given back."""
    for parameter in parameters:
        # Those of 4 bits, for one, are of a class of their own, and aren't trained.
        if type(parameter) is nn.Parameter:
            parameter.__class__ = taken


def give_back(parameters: Iterable[nn.Parameter]) -> None:
    """End what :func:`take_gradients` began."""
    for parameter in parameters:
        if isinstance(parameter, TakenParameter):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


@contextmanager
def readable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context for functions that look at ``.grad`` before they find the gradients where an optimizer has them."""
    taken = [(parameter, type(parameter)) for parameter in parameters if isinstance(parameter, TakenParameter)]
    for parameter, _ in taken:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, kind in taken:
            parameter.__class__ = kind
