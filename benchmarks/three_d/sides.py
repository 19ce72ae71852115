"""What takes part, as the measuring needs to see it: a module on this rank, and what it holds of the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from three_d.places import Piece, Place, take


@dataclass
class Side:
    """One contestant on this rank, for one case.

    Args:
        key: what it goes by in files and records.
        module: takes this rank's part of the input and returns this rank's part of the output.
        place: of the input and of the output.
        parameters: by Hugging Face's name in the part of the model that runs.
        linear: classes of the linear layers.
        gathered: shapes to which weights are gathered.
        sent_bytes: what the contestant counted itself since it was last asked, by mesh axes; None if it doesn't count.
        around: entered around every forward and backward.
    """

    key: str
    module: nn.Module
    place: Place
    parameters: dict[str, tuple[nn.Parameter, Place]]
    linear: tuple[type[nn.Module], ...]
    gathered: set[tuple[int, ...]]
    sent_bytes: Callable[[], dict[str, int]] | None = None
    around: Callable[[], AbstractContextManager[None]] = field(default=contextlib.nullcontext)

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the input or of the output's gradient."""
        return take(whole, self.place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's part of the output."""
        with self.around():
            y: torch.Tensor = self.module(x)
        return y

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Forward and backward; gradients are then with ``x`` and the parameters."""
        with self.around():
            y: torch.Tensor = self.module(x)
            y.backward(dy)
        return y

    def clear(self, x: torch.Tensor) -> None:
        """Forget all gradients."""
        x.grad = None
        for parameter, _ in self.parameters.values():
            parameter.grad = None

    def pieces(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Piece]:
        """What the last step computed: named as in :meth:`three_d.cases.Case.truth`."""
        assert x.grad is not None
        gradients = {name: (p.grad, place) for name, (p, place) in self.parameters.items() if p.grad is not None}
        return {"output": (y.detach(), self.place), "input": (x.grad, self.place), **gradients}
