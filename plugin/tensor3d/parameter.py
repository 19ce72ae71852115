"""The life of a sharded parameter: sharded, gathered for a multiplication, sharded again.

The same idea as FSDP2's per-parameter state (``torch.distributed.fsdp``), for the axes of :class:`Layout.storage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import all_gather, reduce_scatter
from cuboid.tensor3d.layout import Layout


class GatherState(Enum):
    """Where a parameter is in its life."""

    SHARDED = "sharded"
    GATHERED = "gathered"


class ParameterGather:
    """Brings the shards of one parameter together into the block, and its gradient back.

    ``SHARDED --gather()--> GATHERED --reshard()--> SHARDED``. Any other transition is a bug and asserts. The block
    lives exactly as long as the state is GATHERED, so that a prefetch can start early and still be accounted for.
    """

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        self.layout = layout
        self.mesh = mesh
        self.state = GatherState.SHARDED
        self._block: torch.Tensor | None = None

    def gather(self, shard: torch.Tensor) -> None:
        """Start from the shard ``[rows/storage, ...]``; bring together the block ``[rows, ...]``."""
        assert self.state is GatherState.SHARDED, "gathered twice"
        rows = self.layout.block_shape(self.mesh.shape)[0]
        self._block = all_gather(shard.detach(), self.mesh, self.layout.storage).flatten(0, 1)[:rows]
        self.state = GatherState.GATHERED

    def block(self) -> torch.Tensor:
        """The gathered block; valid until :meth:`reshard`."""
        assert self.state is GatherState.GATHERED, "not gathered"
        assert self._block is not None
        return self._block

    def reshard(self) -> None:
        """Let go of the block."""
        assert self.state is GatherState.GATHERED, "not gathered"
        self._block = None
        self.state = GatherState.SHARDED

    @contextmanager
    def gathered(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gather for the time of a ``with`` block."""
        self.gather(shard)
        try:
            yield self.block()
        finally:
            self.reshard()

    def reduce(self, block_gradient: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' gradients of the block and leave each rank its shard's."""
        ranks = self.mesh.size(*self.layout.storage)
        if ranks == 1:
            return block_gradient
        height, *rest = self.layout.shard_shape(self.mesh.shape)
        missing = ranks * height - block_gradient.shape[0]
        if missing:
            block_gradient = torch.cat([block_gradient, block_gradient.new_zeros((missing, *rest))])
        return reduce_scatter(block_gradient.reshape(ranks, height, *rest), self.mesh, self.layout.storage)


class _GatherParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, gather: ParameterGather) -> torch.Tensor:
        ctx.gather = gather
        with gather.gathered(shard) as block:
            return block

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gather.reduce(gradient), None


def gather_parameter(shard: torch.Tensor, gather: ParameterGather) -> torch.Tensor:
    """Differentiable gather, for small parameters (norms, biases) whose block autograd may keep."""
    if gather.mesh.size(*gather.layout.storage) == 1:
        return shard
    return _GatherParameter.apply(shard, gather)


class ShardedModule(nn.Module):
    """A layer whose parameters are shards: it knows the mesh, and each parameter's layout and gather."""

    mesh: Mesh

    def init_sharding(self, mesh: Mesh, layouts: dict[str, Layout]) -> None:
        """Attach the mesh and the layouts, by the parameter's name in this module."""
        self.mesh = mesh
        self.gathers = {name: ParameterGather(layout, mesh) for name, layout in layouts.items()}

    def layout(self, name: str) -> Layout:
        """Layout of this module's parameter ``name``."""
        return self.gathers[name].layout

    def gathered(self, name: str) -> torch.Tensor:
        """The block of a small parameter, differentiably."""
        return gather_parameter(getattr(self, name), self.gathers[name])
