"""Parameters whose gradients ZeRO has taken: until ``engine.step``, their ``.grad`` raises an error.

There it is None, and what a script does to it changes nothing: neither gradients that are scaled ``if p.grad is not
None``, nor a gradient that is set or taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cuboid.errors import CuboidError

_REFUSED = (
    ".grad between engine.backward and engine.step: ZeRO has taken this step's gradients, so that it is None, and what "
    'is changed there has no effect. To clip, write "gradient_clipping" into the config; to read or change gradients, '
    "import safe_get_full_grad or safe_update_full_grad_vectorized from deepspeed.utils; to drop them, call "
    "engine.zero_grad(); or take zero_optimization.stage 0, which leaves them in .grad"
)


class TakenParameter(nn.Parameter):
    """What a parameter is in the meantime."""

    @property
    def grad(self) -> torch.Tensor | None:
        """Refused, to read and to set."""
        raise CuboidError(_REFUSED)

    @grad.setter
    def grad(self, _: torch.Tensor | None) -> None:
        raise CuboidError(_REFUSED)

    @grad.deleter
    def grad(self) -> None:
        raise CuboidError(_REFUSED)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = super().__deepcopy__(memo)
        copied.__class__ = nn.Parameter
        return copied


def take_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse ``.grad`` of parameters, until they are given back."""
    for parameter in parameters:
        # Those of 4 bits, for one, are of a class of their own, and aren't trained.
        if type(parameter) is nn.Parameter:
            parameter.__class__ = TakenParameter


def give_back(parameters: Iterable[nn.Parameter]) -> None:
    """End what :func:`take_gradients` began."""
    for parameter in parameters:
        if type(parameter) is TakenParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


@contextmanager
def readable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context for functions that look at ``.grad`` before they find the gradients where ZeRO has them."""
    taken = [parameter for parameter in parameters if type(parameter) is TakenParameter]
    give_back(taken)
    try:
        yield
    finally:
        take_gradients(taken)
