"""Communication and activation memory of embedding, last norm, head and loss, by closed formulas.

docs/formulas.md has them as tables; tests/planner/test_memory_formula.py compares them with running models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cuboid.distributed.comm_counter import Operation, axes_label, sent_bytes
from cuboid.distributed.topology import AXES, Axis, MeshShape
from cuboid.planner.layer_memory import norm_kept_bytes, statistic_bytes, whole_shards

#: Size of a token id or label.
_INDEX_BYTES = 8
#: Size of the nine numbers by which ranks check that they have the same micro-batch; see
#: cuboid.models.batch.batch_check.
_SUMMARY_BYTES = 72

#: A collective, its axes, the bytes of its full tensor, and how often it runs.
_Call = tuple[Operation, tuple[Axis, ...], int, int]


@dataclass(frozen=True)
class EndSizes:
    """Sizes of the modules before the first layer and after the last one.

    Args:
        hidden: H.
        vocabulary: V, of embedding and head.
        positions: number of learned position embeddings; 0 for none.
        rotary: features of a head's rotary tables; 0 for none.
        norm: kind of the last norm, which determines its statistics.
    """

    hidden: int
    vocabulary: int
    positions: int = 0
    rotary: int = 0
    norm: Literal["rms", "layer"] = "rms"


def end_kept_bytes(
    ends: EndSizes, mesh: MeshShape, batch: int, length: int, *, element_bytes: int = 2
) -> dict[Literal["embedding", "norm", "head"], int]:
    """Bytes that a rank saves for backward, by module.

    The loss computes its gradient in forward, chunk by chunk. So no logits are saved, only the gradients of the head's
    input and weight.

    Args:
        ends: sizes of the modules.
        mesh: b × s × h.
        batch: rows of the mesh's micro-batch, a multiple of b.
        length: sequence length, a multiple of s and of h.
        element_bytes: of an activation or weight.
    """
    tokens = batch // mesh.batch * length
    own_hidden = ends.hidden // mesh.hidden
    positions = length * _INDEX_BYTES if ends.positions else 0
    weight = _table_rows(ends.vocabulary, mesh) // mesh.batch * own_hidden
    return {
        "embedding": tokens * _INDEX_BYTES + positions + 2 * length * ends.rotary * element_bytes,
        "norm": norm_kept_bytes(ends.hidden, ends.norm, mesh, tokens, element_bytes),
        "head": (tokens // mesh.sequence * own_hidden + weight) * element_bytes,
    }


def end_sent_bytes(
    ends: EndSizes, mesh: MeshShape, batch: int, length: int, *, element_bytes: int = 2
) -> dict[str, int]:
    """Bytes that a rank sends in forward and backward, by axes; arguments as of :func:`end_kept_bytes`."""
    count: Counter[str] = Counter()
    for operation, axes, whole_bytes, times in _calls(ends, mesh, batch, length, element_bytes):
        split = [axis for axis in axes if mesh.of(axis) > 1]
        if split:
            count[axes_label(split)] += times * round(sent_bytes(operation, whole_bytes, mesh.of(*axes)))
    return dict(sorted(count.items()))


def _calls(ends: EndSizes, mesh: MeshShape, batch: int, length: int, element_bytes: int) -> Iterator[_Call]:
    tokens = batch // mesh.batch * length
    own_hidden = ends.hidden // mesh.hidden
    statistic = statistic_bytes(element_bytes)
    row = own_hidden * element_bytes
    rows = _table_rows(ends.vocabulary, mesh)
    # Embedding: the table and its gradient; the looked-up rows and their gradient.
    yield "all_gather", ("batch",), rows * row, 2
    yield "reduce_scatter", ("sequence",), tokens * row, 2
    if ends.positions:
        yield "all_gather", ("batch",), _table_rows(ends.positions, mesh) * row, 2
        yield "reduce_scatter", ("sequence",), length * row, 2
    yield from _norm_calls(ends, mesh, tokens // mesh.sequence * statistic, element_bytes)
    # Head: the input, once more for the weight's gradient, and its own gradient; the weight and its gradient; the
    # logits and their gradient.
    yield "all_gather", ("sequence",), tokens * row, 3
    yield "all_gather", ("batch",), rows * row, 2
    yield "reduce_scatter", ("hidden",), tokens * rows * element_bytes, 2
    # Loss: the largest logit; sums of exponentials and the label's logit; the total, and the number of labels.
    yield "all_reduce", ("sequence",), tokens // mesh.hidden * statistic, 1
    yield "all_reduce", ("sequence",), 2 * (tokens // mesh.hidden) * statistic, 1
    yield "all_reduce", ("batch", "hidden"), statistic, 1
    yield "all_reduce", ("batch",), statistic, 1
    # The model's own forward still computes logits, of the fewest positions that the head accepts; they aren't used.
    few = batch // mesh.batch * math.lcm(mesh.sequence, mesh.hidden)
    yield "all_gather", ("sequence",), few * row, 1
    yield "reduce_scatter", ("hidden",), few * rows * element_bytes, 1
    # Before the forward, ranks check that they all have the same batch.
    yield "all_gather", AXES, _SUMMARY_BYTES * mesh.size, 1


def _norm_calls(ends: EndSizes, mesh: MeshShape, statistics: int, element_bytes: int) -> Iterator[_Call]:
    weights = 1
    if ends.norm == "rms":
        yield "all_reduce", ("hidden",), statistics, 2
    else:
        weights = 2
        yield "all_gather", ("hidden",), 2 * statistics * mesh.hidden, 1
        yield "all_reduce", ("hidden",), 2 * statistics, 1
    vector = whole_shards(ends.hidden // mesh.hidden, mesh.of("batch", "sequence")) * element_bytes
    yield "all_gather", ("batch", "sequence"), vector, 2 * weights


def _table_rows(rows: int, mesh: MeshShape) -> int:
    """Rows of a table's block, with the padding of its shards."""
    return whole_shards(math.ceil(rows / mesh.sequence), mesh.batch)
