"""Trained vectors that stand before each row's tokens (prompt tuning, arXiv 2104.08691), ``[n, H]``.

A row's virtual tokens have ids of their own, beyond any vocabulary, and the embedding gives each its trained vector. So
a row of n more ids is padded, cut into segments and kept in a cache as any other. The vectors' H features are cut over
`hidden` as the table's, the n rows over the axes that are left.

Or a small network, an encoder, gives the vectors (P-tuning, arXiv 2103.10385). Its parameters are cut over all axes;
each rank gathers them, computes all n vectors and takes the features that it has. Its gradient of them is that of its
own positions and features only, so gradients of the parameters are summed over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import own_positions, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.whole_block import cut_and_keep_whole, unsharded_block
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.token_rows import rows_spec

#: The id of the first virtual token: no vocabulary reaches it, and it fits into 32 bits.
FIRST_ID = 2**30


class VirtualTokens(ShardedParameters):
    """The vectors of virtual tokens by the names of their adapters."""

    def add(self, name: str, vectors: nn.Parameter, table: nn.Embedding) -> None:
        """Keep this rank's shard of an adapter's vectors ``[n, H]``."""
        like = table.sharded_params["weight"] if isinstance(table, ShardedModule) else None
        self.take(name, vectors, rows_spec(*vectors.shape), like)


class PromptedEmbedding(nn.Module):
    """Mixed into the class of a model's embedding of tokens.

    Attributes:
        virtual_tokens: the vectors of adapters that train these themselves.
        prompt_encoders: by the names of their adapters, networks that give the vectors ``[n, H]`` of numbers ``[n]``.
        active_prompt: the adapter whose tokens the ids are.
    """

    virtual_tokens: VirtualTokens
    prompt_encoders: nn.ModuleDict
    active_prompt: str | None

    def add_encoder(self, name: str, encoder: nn.Module) -> None:
        """Keep this rank's shards of an adapter's encoder, which is changed."""
        mesh = self.virtual_tokens.mesh
        for module in [module for module in encoder.modules() if module._parameters]:
            if isinstance(module, nn.LSTM):
                module.__class__ = _UnflattenedLSTM
            cut_and_keep_whole(module, mesh)
            if isinstance(module, _UnflattenedLSTM):
                module._init_flat_weights()
            if isinstance(self, ShardedModule):
                params: Any = module.sharded_params
                for param in params.values():
                    param.follow(self.sharded_params["weight"])
        self.prompt_encoders[name] = encoder

    def encoded(self, name: str, count: int) -> torch.Tensor:
        """All vectors ``[n, H]`` that an adapter's encoder gives; collective."""
        encoder: Any = self.prompt_encoders[name]
        # Ranks have gradients of different vectors: none is the same on several of them.
        with unsharded_block(encoder, same=()):
            vectors: torch.Tensor = encoder(torch.arange(count, device=next(encoder.parameters()).device))
        return vectors

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the embedding, ``[B/b, S]`` to ``[B/b, S/s, H/h]``; virtual tokens have the active adapter's vectors."""
        known = ids.masked_fill(ids >= FIRST_ID, 0)
        vectors: torch.Tensor = super().forward(known, *args, **kwargs)
        if self.active_prompt is None:
            return vectors
        mesh = self.virtual_tokens.mesh
        numbers = own_positions(ids, mesh.along("sequence")) - FIRST_ID
        if self.active_prompt in self.prompt_encoders:
            encoder: Any = self.prompt_encoders[self.active_prompt]
            block = self.encoded(self.active_prompt, encoder.total_virtual_tokens)
            block = own_slice(block, block.dim() - 1, mesh.along("hidden"))
        else:
            block = self.virtual_tokens.unsharded(self.active_prompt)
        virtual = nn.functional.embedding(numbers.clamp(min=0), block)
        return torch.where((numbers >= 0).unsqueeze(-1), virtual.to(vectors.dtype), vectors)


class _UnflattenedLSTM(nn.LSTM):
    """An LSTM whose parameters may be others each time that it runs."""

    def flatten_parameters(self) -> None:
        """Nothing: shards aren't what kernels of GPUs want in one piece of memory."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As the LSTM."""
        # Torch's keeps references to those that it was made with.
        former = self._flat_weights
        self._flat_weights = [self._parameters[name] for name in self._flat_weights_names]
        try:
            return super().forward(input, hx)
        finally:
            self._flat_weights = former


def with_virtual_tokens(embedding: nn.Module, mesh: Mesh) -> PromptedEmbedding:
    """The embedding, which from then on takes ids of virtual tokens."""
    if not isinstance(embedding, PromptedEmbedding):
        cls = type(embedding)
        embedding.__class__ = type(cls.__name__, (PromptedEmbedding, cls), {"__module__": cls.__module__})
        embedding.virtual_tokens, embedding.prompt_encoders = VirtualTokens(mesh), nn.ModuleDict()
        vars(embedding)["active_prompt"] = None
    assert isinstance(embedding, PromptedEmbedding)
    return embedding
