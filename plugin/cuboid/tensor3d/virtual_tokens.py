"""Trained vectors that stand before each row's tokens (prompt tuning, arXiv 2104.08691), ``[n, H]``.

A row's virtual tokens have ids of their own, beyond any vocabulary, and the embedding gives each its trained vector. So
a row of n more ids is padded, cut into segments and kept in a cache as any other. The vectors' H features are cut over
`hidden` as the table's, the n rows over the axes that are left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.token_rows import rows_spec

#: The id of the first virtual token: no vocabulary reaches it, and it fits into 32 bits.
FIRST_ID = 2**30


class VirtualTokens(ShardedParameters):
    """The vectors of virtual tokens by the names of their adapters.

    Attributes:
        active: the adapter whose tokens the ids are.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.active: str | None = None

    def add(self, name: str, vectors: nn.Parameter, table: nn.Embedding) -> None:
        """Keep this rank's shard of an adapter's vectors ``[n, H]``."""
        like = table.sharded_params["weight"] if isinstance(table, ShardedModule) else None
        self.take(name, vectors, rows_spec(*vectors.shape), like)

    def put_into(self, vectors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Replace those vectors ``[B/b, S/s, H/h]``, of ids ``[B/b, S]``, that belong to virtual tokens."""
        if self.active is None:
            return vectors
        numbers = own_slice(ids, SEQUENCE_DIM, self.mesh.along("sequence")) - FIRST_ID
        block = self.unsharded(self.active)
        virtual = nn.functional.embedding(numbers.clamp(min=0), block)
        return torch.where((numbers >= 0).unsqueeze(-1), virtual.to(vectors.dtype), vectors)


class PromptedEmbedding(nn.Module):
    """Mixed into the class of a model's embedding of tokens."""

    virtual_tokens: VirtualTokens

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the embedding; ids of virtual tokens have the vectors of the active adapter."""
        known = ids.masked_fill(ids >= FIRST_ID, 0)
        return self.virtual_tokens.put_into(super().forward(known, *args, **kwargs), ids)


def virtual_tokens_of(embedding: nn.Module, mesh: Mesh) -> VirtualTokens:
    """The virtual tokens of an embedding, which takes ids of such from then on."""
    if not isinstance(embedding, PromptedEmbedding):
        cls = type(embedding)
        embedding.__class__ = type(cls.__name__, (PromptedEmbedding, cls), {"__module__": cls.__module__})
        embedding.virtual_tokens = VirtualTokens(mesh)
    tokens: Any = embedding.virtual_tokens
    assert isinstance(tokens, VirtualTokens)
    return tokens
