"""The life of a sharded parameter: sharded, gathered for a multiplication, sharded again.

The same idea as FSDP2's per-parameter state (``torch.distributed.fsdp``), for the axes of :class:`Layout.storage`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch import nn

from cuboid.distributed.async_result import Pending
from cuboid.distributed.axis_collectives import start_all_gather, start_scatter
from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.sharding.deferred_reduce import Carry
from cuboid.tensor3d.sharding.param_versions import Updates
from cuboid.tensor3d.sharding.sharding_spec import Layout


class GatherState(Enum):
    """Where a parameter is in its life."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Block:
    """A gathered parameter that is kept while somebody refers to it, and the values that it was gathered of."""

    def __init__(self, whole: torch.Tensor, shard: torch.Tensor, updates: Updates) -> None:
        self.whole = whole
        self._origin = self._origin_of(shard, updates)

    def is_of(self, shard: torch.Tensor, updates: Updates) -> bool:
        """Whether these are still the shard's values."""
        return self._origin == self._origin_of(shard, updates)

    @staticmethod
    def _origin_of(shard: torch.Tensor, updates: Updates) -> tuple[Any, ...]:
        return shard.data_ptr(), shard._version, shard.dtype, updates.count


class ParameterGather:
    """Brings the shards of one parameter together into the block, and its gradient back.

    ``SHARDED --start()--> GATHERING --block()--> GATHERED --reshard()--> SHARDED``. Whoever needs the block soon may
    start early; who needs it now starts it unless somebody did. The block lives until the state is SHARDED again.
    """

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        self.layout = layout
        self.mesh = mesh
        self.state = GatherState.SHARDED
        self._dtype: torch.dtype | None = None
        self._pending: Pending[torch.Tensor] | None = None
        self._block: torch.Tensor | None = None
        #: Whether blocks are kept from a forward to its backward, and by whose count they are out of date.
        self.keeps: Updates | None = None
        self._kept: weakref.ref[Block] | None = None

    @property
    def ranks(self) -> int:
        """How many shards make a block."""
        return self.mesh.size(*self.layout.storage)

    def start(self, shard: torch.Tensor) -> None:
        """Start from the shard ``[rows/storage, ...]``, unless its block ``[rows, ...]`` is there or on its way."""
        if self.needs(shard):
            self.expect(shard, start_all_gather(shard.detach(), self.mesh, self.layout.storage))

    def needs(self, shard: torch.Tensor) -> bool:
        """Whether somebody has to start. A block of another dtype is let go of, and one that was kept is taken up."""
        if self.state is not GatherState.SHARDED and self._dtype != shard.dtype:
            # Started outside of autocast and needed inside, or the other way round.
            self.discard()
        kept = self._kept_block(shard)
        if self.state is GatherState.SHARDED and kept is not None:
            self._block, self._dtype, self.state = kept.whole, shard.dtype, GatherState.GATHERED
        return self.state is GatherState.SHARDED

    def expect(self, shard: torch.Tensor, stacked: Pending[torch.Tensor]) -> None:
        """Take the shards of all ranks, ``[storage, rows/storage, ...]``, from a gather that was started."""
        assert self.state is GatherState.SHARDED, "gathered twice"
        self._dtype, self._pending = shard.dtype, stacked
        self.state = GatherState.GATHERING

    def block(self) -> torch.Tensor:
        """The block, once it is there; valid until :meth:`reshard`."""
        assert self.state is not GatherState.SHARDED, "not gathered"
        if self._pending is not None:
            rows = self.layout.block_shape(self.mesh.shape)[0]
            self._block = self._pending.wait().flatten(0, 1)[:rows]
            self._pending = None
            self.state = GatherState.GATHERED
        assert self._block is not None
        return self._block

    def reshard(self) -> None:
        """Let go of the block."""
        assert self.state is GatherState.GATHERED, "not gathered"
        self._block = None
        self.state = GatherState.SHARDED

    def let_go(self, shard: torch.Tensor, *, keep: bool) -> Block | None:
        """:meth:`reshard` after a forward's product, unless the backward follows at once.

        Args:
            shard: what the block was gathered of.
            keep: whether a backward will follow.

        Returns:
            What keeps the block for the backward and for other forwards before it, where that is wanted.
        """
        if is_recomputing():
            return None
        whole = self.block()
        self.reshard()
        if not keep or self.ranks == 1 or self.keeps is None:
            return None
        kept = self._kept_block(shard)
        if kept is None:
            kept = Block(whole, shard, self.keeps)
            self._kept = weakref.ref(kept)
        return kept

    def _kept_block(self, shard: torch.Tensor) -> Block | None:
        kept = None if self._kept is None else self._kept()
        return kept if kept is not None and self.keeps is not None and kept.is_of(shard, self.keeps) else None

    def discard(self) -> None:
        """Let go of what was gathered for nothing, if anything was."""
        if self.state is not GatherState.SHARDED:
            self.block()
            self.reshard()

    @contextmanager
    def gathered(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gather for the time of a ``with`` block."""
        self.start(shard)
        try:
            yield self.block()
        finally:
            self.reshard()

    def start_reduce(self, block_gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """Sum the ranks' gradients of the block and leave each rank its shard's."""
        if self.ranks == 1:
            return Pending(block_gradient)
        return start_scatter(self.stacked(block_gradient), self.mesh, self.layout.storage)

    def stacked(self, block: torch.Tensor) -> torch.Tensor:
        """Cut a block into what the ranks keep, ``[storage, rows/storage, ...]``; rows that nobody has are zeros."""
        height, *rest = self.layout.shard_shape(self.mesh.shape)
        missing = self.ranks * height - block.shape[0]
        if missing:
            block = torch.cat([block, block.new_zeros((missing, *rest))])
        return block.reshape(self.ranks, height, *rest)

    def reduce(self, block_gradient: torch.Tensor) -> torch.Tensor:
        """:meth:`start_reduce`, waited for."""
        return self.start_reduce(block_gradient).wait()


def is_recomputing() -> bool:
    """Whether this forward runs inside of a backward, as activation checkpointing lets it.

    Its weights stay gathered for the backward that follows.
    """
    return torch._C._current_graph_task_id() != -1


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
    """A layer whose parameters are shards: it knows the mesh, and each parameter's layout and gather.

    Attributes:
        ahead_blocks, ahead_shards: what the layer around it has made ready for its forward, by the parameter's name:
            blocks of small parameters, and shards whose gradients may take their time.
    """

    mesh: Mesh

    def init_sharding(self, mesh: Mesh, layouts: dict[str, Layout]) -> None:
        """Attach the mesh and the layouts, by the parameter's name in this module."""
        self.mesh = mesh
        self.gathers = {name: ParameterGather(layout, mesh) for name, layout in layouts.items()}
        self.ahead_blocks: dict[str, torch.Tensor] = {}
        self.ahead_shards: dict[str, tuple[torch.Tensor, Carry]] = {}

    def layout(self, name: str) -> Layout:
        """Layout of this module's parameter ``name``."""
        return self.gathers[name].layout

    def gathered(self, name: str) -> torch.Tensor:
        """The block of a small parameter, differentiably."""
        block = self.ahead_blocks.get(name)
        return gather_parameter(getattr(self, name), self.gathers[name]) if block is None else block

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.mesh.shape.size > 1:
            check_knows_of_shards(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def carried(self, name: str) -> tuple[torch.Tensor, Carry | None]:
        """The shard of a large parameter, and who waits for its gradient where that may be on its way for longer."""
        return self.ahead_shards.pop(name, (getattr(self, name), None))


#: Whether whoever asks for a state dict knows that shards are in it.
_knows_of_shards: ContextVar[bool] = ContextVar("cuboid_knows_of_shards", default=False)


def local_state(model: nn.Module) -> dict[str, Any]:
    """A model's ``state_dict(keep_vars=True)`` as this rank has it: shards, which go by their whole tensors' names."""
    token = _knows_of_shards.set(True)
    try:
        return dict(model.state_dict(keep_vars=True))
    finally:
        _knows_of_shards.reset(token)


def check_knows_of_shards(module: nn.Module) -> None:
    """Make sure that a state dict isn't taken for a whole model's.

    Raises:
        UnsupportedModelError: outside of :func:`local_state`.
    """
    if not _knows_of_shards.get():
        raise UnsupportedModelError(
            f"{type(module).__name__}.state_dict() would give this rank's part of the model under the names of whole "
            "tensors; cuboid.full_state_dict(model), which all ranks call, gives the whole ones to the first rank, and "
            "cuboid.save_pretrained(model, folder) or an engine's save_checkpoint writes them"
        )


def keep_weights(model: nn.Module) -> None:
    """Keep gathered weights from a forward to its backward, and let other forwards in between have them too."""
    updates = Updates()
    for module in (module for module in model.modules() if isinstance(module, ShardedModule)):
        for gather in module.gathers.values():
            gather.keeps = updates
