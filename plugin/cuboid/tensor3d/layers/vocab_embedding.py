"""Embedding tables split over the vocabulary (or positions) and the hidden dim.

The table ``[V, H]`` is cut over `sequence`, then `batch`, along V and over `hidden` along H, exactly as the LM head, so
that tied weights are one parameter. Each rank looks up ids in its rows and leaves zeros for others: a partial sum over
`sequence`, which is reduce-scattered onto the sequence dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import (
    SEQUENCE_DIM,
    all_reduce,
    gather_dim,
    positions_are_whole,
    rows_are_alike,
    scatter_dim,
)
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import RANK_ORDER
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def _look_up_in_shards(ids: torch.Tensor, weight: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """Vectors ``[B/b, S, …]`` of a table that stays sharded: each rank looks up the ids of all rows in its own rows."""
    mesh, batch, sequence = param.mesh, param.mesh.along("batch"), param.mesh.along("sequence")
    (block_rows, *_), (height, *_) = param.block_shape, weight.shape
    start = param.along.index * height
    all_ids = ids if rows_are_alike() else gather_dim(ids, 0, batch)
    local = all_ids - sequence.index * block_rows - start
    # The last shard may be padded.
    elsewhere = (local < 0) | (local >= min(height, block_rows - start))
    vectors = nn.functional.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
    axes = {*param.along.axes, *sequence.axes}
    total = all_reduce(vectors, mesh.along(*(axis for axis in RANK_ORDER if axis in axes)))
    return total if rows_are_alike() else total[batch.index * len(ids) : (batch.index + 1) * len(ids)]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, param: ShardedParam, padding_idx: int | None
    ) -> torch.Tensor:
        along = param.mesh.along("sequence")
        if positions_are_whole() and param.ranks > 1:
            return _look_up_in_shards(ids, weight, param)
        with param.unshard(weight) as block:
            rows = block.shape[0]
            local = ids - along.index * rows
            elsewhere = (local < 0) | (local >= rows)
            vectors = nn.functional.embedding(local.masked_fill(elsewhere, 0), block)
        # Backward adds the gradients of padding and of other ranks' ids to an extra row, `rows`, and drops it.
        without_row = elsewhere if padding_idx is None else elsewhere | (ids == padding_idx)
        ctx.save_for_backward(local.masked_fill(without_row, rows))
        ctx.param, ctx.rows = param, rows
        if along.size > 1:
            vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        # Not by `scatter_positions`: a call less in each step.
        return all_reduce(vectors, along) if positions_are_whole() else scatter_dim(vectors, SEQUENCE_DIM, along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        param: ShardedParam = ctx.param
        gradient = gather_dim(gradient, SEQUENCE_DIM, param.mesh.along("sequence"))
        table = torch.ops.aten.embedding_dense_backward(gradient.contiguous(), local, ctx.rows + 1, -1, False)
        return None, param.reduce_scatter(table[: ctx.rows]), None, None


def look_up(ids: torch.Tensor, weight: torch.Tensor, param: ShardedParam, padding_idx: int | None) -> torch.Tensor:
    """Vectors of the rank's own positions, ``[B/b, S/s, …]``, of ids ``[B/b, S]`` in a table cut over its rows."""
    vectors: torch.Tensor = _LookUp.apply(ids, weight, param, padding_idx)
    return vectors


class ShardedEmbedding(ShardedModule, nn.Embedding):
    """``[B/b, S]`` ids to ``[B/b, S/s, H/h]``. Ids of the whole sequence go in, the rank's part comes out."""

    # Of the class: set on an instance they would have no effect, which is an error.
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(self, weight: nn.Parameter, *, mesh: Mesh, spec: ShardingSpec, padding_idx: int | None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = spec.shape
        self.padding_idx = padding_idx
        self.weight = weight
        self.init_sharding(mesh, {"weight": spec})

    @uncompiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ``ids``; S must be divisible by the `sequence` axis.

        The model checks that ids are in the table (``models/batch/batch_check.py``); here, others would yield zeros.
        """
        if not forward_runs():
            check_called_inside(self, self.mesh)
        param = self.sharded_params["weight"]
        if param.optimizer_steps is not None:
            param.set_parameter(self.weight)
        # Not by `look_up`: a call less in each step.
        vectors: torch.Tensor = _LookUp.apply(ids, self.weight, param, self.padding_idx)
        return vectors

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mesh={self.mesh.shape}"


def shard_embedding(old: nn.Embedding, weight: nn.Parameter, *, mesh: Mesh, spec: ShardingSpec) -> nn.Embedding:
    """The sharded version of an embedding, with the shard ``weight``.

    An instance of a subclass, which may do more than look up, such as scale rows or shift ids, is changed in place and
    keeps its other attributes.
    """
    if type(old) is nn.Embedding:
        return ShardedEmbedding(weight, mesh=mesh, spec=spec, padding_idx=old.padding_idx)
    cls = type(old)
    # Ours follows its own class in the MRO, so that its ``super().forward(ids)`` looks up in the shards.
    old.__class__ = type(cls.__name__, (cls, ShardedEmbedding), {"__module__": cls.__module__})
    new: Any = old
    new.register_parameter("weight", weight)
    new.init_sharding(mesh, {"weight": spec})
    return new
