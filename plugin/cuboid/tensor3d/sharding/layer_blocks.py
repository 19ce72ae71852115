"""The unsharded weights of a layer as plain tensors, for code that autograd sees as one operation: a compiled layer.

A product of its own saves shards and unshards them again in backward. A compiled layer saves its inputs, and those are
blocks. So each block has a storage of its own, which is freed after the layer's forward, and allocated and filled again
before its backward: what was saved has the same values then (FSDP2 does the same, ``torch.distributed.fsdp``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather_into
from cuboid.tensor3d.sharding.bucketing import start_reduce_scatters
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.param_group import Member
from cuboid.tensor3d.sharding.sharded_param import ShardedParam


class Weight(Member, Protocol):
    """A sharded weight, by its module and its name there."""

    @property
    def param(self) -> ShardedParam:
        """How it is sharded."""
        ...


class _Block:
    """One weight's block. Storages are kept by dtype: a graph's backward needs the one that its forward had."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self._stacked: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._pending: AsyncResult[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        return _Block(copy.deepcopy(self.weight, memo))

    def start(self, shard: torch.Tensor, *, anew: bool) -> None:
        """Start to gather; unless ``anew``, only if the block isn't there."""
        self.wait()
        stacked = self._of(shard)
        storage = stacked.untyped_storage()
        if storage.size() and not anew:
            return
        storage.resize_(stacked.nbytes)
        # `data` has a version counter of its own: what autograd has saved of the block isn't changed, but restored.
        self._pending = start_all_gather_into(stacked.data, shard.detach(), self.weight.param.along)

    def wait(self) -> None:
        """Wait for the gather in flight, if there is one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """The block ``[rows, …]``, without the last shard's padding; a tensor of its own over the same storage."""
        return self._of(shard).data.flatten(0, 1)[: self.weight.param.block_shape[0]]

    def free(self) -> None:
        """Free the storages; tensors over them have no values until the next gather."""
        self.wait()
        for stacked in self._stacked.values():
            stacked.untyped_storage().resize_(0)

    def _of(self, shard: torch.Tensor) -> torch.Tensor:
        key = shard.dtype, shard.device
        if key not in self._stacked:
            # The first forward may be one of inference, whose tensors no later graph could save.
            with torch.inference_mode(False):
                stacked = torch.empty((self.weight.param.ranks, *shard.shape), dtype=shard.dtype, device=shard.device)
            stacked.untyped_storage().resize_(0)
            self._stacked[key] = stacked
        return self._stacked[key]


class LayerBlocks:
    """The blocks of one layer's weights."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._blocks = [_Block(weight) for weight in weights]
        self._shards: Sequence[torch.Tensor] = ()

    def start(self, shards: Sequence[torch.Tensor]) -> None:
        """Start to unshard the weights for a forward, in the dtypes of these shards."""
        self._shards = shards
        for block, shard in zip(self._blocks, shards, strict=True):
            block.start(shard, anew=True)

    def put(self) -> None:
        """Wait, and give the modules their blocks, differentiably where their shards are in a graph."""
        trained, shards, deferrals = [], [], []
        for block, shard in zip(self._blocks, self._shards, strict=True):
            block.wait()
            module, name = block.weight.module, block.weight.name
            in_graph = module.prefetched_shards.pop(name, None)
            if in_graph is None:
                module.prefetched_params[name] = block.view(shard)
            else:
                trained.append(block)
                shards.append(in_graph[0])
                deferrals.append(in_graph[1])
        self._shards = ()
        if trained:
            # All shards of a layer share one deferred reduce.
            views = _UnshardLayer.apply(_BlocksCall(trained, deferrals[0], self.free), *shards)
            for block, view in zip(trained, views, strict=True):
                block.weight.module.prefetched_params[block.weight.name] = view

    def clear(self) -> None:
        """Remove the blocks from the modules."""
        for block in self._blocks:
            block.weight.module.prefetched_params.pop(block.weight.name, None)

    def start_backward(self, shards: Sequence[torch.Tensor]) -> None:
        """Start to unshard what isn't unsharded for a backward, which needs the last weight first."""
        for block, shard in zip(reversed(self._blocks), reversed(shards), strict=True):
            block.start(shard, anew=False)

    def wait(self) -> None:
        """Wait for all blocks in flight."""
        for block in self._blocks:
            block.wait()

    def free(self) -> None:
        """Free all blocks."""
        for block in self._blocks:
            block.free()


class _BlocksCall:
    """What the backward of one forward's blocks needs."""

    def __init__(self, blocks: Sequence[_Block], deferred: DeferredReduce, free: Callable[[], None]) -> None:
        self.blocks, self.deferred, self.free = blocks, deferred, free

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Start to reduce-scatter the blocks' gradients; complete when the deferred reduce is waited for."""
        numbers = [number for number, gradient in enumerate(gradients) if gradient is not None]
        params = [self.blocks[number].weight.param for number in numbers]
        reducing = start_reduce_scatters(params, [gradient for gradient in gradients if gradient is not None])
        reduced: list[torch.Tensor | None] = [None] * len(self.blocks)
        for number, pending in zip(numbers, reducing, strict=True):
            self.deferred.defer(pending)
            reduced[number] = pending.incomplete()
        return reduced


class _UnshardLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _BlocksCall, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        # A weight that the layer didn't use has no gradient.
        ctx.set_materialize_grads(False)
        return tuple(block.view(shard) for block, shard in zip(call.blocks, shards, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # The layer's backward, which needs the blocks, is done: it gave these gradients.
        ctx.call.free()
        return None, *ctx.call.reduce(gradients)


class Enter(torch.autograd.Function):
    """The identity of a layer's input, whose backward runs after the layer's and frees its blocks."""

    @staticmethod
    def forward(ctx: Any, blocks: LayerBlocks, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        ctx.blocks = blocks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        """The same gradient."""
        ctx.blocks.free()
        return None, gradient


class Leave(torch.autograd.Function):
    """The identity of a layer's outputs, whose backward runs before the layer's: ``begin`` unshards its blocks."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        ctx.begin = begin
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The same gradients."""
        ctx.begin()
        return None, *gradients
