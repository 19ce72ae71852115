"""How many bytes a layer keeps on a rank between forward and backward, and what a rank holds of the model itself.

docs/formulas.md has these closed counts as tables; tests/test_memory_formula.py holds them against what autograd saves
in running models. They hold without dropout and activation checkpointing, for attention kernels that keep no scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cuboid.distributed.topology import MeshShape
from cuboid.planner.comm_formula import BlockSizes

#: What keeps something: inputs of linear layers, attention between its projections, norms, and the MLP between its.
Keeper = Literal["linear_inputs", "attention", "norms", "nonlinearity"]


@dataclass(frozen=True)
class KeptSizes:
    """What a layer's memory depends on, besides :class:`~cuboid.planner.comm_formula.BlockSizes`.

    Args:
        query_heads: of the whole model.
        key_value: key (or value) features that this rank's attention reads: heads × features of each.
        nonlinearity: tensors of F features that the MLP keeps between its projections. 3 for silu(gate) · up: gate, up,
            and silu(gate); 1 for a GELU that is one kernel; 4 for the one that GPT-2 composes.
        head_norms: whether queries and keys have a norm for each head.
    """

    query_heads: int
    key_value: int
    nonlinearity: int
    head_norms: bool = False


def state_bytes(
    parameters: int, mesh: MeshShape, *, element_bytes: int = 2, optimizer_bytes: int = 12
) -> dict[Literal["parameters", "gradients", "optimizer"], int]:
    """Bytes that a rank holds of the model itself, between steps; padding of what doesn't divide by the mesh not.

    Args:
        parameters: how many numbers the whole model has.
        mesh: b × s × h. Every number has one owner in it.
        element_bytes: of a parameter, and of its gradient.
        optimizer_bytes: for each parameter: 8 for Adam's two moments in float32, 12 with a float32 copy of weights that
            are trained in 16 bits.
    """
    own = parameters // mesh.size
    return {"parameters": own * element_bytes, "gradients": own * element_bytes, "optimizer": own * optimizer_bytes}


def layer_kept_bytes(
    sizes: BlockSizes, kept: KeptSizes, mesh: MeshShape, batch: int, length: int, *, element_bytes: int = 2
) -> dict[Keeper, int]:
    """Bytes that one layer keeps on a rank from its forward to its backward, by what keeps them; parameters not.

    Args:
        sizes, kept: the layer.
        mesh: b × s × h.
        batch: rows of the micro-batch that the mesh is given, a multiple of b.
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
        # Of both blocks' "up" projections, which share theirs; of o, where it is attention's output too; of "down".
        "linear_inputs": 2 * residual + query + inner,
        "attention": attention,
        "norms": 2 * norm_kept_bytes(sizes.hidden, sizes.norm, mesh, tokens, element_bytes),
        "nonlinearity": kept.nonlinearity * inner,
    }


def block_bytes(
    shape: tuple[int, int], kind: Literal["up", "down", "head"], mesh: MeshShape, element_bytes: int
) -> int:
    """What a rank multiplies with: a weight ``[out, in]`` (head: ``[V, H]``) as gathered for one product."""
    rows, columns = shape
    if kind == "up":
        return rows // mesh.sequence * (columns // mesh.hidden) * element_bytes
    if kind == "down":
        return rows // mesh.hidden * (columns // mesh.sequence) * element_bytes
    return whole_shards(math.ceil(rows / mesh.sequence), mesh.batch) * (columns // mesh.hidden) * element_bytes


def whole_shards(length: int, ranks: int) -> int:
    """So many elements gathered from shards of equal size, the last ones padded."""
    return math.ceil(length / ranks) * ranks


def statistic_bytes(element_bytes: int) -> int:
    """Of a norm's, softmax's or loss's statistic: they are kept and exchanged in at least float32."""
    return max(element_bytes, 4)


def norm_kept_bytes(hidden: int, norm: str, mesh: MeshShape, tokens: int, element_bytes: int) -> int:
    """Its input, one or two statistics of each token, and its weight where that had to be gathered."""
    own_tokens, own_hidden = tokens // mesh.sequence, hidden // mesh.hidden
    statistics = (1 if norm == "rms" else 2) * own_tokens * statistic_bytes(element_bytes)
    others = mesh.of("batch", "sequence")
    weight = whole_shards(own_hidden, others) * element_bytes if others > 1 else 0
    return own_tokens * own_hidden * element_bytes + statistics + weight


def _head_norms(sizes: BlockSizes, kept: KeptSizes, mesh: MeshShape, tokens: int, element_bytes: int) -> int:
    """Of queries and keys: the input in at least float32, the normed one, a statistic of each head, and the weights."""
    head_dim = sizes.query // kept.query_heads
    features = sizes.query // (mesh.sequence * mesh.hidden) + kept.key_value
    wide = statistic_bytes(element_bytes)
    weights = 2 * whole_shards(head_dim, mesh.size) * element_bytes if mesh.size > 1 else 0
    return tokens * features * (wide + element_bytes) + tokens * (features // head_dim) * wide + weights
