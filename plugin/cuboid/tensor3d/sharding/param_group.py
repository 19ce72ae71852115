"""One all-gather for the small parameters of a layer, and one reduce-scatter for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather, start_reduce_scatter
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce, deferred_shards
from cuboid.tensor3d.sharding.kept_blocks import kept_blocks
from cuboid.tensor3d.sharding.sharded_param import FULL_ITEMSIZE, ShardedModule


class Member(Protocol):
    """A parameter, by its module and its name there."""

    @property
    def module(self) -> ShardedModule:
        """The module that has the parameter."""
        ...

    @property
    def name(self) -> str:
        """The parameter's name in the module."""
        ...

    @property
    def shard(self) -> torch.Tensor:
        """The current parameter."""
        ...


class ParamGroup:
    """One or more small parameters, whose blocks are sharded over the same axes."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        self.params = [member.module.sharded_params[member.name] for member in members]

    def start(self) -> Sequence[ParamGroupUnshard | KeptGroup]:
        """Start the all-gather of all of them; one for each dtype that they have now."""
        shards: list[torch.Tensor] = []
        trained, is_mixed = [], False
        for member in self._members:
            shards.append(member.shard)
            trained.append(shards[-1].requires_grad)
            is_mixed |= shards[-1].dtype != shards[0].dtype
        if is_mixed:
            # In one row, the shorter ones would become the longer ones' dtype, and so would all that they multiply.
            return [unshard for group in self._by_dtype(shards) for unshard in group.start()]
        kept = kept_blocks()
        if kept is not None and not torch.is_grad_enabled():
            blocks = kept.find(self, shards)
            return [ParamGroupUnshard(self, shards, None, trained)] if blocks is None else [KeptGroup(self, blocks)]
        if torch.is_grad_enabled() and any(trained):
            return [ParamGroupUnshard(self, *deferred_shards(shards), trained)]
        return [ParamGroupUnshard(self, shards, None, trained)]

    def _by_dtype(self, shards: Sequence[torch.Tensor]) -> list[ParamGroup]:
        # At each start, since scripts may cast some parameters at any time, as PEFT does those of a new adapter.
        members: dict[torch.dtype, list[Member]] = {}
        for member, shard in zip(self._members, shards, strict=True):
            members.setdefault(shard.dtype, []).append(member)
        return list(map(ParamGroup, members.values()))

    def put(self, blocks: Sequence[torch.Tensor]) -> None:
        """Give the modules the unsharded parameters."""
        for member, block in zip(self._members, blocks, strict=True):
            member.module.prefetched_params[member.name] = block

    def clear(self) -> None:
        """Remove the unsharded parameters from the modules."""
        for member in self._members:
            member.module.prefetched_params.pop(member.name, None)


class KeptGroup:
    """In the place of a :class:`ParamGroupUnshard`, blocks that have stayed unsharded."""

    def __init__(self, group: ParamGroup, blocks: Sequence[torch.Tensor]) -> None:
        self._group, self._blocks = group, blocks

    def finish(self) -> None:
        """Give the modules the blocks."""
        self._group.put(self._blocks)


class ParamGroupUnshard:
    """One all-gather of a group, from its start until the modules have their unsharded parameters.

    Args:
        group: the parameters.
        shards: of the parameters, in a graph if there is anything to wait for in backward.
        deferred: waits for their gradients' reduction; None without one.
        trained: which parameters aren't frozen.
    """

    def __init__(
        self,
        group: ParamGroup,
        shards: Sequence[torch.Tensor],
        deferred: DeferredReduce | None,
        trained: Sequence[bool],
    ) -> None:
        self._group, self._shards, self.deferred, self._trained = group, shards, deferred, trained
        self.params = group.params
        first = self.params[0]
        self._along = first.along
        self._sizes: list[int] = []
        rows = []
        for shard in shards:
            self._sizes.append(shard.numel())
            rows.append(shard.detach().ravel())
        # One row with all shards, to [ranks, elements].
        self._pending: AsyncResult[torch.Tensor] = start_all_gather(torch.cat(rows), self._along)

    def finish(self) -> None:
        """Wait, and give the modules the blocks, differentiably."""
        blocks: Sequence[torch.Tensor] = _Blocks.apply(self, *self._shards)
        if self.deferred is not None and not all(self._trained):
            # One node gives all blocks, so that frozen ones would require gradients, too: autograd would compute those,
            # and save more tensors than a recomputation, which unshards each block by itself.
            pairs = zip(blocks, self._trained, strict=True)
            blocks = [block if trains else block.detach() for block, trains in pairs]
        kept = kept_blocks()
        if kept is not None and not torch.is_grad_enabled():
            kept.keep(self._group, self._shards, blocks)
        self._group.put(blocks)

    def blocks(self) -> tuple[torch.Tensor, ...]:
        """Each parameter's block."""
        blocks = []
        parts = self._pending.wait().split(self._sizes, 1)
        for param, part, shard in zip(self.params, parts, self._shards, strict=True):
            # [ranks, elements of a shard] -> [ranks, rows, …] -> [ranks · rows, …], without the last shard's padding
            blocks.append(part.unflatten(1, shard.shape).flatten(0, 1)[: param.block_shape[0]])
        return tuple(blocks)

    def to_reduce(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The blocks' gradients to reduce now, None where there is none; see :meth:`ShardedParam.to_reduce`."""
        pairs = zip(self.params, gradients, strict=True)
        return [None if gradient is None else param.to_reduce(gradient) for param, gradient in pairs]

    def start_reduce_scatter(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Reduce-scatter the blocks' gradients; results are complete once the deferred reduce was waited for.

        Frozen parameters send nothing and get None, as norms do beside adapters.
        """
        # By what is frozen, not by which gradients there are: all ranks must send as much.
        sizes = []
        for trains, size in zip(self._trained, self._sizes, strict=True):
            sizes.append(size if trains else 0)
        # Zeros, for parameters without a gradient: [ranks, elements of a shard of each trained parameter].
        slots = self._shards[0].new_zeros((self.params[0].ranks, sum(sizes)))
        for trains, param, gradient, slot in zip(
            self._trained, self.params, gradients, slots.split(sizes, 1), strict=True
        ):
            if trains and gradient is not None:
                slot.copy_(param.stacked(gradient).flatten(1))
        exchange = slots.dtype.itemsize < FULL_ITEMSIZE and self.params[0].exchanges
        reducing = start_reduce_scatter(slots, self._along, exchange=exchange)
        assert self.deferred is not None
        self.deferred.defer(reducing)
        results: list[torch.Tensor | None] = []
        for trains, shard, part in zip(self._trained, self._shards, reducing.incomplete().split(sizes), strict=True):
            results.append(part.view_as(shard) if trains else None)
        return results


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unshard: ParamGroupUnshard, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unshard = unshard
        ctx.set_materialize_grads(False)
        return unshard.blocks()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ready = gradients if ctx.unshard.params[0].gradient_sync is None else ctx.unshard.to_reduce(gradients)
        # None of the sums is complete before a step's last backward.
        if all(map(is_, ready, repeat(None))):
            return None, *ready
        reduced = ctx.unshard.start_reduce_scatter(ready)
        needs_grad = ctx.needs_input_grad[1:]
        return None, *(gradient if needs else None for gradient, needs in zip(reduced, needs_grad, strict=True))
