"""Several parameters in one collective, where each by itself would be too small to be worth one.

Large ones travel alone, without being copied into a common buffer and out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cuboid.distributed.async_result import Pending
from cuboid.distributed.axis_collectives import start_all_gather, start_scatter_parts
from cuboid.tensor3d.sharding.sharded_param import ParameterGather

#: Of shards that share a collective, together. A network needs longer for it than for starting it.
_BUNDLE_BYTES = 1 << 20


def start_gathers(gathers: Sequence[ParameterGather], shards: Sequence[torch.Tensor]) -> None:
    """Start to gather blocks that will be used in this order; those that are there or on their way are left alone."""
    missing = [(gather, shard) for gather, shard in zip(gathers, shards, strict=True) if gather.needs(shard)]
    for members in _bundles(missing):
        if len(members) == 1:
            members[0][0].start(members[0][1])
        else:
            _start_bundle(members)


def _start_bundle(members: Sequence[tuple[ParameterGather, torch.Tensor]]) -> None:
    first = members[0][0]
    row = torch.cat([shard.detach().flatten() for _, shard in members])
    rows = start_all_gather(row, first.mesh, first.layout.storage)
    start = 0
    for gather, shard in members:
        gather.expect(shard, rows.then(_Part(start, shard)))
        start += shard.numel()


class _Part:
    """Takes one parameter out of the ranks' rows."""

    def __init__(self, start: int, shard: torch.Tensor) -> None:
        self._own, self._shape = slice(start, start + shard.numel()), shard.shape

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self._own].unflatten(1, self._shape)


def start_reductions(
    gathers: Sequence[ParameterGather], gradients: Sequence[torch.Tensor]
) -> list[Pending[torch.Tensor]]:
    """Start to sum blocks' gradients, and leave each rank its shards'; in order."""
    found: list[Pending[torch.Tensor]] = []
    for members in _bundles(list(zip(gathers, gradients, strict=True)), of_blocks=True):
        first = members[0][0]
        if len(members) == 1 or first.ranks == 1:
            found += [gather.start_reduce(gradient) for gather, gradient in members]
            continue
        stacked = [gather.stacked(gradient) for gather, gradient in members]
        rows = torch.cat([each.flatten(1) for each in stacked], 1)
        reducing = start_scatter_parts(rows, [each.shape[1:] for each in stacked], first.mesh, first.layout.storage)
        found += [reducing.giving(own) for own in reducing.incomplete()]
    return found


def _bundles(
    members: Sequence[tuple[ParameterGather, torch.Tensor]], *, of_blocks: bool = False
) -> Iterator[list[tuple[ParameterGather, torch.Tensor]]]:
    """Neighbours that can share a collective, and are small enough together."""
    bundle: list[tuple[ParameterGather, torch.Tensor]] = []
    total = 0
    for gather, tensor in members:
        size = tensor.nbytes // (gather.ranks if of_blocks else 1)
        fits = bundle and total + size <= _BUNDLE_BYTES and _kind(gather, tensor) == _kind(*bundle[0])
        if bundle and not fits:
            yield bundle
            bundle, total = [], 0
        bundle.append((gather, tensor))
        total += size
    if bundle:
        yield bundle


def _kind(gather: ParameterGather, tensor: torch.Tensor) -> tuple[object, ...]:
    return gather.layout.storage, gather.mesh, tensor.dtype
