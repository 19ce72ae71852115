"""New random values for parameters that are shards: refused, since each rank would draw them by its own shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cuboid.errors import UnsupportedModelError

#: Methods of tensors that draw new values for them.
_DRAWING = frozenset(
    ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_")
)
#: Functions of ``torch.nn.init`` that draw, or whose values depend on an element's place.
INITIALIZERS = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"),
    *("kaiming_normal_", "orthogonal_", "sparse_", "eye_", "dirac_"),
)


class RefusesDraws(TorchFunctionMode):
    """Context in which drawing new values for a tensor raises an error.

    Args:
        call: what a script has called, for the message.
    """

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in _DRAWING:
            raise draws_refused(self._call, f"by {func.__name__}")
        return func(*args, **(kwargs or {}))


def words_of_apply(owner: str, function: Any) -> str:
    """A call of ``apply``, for the message."""
    return f"{owner}.apply({getattr(function, '__qualname__', type(function).__qualname__)})"


def draws_refused(call: str, what: str) -> UnsupportedModelError:
    """The error of a call that would draw new values for shards."""
    return UnsupportedModelError(
        f"{call} draws new values {what}, of the shapes of this rank's shards and the same ones on all ranks; call it "
        "before the model is sharded, or make the model with cuboid.from_config"
    )


def shares_storage(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, its ``.data`` or a view of it."""
    return tensor.untyped_storage()._cdata == parameter.untyped_storage()._cdata


def has_storage_of(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a module's parameters, its ``.data`` or a view of it.

    ``module.parameters()`` would take ten times as long.
    """
    wanted, left = tensor.untyped_storage()._cdata, [module]
    while left:
        inner = left.pop()
        for parameter in inner._parameters.values():
            if parameter is not None and parameter.untyped_storage()._cdata == wanted:
                return True
        left += [child for child in inner._modules.values() if child is not None]
    return False


_draws_whole: ContextVar[bool] = ContextVar("cuboid_draws_whole", default=False)
#: Whether values that are drawn now are whole, in a module of a sharded model that will keep its shards of them.
draws_whole: Callable[[], bool] = _draws_whole.get


@contextmanager
def drawing_whole() -> Iterator[None]:
    """In the ``with`` block, :data:`draws_whole` is true."""
    token = _draws_whole.set(True)
    try:
        yield
    finally:
        _draws_whole.reset(token)
