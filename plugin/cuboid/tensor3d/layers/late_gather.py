"""A block's input that is gathered only if something else than its projections computes with it.

Projections in fp8 are given the input in fp8, and the block's own code usually reads no more than its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, gather_positions, scatter_dim
from cuboid.distributed.mesh import AxisGroup


class GatherPositions(torch.autograd.Function):
    """All-gather of the sequence, ``[B/b, S/s, R]`` to ``[B/b, S, R]``; the ranks' gradients are partial sums."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.along = along
        return gather_positions(x, along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_dim(gradient, SEQUENCE_DIM, ctx.along), None


class LateTensor(torch.Tensor):
    """Stands for a tensor: it has the shape, and is computed once its values are read.

    All ranks run the same code, so that they read it together, and computing it may be collective.
    """

    @classmethod
    def standing(cls, like: torch.Tensor, shape: Sequence[int]) -> Any:
        """One of this shape, with the dtype and device of ``like``."""
        # Should anything get at the values behind our back, NaN reveals that.
        return like.new_full((), torch.nan).expand(shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_ALL and _OF_ALL[func](*args):
                return args[0]
            if func not in _OF_SHAPES:
                args, kwargs = tree_map_only(LateTensor, lambda late: late.values_of(), (args, kwargs))
            return func(*args, **kwargs)

    def values_of(self) -> torch.Tensor:
        """The tensor itself."""
        raise NotImplementedError


class LateGather(LateTensor):
    """Stands for the gathered input ``[B/b, S, H/h]``. All ranks of `sequence` gather together.

    Attributes:
        cuboid_shard: the rank's own part, ``[B/b, S/s, H/h]``.
    """

    cuboid_shard: torch.Tensor
    _along: AxisGroup
    _gathered: torch.Tensor | None

    @staticmethod
    def of(shard: torch.Tensor, along: AxisGroup) -> LateGather:
        """The input that ``shard`` is a part of."""
        batch, length, width = shard.shape
        late: LateGather = LateGather.standing(shard, (batch, length * along.size, width))
        late.cuboid_shard, late._along, late._gathered = shard, along, None
        return late

    def values_of(self) -> torch.Tensor:
        """See :class:`LateTensor`."""
        if self._gathered is None:
            self._gathered = GatherPositions.apply(self.cuboid_shard, self._along)
        return self._gathered


def _takes_all(_: torch.Tensor, index: Any) -> bool:
    """Whether a tensor's part with this index is all of it, as of positions that are all kept."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts)


def _keeps_shape(x: torch.Tensor, *sizes: Any) -> bool:
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
    return len(shape) == x.dim() and all(size in (-1, kept) for size, kept in zip(shape, x.shape, strict=True))


_TENSOR: Any = torch.Tensor
#: What reads no values.
_OF_SHAPES = frozenset(
    [
        *(
            getattr(_TENSOR, name).__get__
            for name in ("shape", "ndim", "dtype", "device", "is_cuda", "is_meta", "layout")
        ),
        *(getattr(_TENSOR, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point", "ndimension")),
    ]
)
#: What may return the tensor as it is, and the condition.
_OF_ALL: dict[Any, Callable[..., bool]] = {
    _TENSOR.__getitem__: _takes_all,
    _TENSOR.view: _keeps_shape,
    _TENSOR.reshape: _keeps_shape,
}
