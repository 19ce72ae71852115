"""Whole parameters, for code that isn't sharded and computes the same with them on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, put_shard, take_shard


def full_tensor(shard: torch.Tensor, spec: ShardingSpec, mesh: Mesh) -> torch.Tensor:
    """Gather a shard to the tensor in Hugging Face's shape, on every rank. Not differentiable."""
    full = shard.new_empty(spec.shape)
    for rank, piece in zip(mesh.mesh_ranks, all_gather(shard, mesh.along(*AXES)), strict=True):
        put_shard(full, piece, spec, mesh.shape, mesh.topology.coordinate(rank))
    return full


class _GatherParameter(torch.autograd.Function):
    """A shard to the parameter in its Hugging Face shape, on every rank."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, spec: ShardingSpec, mesh: Mesh) -> torch.Tensor:
        ctx.spec, ctx.mesh = spec, mesh
        return full_tensor(shard, spec, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # All ranks compute the same from the full tensor, so that each has its full gradient: nothing to reduce.
        return take_shard(gradient, ctx.spec, ctx.mesh), None, None


def whole_parameter(module: ShardedModule, name: str) -> torch.Tensor | None:
    """A parameter in Hugging Face's shape on every rank, differentiably; None if the module has none of that name.

    All ranks of the mesh must call, and compute the same from the result: its gradient isn't reduced.
    """
    shard = getattr(module, name, None)
    if not isinstance(shard, nn.Parameter):
        return None
    module.mesh.connect()
    full: torch.Tensor = _GatherParameter.apply(shard, module.spec(name), module.mesh)
    return full
