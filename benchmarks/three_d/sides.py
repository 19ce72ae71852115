"""One contestant on one rank: a module, what it holds of the whole, and what a forward and backward of it takes.

Only torch is needed here, so that an environment without Cuboid can take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from network.serving import Contestant
from torch import nn

from three_d.gpt2 import Case, Piece, Place, relative_error, take
from three_d.instruments import Meter, Saved


@dataclass
class Side(Contestant):
    """Forward and backward of a module.

    Args:
        case: what is computed.
        module: takes this rank's part of the input and returns this rank's part of the output.
        place: of the input and of the output.
        parameters: by Hugging Face's name in the part of the model that runs.
        linear: classes of the linear layers.
        gathered: shapes to which weights are gathered.
        sent_bytes: what the contestant counted itself since it was last asked, by mesh axes; None if it doesn't count.
        around: entered around every forward and backward.
    """

    case: Case
    module: nn.Module
    place: Place
    parameters: dict[str, tuple[nn.Parameter, Place]]
    linear: tuple[type[nn.Module], ...]
    gathered: set[tuple[int, ...]]
    sent_bytes: Callable[[], dict[str, int]] | None = None
    around: Callable[[], AbstractContextManager[None]] = field(default=contextlib.nullcontext)

    def __post_init__(self) -> None:
        x, dy = (take(whole, self.place) for whole in self.case.tensors())
        self._x, self._dy = x.requires_grad_(), dy

    def first(self) -> dict[str, Any]:
        """The first steps, which warm up, and in which all but the time is measured.

        Returns:
            ``errors`` by what :meth:`three_d.gpt2.Case.truth` has, of all ranks together; and of this rank the
            ``collectives`` of a step with their calls, ``counted_bytes`` that the contestant counted itself,
            ``saved_bytes`` by kind, and ``peak_bytes``.
        """
        errors = self._errors(self.step())
        self.begin()
        if self.sent_bytes is not None:
            self.sent_bytes()
        parameters = [parameter for parameter, _ in self.parameters.values()]
        with Meter([self._x, self._dy, *parameters]) as meter:
            self.step()
        counted = None if self.sent_bytes is None else self.sent_bytes()
        self.begin()
        with Saved(self.module, self.linear, self.gathered, parameters) as saved, self.around():
            y = self.module(self._x)
        y.backward(self._dy)
        return {
            "errors": errors,
            "collectives": dict(meter.collectives),
            "counted_bytes": counted,
            "saved_bytes": saved.bytes,
            "peak_bytes": meter.peak_bytes,
        }

    def begin(self) -> None:
        self._x.grad = None
        for parameter, _ in self.parameters.values():
            parameter.grad = None

    def step(self) -> torch.Tensor:
        """Forward and backward; gradients are then with the input and the parameters."""
        with self.around():
            y: torch.Tensor = self.module(self._x)
            y.backward(self._dy)
        return y

    def _errors(self, y: torch.Tensor) -> dict[str, float]:
        """Of the output and all gradients. Collective."""
        assert self._x.grad is not None
        pieces: dict[str, Piece] = {"output": (y, self.place), "input": (self._x.grad, self.place)}
        pieces |= {name: (p.grad, place) for name, (p, place) in self.parameters.items() if p.grad is not None}
        truth = self.case.truth()
        missing = truth.keys() ^ pieces.keys()
        assert not missing, f"only one of this and GPT-2 has {', '.join(sorted(missing))}"

        def add_up(squares: torch.Tensor, found: torch.Tensor) -> None:
            dist.all_reduce(squares)
            dist.all_reduce(found)

        return {name: relative_error(whole, [pieces[name]], add_up) for name, whole in truth.items()}
