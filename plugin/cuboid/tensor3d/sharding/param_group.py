"""One gather for the small parameters of a layer, and one reduce-scatter for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.distributed.async_result import Pending
from cuboid.distributed.axis_collectives import start_all_gather, start_scatter
from cuboid.tensor3d.sharding.deferred_reduce import Carry, carried_shards
from cuboid.tensor3d.sharding.sharded_param import ParameterGather, ShardedModule


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


class VectorGroup:
    """Small parameters of one dtype whose shards lie over the same axes.

    Args:
        members: at least one, each of one dim.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    def start(self) -> SharedGather:
        """Begin to gather them all."""
        shards = [member.shard for member in self._members]
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
            return SharedGather(self, *carried_shards(shards))
        return SharedGather(self, shards, None)

    def gathers(self) -> list[ParameterGather]:
        """Of the members, in order."""
        return [member.module.gathers[member.name] for member in self._members]

    def put(self, blocks: Sequence[torch.Tensor]) -> None:
        """Give the modules the gathered parameters."""
        for member, block in zip(self._members, blocks, strict=True):
            member.module.ahead_blocks[member.name] = block

    def clear(self) -> None:
        """Let the modules forget them."""
        for member in self._members:
            member.module.ahead_blocks.pop(member.name, None)


class SharedGather:
    """One gather of a group, from its start until the modules have their blocks."""

    def __init__(self, group: VectorGroup, shards: Sequence[torch.Tensor], carry: Carry | None) -> None:
        self._group, self._shards, self.carry = group, shards, carry
        self.gathers = group.gathers()
        first = self.gathers[0]
        self.mesh, self.axes = first.mesh, first.layout.storage
        row = torch.cat([shard.detach() for shard in shards])
        self._pending: Pending[torch.Tensor] = start_all_gather(row, self.mesh, self.axes)

    def finish(self) -> None:
        """Wait, and give the modules the blocks, differentiably."""
        self._group.put(_Blocks.apply(self, *self._shards))

    def blocks(self) -> tuple[torch.Tensor, ...]:
        """Each parameter's block."""
        widths = [shard.shape[0] for shard in self._shards]
        parts = self._pending.wait().split(widths, 1)
        rows = [gather.layout.block_shape(self.mesh.shape)[0] for gather in self.gathers]
        return tuple(part.flatten()[:count] for part, count in zip(parts, rows, strict=True))

    def start_reduce(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The blocks' gradients to the shards'; complete when the carry was waited for."""
        widths = [shard.shape[0] for shard in self._shards]
        ranks = self.mesh.size(*self.axes)
        slots = self._shards[0].new_zeros((ranks, sum(widths)))
        for gather, gradient, slot in zip(self.gathers, gradients, slots.split(widths, 1), strict=True):
            if gradient is not None:
                slot.copy_(gather.stacked(gradient))
        reducing = start_scatter(slots, self.mesh, self.axes)
        assert self.carry is not None
        self.carry.leave(reducing)
        return list(reducing.incomplete().split(widths))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: SharedGather, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        return gather.blocks()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return None, *gradients
        reduced = ctx.gather.start_reduce(gradients)
        needed = ctx.needs_input_grad[1:]
        return None, *(each if wanted else None for each, wanted in zip(reduced, needed, strict=True))
