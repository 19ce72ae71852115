"""Which tensors depend on which in a forward on the meta device.

Meta tensors have no values, so tracing a model of any size costs nothing. Code that asks for values all the same (is
anything masked? which tokens go to this expert?) gets an arbitrary answer: neither the order of the modules nor the
tensors that they pass on depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
#: Functions that use the shape, dtype or device of their first argument, never its values.
_SHAPE_ONLY = frozenset(
    {
        _aten.zeros_like,
        _aten.ones_like,
        _aten.empty_like,
        _aten.full_like,
        _aten.rand_like,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
        _aten.new_empty,
        _aten.new_empty_strided,
    }
)


class Flow(TorchDispatchMode):
    """Marks tensors with their origins. A result inherits the marks of all tensors that it was computed from.

    Attributes:
        allowed: the marks that inputs of the running code may have; None if all are allowed.
        leaks: marks of inputs that weren't allowed, in order, each with ``place`` at that time.
        place: what is running now, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allowed: frozenset[str] | None = None
        self.place = ""
        self.leaks: list[tuple[str, str]] = []
        self._marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def mark(self, tensor: torch.Tensor, mark: str) -> None:
        """Make ``mark`` a tensor's only mark."""
        self._marks[tensor] = frozenset({mark})

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _check_writes(func, args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        marks: frozenset[str] = frozenset()
        if func.overloadpacket not in _SHAPE_ONLY:
            marks = marks.union(*(self.marks_of(tensor) for tensor in inputs))
            if self.allowed is not None:
                self.leaks += [(mark, self.place) for mark in sorted(marks - self.allowed)]
        result = _ANSWERS.get(func.overloadpacket, func)(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._marks[leaf] = marks if func.overloadpacket in _SHAPE_ONLY else self.marks_of(leaf) | marks
        return result

    def marks_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """A tensor's marks. One that is written in place keeps those it had."""
        marks: frozenset[str] = self._marks.get(tensor, frozenset())
        return marks


def _check_writes(func: Any, args: tuple[Any, ...]) -> None:
    """Check that no tensor with overlapping elements is written to, which a real device rejects but meta doesn't.

    Raises:
        RuntimeError: a written argument is such a tensor.
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, torch.Tensor):
            sizes = zip(value.shape, value.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in sizes):
                raise RuntimeError("it writes into the embeddings that it is given")


def _scalar(tensor: torch.Tensor) -> bool | int | float:
    return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


def _nothing(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty((0, tensor.dim()), dtype=torch.int64, device=tensor.device)


#: Replacements for functions whose result's shape, or whose value in Python, depends on a tensor's values.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense: _scalar,
    _aten.equal: lambda *_: False,
    _aten.is_nonzero: lambda *_: False,
    _aten.nonzero: _nothing,
    _aten.masked_select: lambda tensor, _: tensor.new_empty((0,)),
}
