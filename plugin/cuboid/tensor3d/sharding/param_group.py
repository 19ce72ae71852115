"""One all-gather for the small parameters of a layer, and one reduce-scatter for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather, start_scatter
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce, deferred_shards
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam


class Member(Protocol):
    """A parameter, by its module and its name there."""

    @property
    def module(self) -> ShardedModule:
        """Which has it."""
        ...

    @property
    def name(self) -> str:
        """In the module."""
        ...

    @property
    def shard(self) -> nn.Parameter:
        """What it is now."""
        ...


class ParamGroup:
    """Small parameters of one dtype whose shards lie over the same axes.

    Args:
        members: at least one, each of one dim.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    def start(self) -> ParamGroupUnshard:
        """Start the all-gather of all of them."""
        shards = [member.shard for member in self._members]
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
            return ParamGroupUnshard(self, *deferred_shards(shards))
        return ParamGroupUnshard(self, shards, None)

    def params(self) -> list[ShardedParam]:
        """Of the members, in order."""
        return [member.module.sharded_params[member.name] for member in self._members]

    def put(self, blocks: Sequence[torch.Tensor]) -> None:
        """Give the modules the unsharded parameters."""
        for member, block in zip(self._members, blocks, strict=True):
            member.module.prefetched_params[member.name] = block

    def clear(self) -> None:
        """Let the modules forget them."""
        for member in self._members:
            member.module.prefetched_params.pop(member.name, None)


class ParamGroupUnshard:
    """One all-gather of a group, from its start until the modules have their unsharded parameters."""

    def __init__(self, group: ParamGroup, shards: Sequence[torch.Tensor], deferred: DeferredReduce | None) -> None:
        self._group, self._shards, self.deferred = group, shards, deferred
        self.params = group.params()
        first = self.params[0]
        self.mesh, self.axes = first.mesh, first.layout.fsdp_axes
        row = torch.cat([shard.detach() for shard in shards])
        self._pending: AsyncResult[torch.Tensor] = start_all_gather(row, self.mesh, self.axes)

    def finish(self) -> None:
        """Wait, and give the modules the blocks, differentiably."""
        self._group.put(_Blocks.apply(self, *self._shards))

    def blocks(self) -> tuple[torch.Tensor, ...]:
        """Each parameter's block."""
        widths = [shard.shape[0] for shard in self._shards]
        parts = self._pending.wait().split(widths, 1)
        rows = [param.block_shape[0] for param in self.params]
        return tuple(part.flatten()[:count] for part, count in zip(parts, rows, strict=True))

    def start_reduce_scatter(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The blocks' gradients to the shards'; complete once the deferred reduce was waited for."""
        widths = [shard.shape[0] for shard in self._shards]
        ranks = self.params[0].ranks
        slots = self._shards[0].new_zeros((ranks, sum(widths)))
        for param, gradient, slot in zip(self.params, gradients, slots.split(widths, 1), strict=True):
            if gradient is not None:
                slot.copy_(param.stacked(gradient))
        reducing = start_scatter(slots, self.mesh, self.axes)
        assert self.deferred is not None
        self.deferred.defer(reducing)
        return list(reducing.incomplete().split(widths))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unshard: ParamGroupUnshard, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unshard = unshard
        ctx.set_materialize_grads(False)
        return unshard.blocks()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return None, *gradients
        reduced = ctx.unshard.start_reduce_scatter(gradients)
        needed = ctx.needs_input_grad[1:]
        return None, *(each if wanted else None for each, wanted in zip(reduced, needed, strict=True))
