"""Bucketing: several small parameters share one collective.

Large ones have a collective each, which saves the copies into a common buffer and out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather, start_reduce_scatter_parts
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm, start_largest
from cuboid.tensor3d.sharding.sharded_param import FULL_ITEMSIZE, ShardedModule, ShardedParam

#: Maximum bytes of the shards in a bucket: to transfer them takes a network longer than to start a collective.
_BUCKET_BYTES = 1 << 20


def start_unshards(
    params: Sequence[ShardedParam], shards: Sequence[torch.Tensor], form: BlockForm = BlockForm.WIDE
) -> None:
    """Start to unshard blocks in the order of their use; blocks that exist or are in flight are skipped."""
    shard_of, messages = dict(zip(params, shards, strict=True)), []
    for param, shard in shard_of.items():
        if param.needs_unshard(shard, form):
            messages.append((param, shard.detach() if param.fp8 is None else param.message(shard, form)))
    for members in _buckets(messages):
        param, message = members[0]
        if len(members) == 1:
            param.expect_unshard(shard_of[param], start_all_gather(message, param.along), form)
            continue
        rows, start = start_all_gather(torch.cat([message.flatten() for _, message in members]), param.along), 0
        for param, message in members:
            part = AsyncResult[torch.Tensor](message, change=_BucketPart(rows, start))
            param.expect_unshard(shard_of[param], part, form)
            start += message.numel()


def find_largest(
    params: Sequence[ShardedParam], shards: Sequence[torch.Tensor], *, is_recomputed: bool, needed: bool
) -> None:
    """In a forward, start to find the largest elements of columns, by which backward rounds blocks before it sends
    them. One message for each axis.

    Args:
        params: of one input's products; they forget what the forward before has found.
        shards: theirs.
        is_recomputed: whether the forward will be recomputed.
        needed: whether backward multiplies by the blocks.
    """
    by_ranks: dict[int, list[tuple[ShardedParam, torch.Tensor]]] = {}
    for param, shard in zip(params, shards, strict=True):
        param.largest, param.is_recomputed = None, is_recomputed
        if needed and param.form(BlockForm.COLUMNS) is BlockForm.COLUMNS:
            by_ranks.setdefault(id(param.along), []).append((param, shard))
    for members in by_ranks.values():
        start_largest(*zip(*members, strict=True))


class _BucketPart:
    """Cuts one parameter's shards out of a gathered bucket ``[ranks, elements]``."""

    def __init__(self, rows: AsyncResult[torch.Tensor], start: int) -> None:
        self._rows, self._start = rows, start

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        return self._rows.wait().narrow(1, self._start, shard.numel()).unflatten(1, shard.shape)


def start_reduce_scatters(
    params: Sequence[ShardedParam], gradients: Sequence[torch.Tensor]
) -> list[AsyncResult[torch.Tensor]]:
    """Start to reduce-scatter the gradients of blocks; results in the order of ``params``."""
    results: list[AsyncResult[torch.Tensor]] = []
    for members in _buckets(list(zip(params, gradients, strict=True)), of_blocks=True):
        first = members[0][0]
        if len(members) == 1 or first.ranks == 1:
            results += [param.start_reduce_scatter(gradient) for param, gradient in members]
            continue
        # [ranks, elements]: each rank's slices of all members, one after another.
        stacked = [param.stacked(gradient) for param, gradient in members]
        rows = torch.cat([blocks.flatten(1) for blocks in stacked], 1)
        exchange = rows.dtype.itemsize < FULL_ITEMSIZE and first.exchanges
        shapes = [blocks.shape[1:] for blocks in stacked]
        reducing = start_reduce_scatter_parts(rows, shapes, first.along, exchange=exchange)
        results += [AsyncResult(gradient, finish=reducing.wait) for gradient in reducing.incomplete()]
    return results


def reduce_rest(model: nn.Module) -> None:
    """At the end of a step, reduce and accumulate sums of parameters that its last backward didn't use. Collective."""
    leftovers = []
    for module in (module for module in model.modules() if isinstance(module, ShardedModule)):
        for name, param in module.sharded_params.items():
            total = None if param.gradient_sync is None else param.gradient_sync.take(param)
            if total is not None:
                leftovers.append((param, module.get_parameter(name), total))
    reducing = start_reduce_scatters([param for param, _, _ in leftovers], [total for _, _, total in leftovers])
    for (_, parameter, _), reduced in zip(leftovers, reducing, strict=True):
        # Through autograd, so that the hooks of frameworks see the gradient.
        torch.autograd.backward(parameter, reduced.wait().to(parameter.dtype))


def _buckets(
    members: Sequence[tuple[ShardedParam, torch.Tensor]], *, of_blocks: bool = False
) -> Iterator[list[tuple[ShardedParam, torch.Tensor]]]:
    """Group neighbours with the same ranks and dtype into buckets of at most ``_BUCKET_BYTES``."""
    bucket: list[tuple[ShardedParam, torch.Tensor]] = []
    total = 0
    for param, tensor in members:
        size = tensor.nbytes // (param.ranks if of_blocks else 1)
        if bucket:
            first_param, first_tensor = bucket[0]
            is_alike = param.along is first_param.along and tensor.dtype == first_tensor.dtype
            if not is_alike or total + size > _BUCKET_BYTES:
                yield bucket
                bucket, total = [], 0
        bucket.append((param, tensor))
        total += size
    if bucket:
        yield bucket
