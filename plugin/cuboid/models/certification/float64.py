"""Keep float64 throughout models that compute parts of themselves in float32.

Hugging Face's models cast to float32 where half precision would lose too much: in RMSNorm, in softmax, before the
loss. With float64 weights those casts *lose* half of the digits, and a comparison could only resolve errors of 1e-7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Precision = contextlib.AbstractContextManager[Any]


class KeepFloat64(TorchFunctionMode):
    """Context in which float64 tensors ignore ``x.float()``, ``x.to(torch.float32)`` and ``dtype=torch.float32``.

    Only functions whose first argument is a float64 tensor are affected. Tensors that a model creates in float32, such
    as the cosines and sines of rotary embeddings, are the same as without the mode.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Called for every function of torch, reads of a tensor's attributes too; few are given a dtype.
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            for argument in args:
                if argument is torch.float32:
                    args = tuple(map(_widened, args))
                    break
            if kwargs:
                kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs) if kwargs else func(*args)


def widen(model: nn.Module) -> None:
    """Make all weights float64, in place: some models keep some in float32 on purpose, for inputs that they cast."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)


def precision(*, keep_float64: bool) -> Precision:
    """:class:`KeepFloat64`, or a context that does nothing."""
    return KeepFloat64() if keep_float64 else contextlib.nullcontext()


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
