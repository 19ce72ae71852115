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
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.sharding.bucketing import find_largest, start_reduce_scatters
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm, Fp8Blocks
from cuboid.tensor3d.sharding.param_group import Member
from cuboid.tensor3d.sharding.sharded_param import ShardedParam, is_recomputing


class Weight(Member, Protocol):
    """A sharded weight, by its module and its name there."""

    @property
    def param(self) -> ShardedParam:
        """How it is sharded."""
        ...


class _Storage:
    """A tensor ``[ranks, ...]`` that gathers fill, whose memory is freed between them."""

    def __init__(self, ranks: int, message: torch.Tensor) -> None:
        # The first forward may be one of inference, whose tensors no later graph could save.
        with torch.inference_mode(False):
            self.stacked = torch.empty((ranks, *message.shape), dtype=message.dtype, device=message.device)
        self.stacked.untyped_storage().resize_(0)

    @property
    def is_filled(self) -> bool:
        return bool(self.stacked.untyped_storage().size())

    def start(self, message: torch.Tensor, along: AxisGroup) -> AsyncResult[Any]:
        """Start to gather."""
        self.stacked.untyped_storage().resize_(self.stacked.nbytes)
        # `data` has a version counter of its own: what autograd has saved of the block isn't changed, but restored.
        return start_all_gather_into(self.stacked.data, message, along)

    def free(self) -> None:
        self.stacked.untyped_storage().resize_(0)


class _Block:
    """One weight's block. Storages are kept by dtype: a graph's backward needs the one that its forward had."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self._storages: dict[tuple[torch.dtype, torch.device], _Storage] = {}
        self._pending: AsyncResult[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        return _new_block(copy.deepcopy(self.weight, memo))

    def start(self, shard: torch.Tensor) -> None:
        """Start to gather for a forward."""
        self._start(shard, anew=True)

    def start_backward(self, shard: torch.Tensor) -> None:
        """Start to gather for a backward, if the block isn't there."""
        self._start(shard, anew=False)

    def _start(self, shard: torch.Tensor, *, anew: bool) -> None:
        self.wait()
        storage = self._of(shard)
        if anew or not storage.is_filled:
            self._pending = storage.start(shard.detach(), self.weight.param.along)

    def wait(self) -> None:
        """Wait for the gather in flight, if there is one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """The block ``[rows, …]``, without the last shard's padding; a tensor of its own over the same storage."""
        return self._of(shard).stacked.data.flatten(0, 1)[: self.weight.param.block_shape[0]]

    @property
    def messages(self) -> tuple[torch.Tensor | None, ...]:
        """What a graph is given beside the block."""
        return ()

    def free(self) -> None:
        """Free the storages; tensors over them have no values until the next gather."""
        self.wait()
        for storage in self._storages.values():
            storage.free()

    def _of(self, shard: torch.Tensor) -> _Storage:
        key = shard.dtype, shard.device
        if key not in self._storages:
            self._storages[key] = _Storage(self.weight.param.ranks, shard)
        return self._storages[key]


class _Fp8Block(_Block):
    """A block that is gathered in fp8: by rows for forward, by columns for backward.

    A recomputation in a graph needs rows again. So both are gathered before the backward of a layer that is
    checkpointed.
    """

    def __init__(self, weight: Weight, fp8: Fp8Blocks) -> None:
        super().__init__(weight)
        self._fp8 = fp8
        #: Whether a graph's backward has ever begun with the layer's forward.
        self.is_recomputed = False
        self._rows: _Storage | None = None
        self._filling: list[AsyncResult[Any]] = []

    @property
    def _is_wide(self) -> bool:
        return self.weight.param.form(BlockForm.ROWS) is BlockForm.WIDE

    def _start(self, shard: torch.Tensor, *, anew: bool) -> None:
        if self._is_wide:
            super()._start(shard, anew=anew)
            return
        self.wait()
        param, rows = self.weight.param, self._prepared(shard)
        if anew or (self.is_recomputed and not rows.is_filled):
            self._filling.append(rows.start(self._fp8.rows_message(shard.detach()), param.along))
        if not anew and not self._columns.is_filled:
            message = param.message(shard, BlockForm.COLUMNS)
            self._filling.append(self._columns.start(message, param.along))
            self._largest.data.copy_(param.largest.wait())

    def _prepared(self, shard: torch.Tensor) -> _Storage:
        if self._rows is None:
            param, fp8 = self.weight.param, self._fp8
            with torch.inference_mode(False):
                plain = shard.detach()
                self._largest = torch.zeros_like(fp8.largest(plain))
                self._order = None if fp8.order is None else fp8.order.to(shard.device)
                #: Instead of the block: NaN reveals whatever computes with it.
                self._values = plain.new_full((), torch.nan)
                self._columns = _Storage(param.ranks, plain.new_empty(plain.numel(), dtype=torch.uint8))
                self._rows = _Storage(param.ranks, fp8.rows_message(plain))
        return self._rows

    def wait(self) -> None:
        super().wait()
        for filling in self._filling:
            filling.wait()
        self._filling.clear()

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        if self._is_wide:
            return super().view(shard)
        # Through `data`, so that it is no view.
        return self._values.expand(self.weight.param.block_shape).data

    @property
    def messages(self) -> tuple[torch.Tensor | None, ...]:
        if self._is_wide or self._rows is None:
            return ()
        return self._rows.stacked.data, self._columns.stacked.data, self._largest.data, self._order

    def free(self) -> None:
        super().free()
        if self._rows is not None:
            self._rows.free()
            self._columns.free()


def _new_block(weight: Weight) -> _Block:
    return _Block(weight) if weight.param.fp8 is None else _Fp8Block(weight, weight.param.fp8)


class LayerBlocks:
    """The blocks of one layer's weights."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._blocks = [_new_block(weight) for weight in weights]
        self._shards: Sequence[torch.Tensor] = ()

    def start(self, shards: Sequence[torch.Tensor], *, is_recomputed: bool = False) -> None:
        """Start to unshard the weights for a forward, in the dtypes of these shards.

        ``is_recomputed`` says whether the graph's backward begins with the layer's forward.
        """
        self._shards = shards
        for block, shard in zip(self._blocks, shards, strict=True):
            block.start(shard)
        in_fp8 = [
            (block, shard) for block, shard in zip(self._blocks, shards, strict=True) if isinstance(block, _Fp8Block)
        ]
        for block, _ in in_fp8:
            block.is_recomputed |= is_recomputed
        if in_fp8 and not is_recomputing():
            params, parts = [block.weight.param for block, _ in in_fp8], [shard for _, shard in in_fp8]
            find_largest(params, parts, is_recomputed=False, needed=torch.is_grad_enabled())

    def put(self) -> None:
        """Wait, and give the modules their blocks, differentiably where their shards are in a graph."""
        trained, shards, deferrals = [], [], []
        for block, shard in zip(self._blocks, self._shards, strict=True):
            block.wait()
            module, name = block.weight.module, block.weight.name
            if block.messages:
                module.prefetched_fp8[name] = block.messages
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
            block.weight.module.prefetched_fp8.pop(block.weight.name, None)

    def start_backward(self, shards: Sequence[torch.Tensor]) -> None:
        """Start to unshard what isn't unsharded for a backward, which needs the last weight first."""
        for block, shard in zip(reversed(self._blocks), reversed(shards), strict=True):
            block.start_backward(shard)

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
