"""Which attention heads a rank computes, and which key/value heads it needs for them (GQA)."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from transformers import PretrainedConfig

from cuboid.distributed.topology import Coordinate, MeshShape


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of a model's query and key/value heads, and of the features of a head."""

    query: int
    key_value: int
    dim: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> HeadCounts:
        """Read the counts from a Hugging Face config. A model without attention has a single head of each."""
        with suppress(ValueError):  # It has several text configs.
            config = config.get_text_config()
        query = _number(config, ("num_attention_heads", "num_heads", "n_heads", "n_head")) or 1
        key_value = _number(config, ("num_key_value_heads", "num_kv_heads")) or query
        dim = _number(config, ("head_dim",)) or (_number(config, ("hidden_size",)) or query) // query
        return cls(query, key_value, dim)


def _number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """The first of some attributes that is an int; models whose layers differ have lists instead."""
    for name in names:
        # Some configs raise an error of their own if layers differ.
        with suppress(Exception):
            value = getattr(config, name)
            if isinstance(value, int):
                return value
    return None


@dataclass(frozen=True)
class KeyValuePlan:
    """How one rank gets the key/value heads that its query heads attend to.

    Query heads are distributed over (sequence, hidden), with `sequence` varying slowest.

    Args:
        scattered: whether KV heads divide by sequence × hidden and are distributed like the query heads.
        split_by_sequence: whether the weight's block has the KV heads of one `sequence` index only, and not all.
        first: first KV head to compute, counted from the block's first.
        heads: number of KV heads to compute.
        keep: which of those heads this rank keeps, in order; may repeat.
        groups: query heads for each kept KV head on this rank.
    """

    scattered: bool
    split_by_sequence: bool
    first: int
    heads: int
    keep: tuple[int, ...]
    groups: int


def plan_key_value_heads(counts: HeadCounts, mesh: MeshShape, at: Coordinate) -> KeyValuePlan:
    """Plan for the rank at ``at``; ``counts.query`` must divide by sequence × hidden."""
    ranks = mesh.of("sequence", "hidden")
    per_group = counts.query // counts.key_value
    if counts.key_value % ranks == 0:
        local_heads = counts.key_value // ranks
        return KeyValuePlan(True, True, 0, counts.key_value // mesh.sequence, tuple(range(local_heads)), per_group)
    per_rank, per_sequence = counts.query // ranks, counts.query // mesh.sequence
    start = at.index(("sequence", "hidden"), mesh) * per_rank
    needed = [query // per_group for query in range(start, start + per_rank)]
    # Ranks along `hidden` sum partial products of the same heads, so each computes all heads that any of them needs.
    low = at.sequence * per_sequence // per_group
    high = ((at.sequence + 1) * per_sequence - 1) // per_group + 1
    by_sequence = counts.key_value % mesh.sequence == 0
    # One copy of a head if all are needed equally often, in order.
    heads = sorted(set(needed))
    groups, rest = divmod(len(needed), len(heads))
    in_order = rest == 0 and needed == [head for head in heads for _ in range(groups)]
    return KeyValuePlan(
        scattered=False,
        split_by_sequence=by_sequence,
        first=0 if by_sequence else low,
        heads=high - low,
        keep=tuple(head - low for head in (heads if in_order else needed)),
        groups=groups if in_order else 1,
    )


def copies_of_key_value_heads(counts: HeadCounts, mesh: MeshShape, at: Coordinate) -> tuple[int, ...]:
    """For each key/value head that the rank at ``at`` keeps, the number of copies over sequence × hidden."""

    def kept(sequence: int, hidden: int) -> list[int]:
        plan = plan_key_value_heads(counts, mesh, replace(at, sequence=sequence, hidden=hidden))
        if plan.scattered:
            start = (sequence * mesh.hidden + hidden) * len(plan.keep)
        else:
            start = plan.first + (sequence * counts.key_value // mesh.sequence if plan.split_by_sequence else 0)
        return [start + head for head in plan.keep]

    everywhere = Counter(head for at in product(range(mesh.sequence), range(mesh.hidden)) for head in kept(*at))
    return tuple(everywhere[head] for head in kept(at.sequence, at.hidden))
