"""A low-rank update of an embedding table, cut as finely as the table.

The update of a token's vector is B a, where a is the token's column of A ``[r, V]``, B is ``[H, r]``, and r is small.
A is kept as rows of tokens, Aᵀ ``[V, r]``, cut as the table's rows are. Each rank looks ids up in its rows and leaves
zeros for others, as in the table itself; so what is sent are r features of each token, never the hidden dim:

=========  =============  ====================  ============  ==========================
ids        block of Aᵀ    Z before B            block of B    what gives Z
=========  =============  ====================  ============  ==========================
[B/b, S]   [V/s, r]       [B/b, S/s, r]         [H/h, r]      scatter along the sequence
=========  =============  ====================  ============  ==========================

Each rank's gradient of Z is a partial sum over `hidden`, whose ranks have other rows of B. It isn't summed: that of Aᵀ
is reduced over `hidden` anyway, which cuts the shards of a block.
"""

from __future__ import annotations

import torch
from torch import nn

from cuboid.tensor3d.layers.vocab_embedding import look_up
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def row_spec(vocabulary: int, r: int) -> ShardingSpec:
    """How Aᵀ is cut: its rows are those of the table's block."""
    return ShardingSpec((vocabulary, r), (("sequence",), ()), ragged=True)


def factor_b_spec(width: int, r: int) -> ShardingSpec:
    """How B is cut: as the hidden dim."""
    return ShardingSpec((width, r), (("hidden",), ()))


class TokenRows(ShardedParameters):
    """The factors A of adapters, each kept as ``[V, r]``; a state dict of whole ones has ``[r, V]``."""

    is_transposed = True


def low_rank_vectors(
    ids: torch.Tensor, rows: TokenRows, factors: ShardedParameters, name: str, padding_idx: int | None
) -> torch.Tensor:
    """The updates of the rank's own tokens, ``[B/b, S/s, H/h]``, for ids of the whole sequence, ``[B/b, S]``."""
    param = rows.sharded_params[name]
    if param.optimizer_steps is not None:
        param.set_parameter(rows.get_parameter(name))
    z = look_up(ids, rows.get_parameter(name), param, padding_idx)
    return nn.functional.linear(z, factors.unsharded(name))
