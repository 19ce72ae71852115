"""Accumulate gradients: in a flat buffer of many parameters that one collective reduces, or in float32 for a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn

from cuboid.distributed.axis_collectives import padded_length

#: In a flat tensor, parameters begin at multiples of this many elements, since kernels are faster on aligned memory.
_ALIGNMENT = 64


def starts_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The offset of each parameter in a flat tensor of all of them, followed by the length of that tensor."""
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + padded_length(parameter.numel(), _ALIGNMENT))
    return starts


def views_of(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Views of a flat tensor, one for each parameter, in the parameter's shape."""
    return [
        flat[start : start + parameter.numel()].view(parameter.shape)
        for parameter, (start, _) in zip(parameters, pairwise(starts_of(parameters)), strict=True)
    ]


class GradientBuffer:
    """The accumulated gradients of some parameters since :meth:`clear`, in one tensor that is allocated once.

    If it has the parameters' dtype, their ``.grad`` are views of it. If not, a hook adds each new gradient to it and
    frees ``.grad``; :func:`gradient_of` gives the sum. A parameter that the loss doesn't depend on has a zero gradient.

    Args:
        parameters: of one dtype, in the same order on all replicas.
        dtype: of the sums.
        numel: size of the tensor, if it is to be larger than the parameters need.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, numel: int | None = None) -> None:
        self._parameters = list(parameters)
        length = starts_of(parameters)[-1] if numel is None else numel
        self.flat = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._views = views_of(self.flat, parameters)
        #: Whether the parameters' ``.grad`` are views of it.
        self.is_in_place = parameters[0].dtype == dtype
        if not self.is_in_place:
            for parameter, view in zip(parameters, self._views, strict=True):
                parameter.main_grad = view  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
        self.clear()

    def clear(self) -> None:
        """Zero the gradients."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view if self.is_in_place else None

    def collect(self) -> torch.Tensor:
        """The flat tensor, with the gradients of all parameters."""
        if self.is_in_place:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                # The user, or an engine, may have assigned another tensor to ``.grad``, or None.
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
                parameter.grad = view
        return self.flat


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """A parameter's accumulated gradient, also if it is accumulated in another dtype outside ``.grad``."""
    # ``main_grad`` is ours (see :class:`GradientBuffer`), ``_hp_grad`` that of DeepSpeed's bf16 optimizer, and
    # ``grad_accum`` that of its ZeRO under ``data_types.grad_accum_dtype``.
    for name in ("main_grad", "_hp_grad", "grad_accum"):
        accumulated: torch.Tensor | None = getattr(parameter, name, None)
        if accumulated is not None:
            return accumulated
    return parameter.grad


@contextmanager
def float32_sums(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which gradients of parameters with fewer bits than float32 accumulate in float32.

    On exit, ``.grad`` is the sum of its value on entry and all new gradients, rounded once. Inside, post-accumulate
    hooks that were registered earlier see each gradient by itself. A parameter takes four bytes per element from its
    second gradient on.
    """
    sums: dict[nn.Parameter, torch.Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            # torch also runs the hooks of a parameter that backward reached without a gradient.
            return
        total = sums.get(parameter)
        if total is None:
            # A first gradient needs no other precision until a second one is added.
            sums[parameter] = gradient
        elif total.dtype == gradient.dtype:
            sums[parameter] = total.float().add_(gradient)
        else:
            total.add_(gradient)

    short = [p for p in parameters if p.requires_grad and p.dtype.itemsize < torch.float32.itemsize]
    for parameter in short:
        if parameter.grad is not None:
            take(parameter)
    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in short]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        # Popped one by one, to free each float32 sum once it is rounded.
        while sums:
            parameter, total = sums.popitem()
            parameter.grad = total.to(parameter.dtype)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    # None if backward reached the parameter without a gradient, as all but a step's last do under "gradient_sync".
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
