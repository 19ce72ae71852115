"""A few rows of an embedding table or a head that are replaced by trained ones, ``[n, H]``.

Their H features are cut over `hidden` as the table's, and the n rows over the axes that are left. Nothing is sent for
an embedding but the block ``[n, H/h]`` itself: each rank replaces the vectors of its own positions. A head's n logits
are partial sums over `hidden`, of positions that are gathered over `sequence` and scattered over `hidden`, as those of
the vocabulary are; each rank puts those of its own columns in their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cuboid.distributed.axis_collectives import own_positions
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.late_gather import GatherPositions
from cuboid.tensor3d.low_rank import ScatterPositions
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def rows_spec(count: int, width: int) -> ShardingSpec:
    """How the rows are cut."""
    return ShardingSpec((count, width), ((), ("hidden",)))


def with_vectors(
    vectors: torch.Tensor,
    ids: torch.Tensor,
    tokens: Sequence[int],
    rows: torch.Tensor,
    mesh: Mesh,
    padding_idx: int | None,
) -> torch.Tensor:
    """Replace the vectors of some tokens.

    Args:
        vectors: of the rank's own positions, ``[B/b, S/s, H/h]``.
        ids: of the whole sequence, ``[B/b, S]``.
        tokens: n of the vocabulary.
        rows: their vectors' block, ``[n, H/h]``.
        mesh: this rank's mesh.
        padding_idx: the token whose vector has no gradient, if there is one.
    """
    own_ids = own_positions(ids, mesh.along("sequence"))
    matches = own_ids.unsqueeze(-1) == torch.tensor(tokens, device=ids.device)
    numbers = matches.to(torch.uint8).argmax(-1)
    padding = tokens.index(padding_idx) if padding_idx in tokens else None
    replaced = nn.functional.embedding(numbers, rows, padding_idx=padding)
    return torch.where(matches.any(-1, keepdim=True), replaced.to(vectors.dtype), vectors)


def with_logits(
    logits: torch.Tensor, hidden: torch.Tensor, tokens: Sequence[int], rows: torch.Tensor, mesh: Mesh
) -> torch.Tensor:
    """Replace the logits of some tokens.

    Args:
        logits: ``[B/b, S/h, V/s]``.
        hidden: what the head was given, ``[B/b, S/s, H/h]``.
        tokens, rows, mesh: see :func:`with_vectors`.
    """
    partial = nn.functional.linear(hidden, rows.to(hidden.dtype))
    replaced = ScatterPositions.apply(GatherPositions.apply(partial, mesh.along("sequence")), mesh.along("hidden"))
    first, count = mesh.index("sequence") * logits.shape[-1], logits.shape[-1]
    here = [number for number, token in enumerate(tokens) if first <= token < first + count]
    columns = torch.tensor([tokens[number] - first for number in here], dtype=torch.int64, device=logits.device)
    chosen = replaced[..., torch.tensor(here, dtype=torch.int64, device=logits.device)]
    return logits.index_copy(-1, columns, chosen.to(logits.dtype))
