"""Vectors that a linear layer's input or output is multiplied with (IA³, arXiv 2205.05638), cut as its features are."""

from __future__ import annotations

from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.low_rank import LowRankSplit
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def output_spec(linear: ShardedLinear) -> ShardingSpec | None:
    """How a vector ``[O, 1]`` for the layer's output is cut; None if there is no rule, as for a head."""
    split = LowRankSplit.of(linear)
    if split is None or split.ragged:
        return None
    return ShardingSpec((linear.out_features, 1), (split.out_axes, ()), (split.parts, 1))


def input_spec(linear: ShardedLinear) -> ShardingSpec | None:
    """How a vector ``[1, I]`` for the layer's input is cut; None if other layers share the input, gathered, with it."""
    split = LowRankSplit.of(linear)
    if split is None or split.reduce != "scatter and sum":
        return None
    return ShardingSpec((1, linear.in_features), ((), split.in_axes))
