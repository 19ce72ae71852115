"""Activation memory of a layer, and memory of a rank's parameters and optimizer states, by closed formulas.

docs/formulas.md has them as tables; tests/planner/test_memory_formula.py compares them with what autograd saves in
running models. They hold without dropout and activation checkpointing, for attention kernels that don't keep the
scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cuboid.distributed.topology import MeshShape
from cuboid.planner.comm_formula import BlockSizes

#: What keeps activations: inputs of linear layers, attention between its projections, norms, the MLP's nonlinearity.
Keeper = Literal["linear_inputs", "attention", "norms", "nonlinearity"]


@dataclass(frozen=True)
class KeptSizes:
    """Sizes that determine a layer's memory, besides :class:`~cuboid.planner.comm_formula.BlockSizes`.

    Args:
        query_heads: of the full model.
        key_value: key (or value) features that this rank's attention reads: heads × head dim.
        nonlinearity: number of tensors of F features that the MLP keeps between its projections. 3 for silu(gate) · up:
            gate, up, and silu(gate); 1 for a GELU that is one kernel; 4 for GPT-2's, which is composed of several.
        head_norms: whether queries and keys have a norm for each head.
    """

    query_heads: int
    key_value: int
    nonlinearity: int
    head_norms: bool = False


def state_bytes(
    parameters: int, mesh: MeshShape, *, element_bytes: int = 2, optimizer_bytes: int = 12
) -> dict[Literal["parameters", "gradients", "optimizer"], int]:
    """Bytes of a rank's parameters, gradients and optimizer states between steps, without padding of uneven shards.

    Args:
        parameters: number of parameters of the full model.
        mesh: b × s × h; each parameter has one owner in it.
        element_bytes: of a parameter, and of its gradient.
        optimizer_bytes: per parameter: 8 for Adam's two moments in float32, 12 with float32 master weights.
    """
    share = parameters // mesh.size
    return {
        "parameters": share * element_bytes,
        "gradients": share * element_bytes,
        "optimizer": share * optimizer_bytes,
    }


def layer_kept_bytes(
    sizes: BlockSizes, kept: KeptSizes, mesh: MeshShape, batch: int, length: int, *, element_bytes: int = 2
) -> dict[Keeper, int]:
    """Bytes of activations that one layer saves for backward on a rank.

    Args:
        sizes, kept: sizes of the layer.
        mesh: b × s × h.
        batch: rows of the mesh's micro-batch, a multiple of b.
        length: sequence length, a multiple of s and of h.
        element_bytes: of an activation or weight.
    """
    tokens = batch // mesh.batch * length
    ranks = mesh.sequence * mesh.hidden
    residual = tokens * sizes.hidden // ranks * element_bytes
    query, inner = (tokens * features // ranks * element_bytes for features in (sizes.query, sizes.intermediate))
    key_value = tokens * kept.key_value * element_bytes
    heads = tokens * kept.query_heads // ranks
    wide = statistic_bytes(element_bytes)
    attention = query + 2 * key_value + heads * wide
    if kept.head_norms:
        attention += _head_norms(sizes, kept, mesh, tokens, element_bytes)
    return {
        # The shared input of each block's "up" projections; that of o, which is attention's output; that of "down".
        "linear_inputs": 2 * residual + query + inner,
        "attention": attention,
        "norms": 2 * norm_kept_bytes(sizes.hidden, sizes.norm, mesh, tokens, element_bytes),
        "nonlinearity": kept.nonlinearity * inner,
    }


def block_bytes(
    shape: tuple[int, int], kind: Literal["up", "down", "head"], mesh: MeshShape, element_bytes: int
) -> int:
    """Size of a weight's unsharded block, with which a rank multiplies.

    ``shape`` is that of the full weight: ``[out, in]``; ``[V, H]`` for the head.
    """
    rows, columns = shape
    if kind == "up":
        return rows // mesh.sequence * (columns // mesh.hidden) * element_bytes
    if kind == "down":
        return rows // mesh.hidden * (columns // mesh.sequence) * element_bytes
    return whole_shards(math.ceil(rows / mesh.sequence), mesh.batch) * (columns // mesh.hidden) * element_bytes


def whole_shards(length: int, ranks: int) -> int:
    """``length``, rounded up to shards of equal size."""
    return math.ceil(length / ranks) * ranks


def statistic_bytes(element_bytes: int) -> int:
    """Size of a statistic of a norm, softmax or loss, which are kept and communicated in at least float32."""
    return max(element_bytes, 4)


def norm_kept_bytes(hidden: int, norm: str, mesh: MeshShape, tokens: int, element_bytes: int) -> int:
    """Activation memory of a norm: its input, one or two statistics per token, and its weight if it was gathered."""
    own_tokens, own_hidden = tokens // mesh.sequence, hidden // mesh.hidden
    statistics = (1 if norm == "rms" else 2) * own_tokens * statistic_bytes(element_bytes)
    others = mesh.of("batch", "sequence")
    weight = whole_shards(own_hidden, others) * element_bytes if others > 1 else 0
    return own_tokens * own_hidden * element_bytes + statistics + weight


def _head_norms(sizes: BlockSizes, kept: KeptSizes, mesh: MeshShape, tokens: int, element_bytes: int) -> int:
    """Queries and keys before their norms, a statistic per head, and the weights of their norms."""
    head_dim = sizes.query // kept.query_heads
    features = sizes.query // (mesh.sequence * mesh.hidden) + kept.key_value
    statistics = tokens * (features // head_dim) * statistic_bytes(element_bytes)
    weights = 2 * whole_shards(head_dim, mesh.size) * element_bytes if mesh.size > 1 else 0
    return tokens * features * element_bytes + statistics + weights
