"""A block's input that is gathered only if something else than its projections computes with it.

Projections in fp8 are given the input in fp8, and the block's own code usually reads no more than its shape.
"""

from __future__ import annotations

from collections.abc import Callable
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


class LateGather(torch.Tensor):
    """Stands for the gathered input ``[B/b, S, H/h]``: it has the shape, and is gathered once its values are read.

    All ranks of `sequence` run the same code, so that they gather together.

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
        # Should anything get at the values behind our back, NaN reveals that.
        values = shard.new_full((), torch.nan).expand(batch, length * along.size, width)
        late = values.as_subclass(LateGather)
        late.cuboid_shard, late._along, late._gathered = shard, along, None
        return late

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_SHAPES:
                args, kwargs = tree_map_only(LateGather, LateGather._values, (args, kwargs))
            return func(*args, **kwargs)

    def _values(self) -> torch.Tensor:
        if self._gathered is None:
            self._gathered = GatherPositions.apply(self.cuboid_shard, self._along)
        return self._gathered


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
