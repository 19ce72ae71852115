"""Gradients of many parameters end to end in one tensor, which one message adds up over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from cuboid.distributed.axis_collectives import padded_length

#: Where parameters begin in a tensor of many: at multiples of so many elements, as kernels like their memory.
_ALIGNMENT = 64


def starts_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where each parameter begins in a tensor of all of them; behind them, where the last one ends."""
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + padded_length(parameter.numel(), _ALIGNMENT))
    return starts


def views_of(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters' places in such a tensor, each in its parameter's shape."""
    return [
        flat[start : start + parameter.numel()].view(parameter.shape)
        for parameter, (start, _) in zip(parameters, pairwise(starts_of(parameters)), strict=True)
    ]


class GradientBuffer:
    """The sum of some parameters' gradients since :meth:`clear`, allocated once.

    Where it has the parameters' dtype, their ``.grad`` lie in it. Where it has another one, each new gradient is added
    to it as soon as it is there, and ``.grad`` is let go; :func:`gradient_of` gives the sum. A parameter that no loss
    reaches has a gradient of zeros.

    Args:
        parameters: of one dtype, alike in order on all replicas.
        dtype: of the sums.
        numel: elements of the whole, if it is to be longer than what the parameters take.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, numel: int | None = None) -> None:
        self._parameters = list(parameters)
        length = starts_of(parameters)[-1] if numel is None else numel
        self.flat = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._views = views_of(self.flat, parameters)
        self._in_place = parameters[0].dtype == dtype
        if not self._in_place:
            for parameter, view in zip(parameters, self._views, strict=True):
                parameter.main_grad = view  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(_add_to_sum)
        self.clear()

    def clear(self) -> None:
        """Start anew, from zero."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view if self._in_place else None

    def collect(self) -> torch.Tensor:
        """All gradients in one tensor, also those whose ``.grad`` somebody has replaced."""
        if self._in_place:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                _take_in(parameter, view)
        return self.flat


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """A parameter's gradient so far, also where it is summed up in float32 beside ``.grad``."""
    # By us, and by DeepSpeed's bf16 optimizer.
    for name in ("main_grad", "_hp_grad"):
        kept: torch.Tensor | None = getattr(parameter, name, None)
        if kept is not None:
            return kept
    return parameter.grad


def _add_to_sum(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def _take_in(parameter: nn.Parameter, view: torch.Tensor) -> None:
    if parameter.grad is None:
        view.zero_()
    elif parameter.grad.data_ptr() != view.data_ptr():
        view.copy_(parameter.grad)
    parameter.grad = view
