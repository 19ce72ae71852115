"""Bytes that one transformer layer makes a rank send, by a closed formula.

docs/traffic.md derives it; a test compares it with the bytes that a real layer sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.comm_counter import Operation, axes_label, sent_bytes
from cuboid.distributed.topology import Axis, MeshShape

#: Size of an expert's index, as ranks exchange it.
_INDEX_BYTES = 4
#: In fp8: sizes of an element and of a row's scale, and what the sizes of a block must be multiples of.
_FP8_BYTES, _SCALE_BYTES, _FP8_MULTIPLE = 1, 4, 16


@dataclass(frozen=True)
class ExpertSizes:
    """Counts of a full layer's experts, which have no biases.

    Args:
        count: E, number of experts.
        per_token: k, experts that each token goes to.
        intermediate: features inside one expert.
        gated: whether its "up" projection has two outputs (gate and up) for each of these.
        gates: outputs of each router: E, and 1 for the gate of shared experts, if they have one.
    """

    count: int
    per_token: int
    intermediate: int
    gated: bool
    gates: tuple[int, ...]

    @property
    def up(self) -> int:
        """Out features of one expert's "up" projection."""
        return (2 if self.gated else 1) * self.intermediate


@dataclass(frozen=True)
class LatentSizes:
    """Counts of a full layer's multi-latent attention (MLA), which computes heads from a few features.

    Args:
        features: of each projection to latents.
        biases: of each of them that has a bias.
        normed: features of each norm of latents.
        weights: elements of all weights from latents to heads.
        output: features of attention's result.
    """

    features: tuple[int, ...]
    biases: tuple[int, ...]
    normed: tuple[int, ...]
    weights: int
    output: int


@dataclass(frozen=True)
class BlockSizes:
    """Feature counts of a full (unsharded) layer.

    Args:
        hidden: H, the residual stream.
        query: query heads × head dim; 0 if queries are computed from latents.
        key_value: key (or value) heads × head dim; 0 if these are computed from latents.
        intermediate: F, the MLP's inner size; with experts that of the shared ones, 0 if there are none.
        gated: whether the MLP has two "up" projections.
        summed: key (or value) features that each rank computes, if there are too few heads to reduce-scatter their
            product over `hidden`, so that it is all-reduced; else None.
        whole_key_value: whether that product needs the key/value weights of all `sequence` ranks.
        norm: kind of norm, which determines the statistics that are communicated.
        qkv_bias, out_bias, mlp_bias: whether these projections have biases.
        experts: of the layer, if it has any.
        latents: of its attention, if that is multi-latent.
    """

    hidden: int
    query: int
    key_value: int
    intermediate: int
    gated: bool
    summed: int | None = None
    whole_key_value: bool = False
    norm: Literal["rms", "layer"] = "rms"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertSizes | None = None
    latents: LatentSizes | None = None

    @property
    def output(self) -> int:
        """Features of attention's result."""
        return self.query if self.latents is None else self.latents.output

    @property
    def blocks(self) -> int:
        """Number of blocks that return hidden states: attention, MLP or shared experts, and experts."""
        return 1 + (self.intermediate > 0) + (self.experts is not None)

    @property
    def gathered_blocks(self) -> int:
        """Number of those whose input is gathered over `sequence`: all but an attention that needs only latents."""
        return self.blocks - (self.latents is not None and not self.query)


@dataclass(frozen=True)
class _WeightBlock:
    """A rank's block of a weight: its rows and columns, and the pieces of them that have scales of their own in fp8."""

    rows: float
    columns: float
    row_pieces: int = 1
    column_pieces: int = 1

    def is_fp8(self, least: int, parts: int) -> bool:
        """Whether it multiplies in fp8; see :func:`cuboid.models.sharded.fp8.fp8_products`."""
        is_divisible = self.rows % (_FP8_MULTIPLE * parts) == self.columns % (_FP8_MULTIPLE * parts) == 0
        return is_divisible and min(self.rows, self.columns) >= least


class _InFp8:
    """What of a layer is sent in fp8: blocks of weights, and the inputs and gradients of products.

    Args:
        sizes: the layer, without experts. Of one with latents, only the products behind attention.
        mesh: its mesh.
        least: the config's ``fp8.min_dimension``.
    """

    def __init__(self, sizes: BlockSizes, mesh: MeshShape, least: int) -> None:
        def up(features: int) -> _WeightBlock:
            return _WeightBlock(features / mesh.sequence, sizes.hidden / mesh.hidden, mesh.hidden)

        def down(features: int) -> _WeightBlock:
            return _WeightBlock(sizes.hidden / mesh.hidden, features / mesh.sequence, 1, mesh.hidden)

        key_value = [up(sizes.key_value * (mesh.sequence if sizes.whole_key_value else 1))] * 2
        if sizes.summed is not None:
            key_value = [replace(block, row_pieces=1) for block in key_value]
        attention = [] if sizes.latents is not None else [up(sizes.query), *key_value]
        mlp = [up(sizes.intermediate)] * (2 if sizes.gated else 1) if sizes.intermediate else []
        downs = [sizes.output, *([sizes.intermediate] if sizes.intermediate else [])]

        def in_fp8(block: _WeightBlock) -> bool:
            return block.is_fp8(least, mesh.hidden)

        groups = [blocks for blocks in (attention, mlp) if blocks and all(map(in_fp8, blocks))]
        #: Number of inputs whose products are all in fp8.
        self.inputs = len(groups)
        #: Of the gradients of those products' outputs that are gathered over `hidden`, the features.
        self.outputs = [
            block.rows * mesh.sequence for blocks in groups for block in blocks if block.row_pieces == mesh.hidden
        ]
        #: The inputs' features of "down" projections in fp8.
        self.downs = [features for features in downs if in_fp8(down(features))]
        # A rank multiplies some rows of a block that all ranks of `sequence` share: that is sent as it is.
        sliced = key_value if sizes.whole_key_value else []
        every = [block for block in (*attention, *mlp) if block not in sliced] + [down(features) for features in downs]
        self.blocks = [block for block in every if in_fp8(block)]


class _ByteCount:
    """Sums up the bytes that collectives of given total sizes send."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self.bytes: Counter[str] = Counter()

    def add(self, operation: Operation, axes: tuple[Axis, ...], whole_bytes: float, times: int = 1) -> None:
        ranks = self._mesh.of(*axes)
        if ranks > 1:
            split = [axis for axis in axes if self._mesh.of(axis) > 1]
            self.bytes[axes_label(split)] += round(times * sent_bytes(operation, round(whole_bytes), ranks))


class _WholeSizes(_ByteCount):
    """As :class:`_ByteCount`, but the total sizes themselves, an all-reduce's twice."""

    def __init__(self) -> None:
        self.sizes: Counter[Axis] = Counter()

    def add(self, operation: Operation, axes: tuple[Axis, ...], whole_bytes: float, times: int = 1) -> None:
        (axis,) = axes
        self.sizes[axis] += times * whole_bytes * (2 if operation == "all_reduce" else 1)  # type: ignore[assignment]


@dataclass(frozen=True)
class SparedSizes:
    """What fp8 takes off the total sizes, in bytes, of what collectives of a layer move.

    Args:
        forward: of activations by axis, in a forward that is followed by what needs them, for each token.
        gradients: the same in the first half of a split backward.
        rows, columns: of its weights over `batch`, in forward and in backward.
        rows_again: what a checkpointed graph's backward gathers besides.
    """

    forward: Mapping[Axis, float]
    gradients: Mapping[Axis, float]
    rows: float
    columns: float
    rows_again: float


def spared_sizes(sizes: BlockSizes, mesh: MeshShape, least: int, element_bytes: int = 2) -> SparedSizes:
    """What fp8 spares, by the formula of :func:`layer_bytes`; ``least`` is the config's ``fp8.min_dimension``."""
    in_fp8, forward, gradients, rows, columns = _InFp8(sizes, mesh, least), *(_WholeSizes() for _ in range(4))
    _spare_inputs(forward, in_fp8, sizes, mesh, 1.0, element_bytes)
    _spare_gradients(gradients, in_fp8, sizes, mesh, 1.0, element_bytes)
    _spare_weights(rows, in_fp8, mesh, element_bytes, forward=True)
    _spare_weights(columns, in_fp8, mesh, element_bytes, forward=False)
    return SparedSizes(
        {axis: -size for axis, size in forward.sizes.items()},
        {axis: -size for axis, size in gradients.sizes.items()},
        rows=columns.sizes["batch"] - rows.sizes["batch"],
        columns=-columns.sizes["batch"],
        rows_again=sum(_bytes_of_rows(block, mesh) for block in in_fp8.blocks),
    )


def layer_bytes(
    sizes: BlockSizes,
    mesh: MeshShape,
    batch: int,
    length: int,
    *,
    element_bytes: int = 2,
    statistic_bytes: int = 4,
    weight_gather: Literal["layer", "step"] = "layer",
    fp8_min_dimension: int | None = None,
) -> dict[str, int]:
    """Bytes that one rank sends in the forward and backward of one layer, by axes.

    Args:
        sizes: the layer.
        mesh: b × s × h.
        batch: rows of the mesh's micro-batch.
        length: sequence length, a multiple of s.
        element_bytes: of an activation or weight.
        statistic_bytes: of one of a norm's statistics.
        weight_gather: whether weights are gathered again in backward ("layer") or kept ("step").
        fp8_min_dimension: the config's ``fp8.min_dimension``; None without products in fp8.
    """
    count = _ByteCount(mesh)
    tokens = batch / mesh.batch * length
    residual = tokens * sizes.hidden / mesh.hidden * element_bytes
    # For each block: input gather in forward and again in backward, and reduce-scatter of its gradient; output
    # reduce-scatter, and gather of its gradient. A reduce-scatter sends as much as an all-gather.
    count.add("all_gather", ("sequence",), residual, 3 * sizes.gathered_blocks + 2 * sizes.blocks)
    per_feature = tokens * element_bytes / mesh.sequence
    _add_projections(count, sizes, mesh, per_feature)
    if sizes.experts is not None:
        _add_experts(count, sizes.experts, per_feature)
        _add_routing(count, sizes.experts, mesh, tokens, statistic_bytes)
    _add_weights(count, sizes, mesh, element_bytes, times=3 if weight_gather == "layer" else 2)
    _add_statistics(count, sizes, mesh, tokens / mesh.sequence * statistic_bytes)
    # Gather in forward and reduce-scatter of the gradient.
    _add_vectors(count, sizes, mesh, element_bytes, times=2)
    if fp8_min_dimension is not None:
        in_fp8 = _InFp8(sizes, mesh, fp8_min_dimension)
        _spare_inputs(count, in_fp8, sizes, mesh, tokens, element_bytes)
        if weight_gather == "layer":
            _spare_weights(count, in_fp8, mesh, element_bytes)
    return dict(sorted(count.bytes.items()))


def recomputed_bytes(
    sizes: BlockSizes,
    mesh: MeshShape,
    batch: int,
    length: int,
    *,
    element_bytes: int = 2,
    statistic_bytes: int = 4,
    weight_gather: Literal["layer", "step"] = "layer",
    fp8_min_dimension: int | None = None,
    compiled: bool = False,
) -> dict[str, int]:
    """Bytes that one rank sends again when activation checkpointing recomputes one layer's forward, by axes.
    Arguments are those of :func:`layer_bytes`, and whether layers are compiled.

    Blocks of weights aren't among them: backward uses those that recomputation has gathered. Nor is the "down"
    projection of an MLP that ends the layer: nothing is saved behind it, unless a norm or a dropout is. Blocks that
    backward would gather in fp8 are gathered as they are, and the difference is counted; before a graph's backward,
    their rows in fp8 are gathered besides their columns. Vectors, such as norms' weights, stay unsharded for a graph.
    """
    count = _ByteCount(mesh)
    tokens = batch / mesh.batch * length
    residual = tokens * sizes.hidden / mesh.hidden * element_bytes
    ends_with_mlp = sizes.experts is None and sizes.intermediate > 0
    count.add("all_gather", ("sequence",), residual, sizes.gathered_blocks + sizes.blocks - ends_with_mlp)
    per_feature = tokens * element_bytes / mesh.sequence
    _add_projections(count, sizes, mesh, per_feature, backward=False)
    if ends_with_mlp:
        count.add("all_gather", ("hidden",), per_feature * sizes.intermediate, -1)
    if sizes.experts is not None:
        _add_experts(count, sizes.experts, per_feature, backward=False)
        _add_routing(count, sizes.experts, mesh, tokens, statistic_bytes, backward=False)
    _add_statistics(count, sizes, mesh, tokens / mesh.sequence * statistic_bytes, backward=False)
    if not compiled:
        _add_vectors(count, sizes, mesh, element_bytes, times=1)
    if fp8_min_dimension is not None:
        in_fp8 = _InFp8(sizes, mesh, fp8_min_dimension)
        _spare_inputs(count, in_fp8, sizes, mesh, tokens, element_bytes, ends_with_mlp=ends_with_mlp)
        if weight_gather == "layer" and compiled:
            for block in in_fp8.blocks:
                count.add("all_gather", ("batch",), _bytes_of_rows(block, mesh))
        elif weight_gather == "layer":
            _spare_weights(count, in_fp8, mesh, element_bytes, times=-1, forward=False)
    return dict(sorted(count.bytes.items()))


def stage_layer_bytes(
    sizes: BlockSizes,
    mesh: MeshShape,
    batch: int,
    lengths: Sequence[int],
    *,
    element_bytes: int = 2,
    statistic_bytes: int = 4,
    weight_gather: Literal["layer", "step"] = "layer",
    gradient_sync: Literal["unit", "step"] = "unit",
    splits: bool = False,
    fp8_min_dimension: int | None = None,
) -> dict[str, int]:
    """Bytes that one rank sends for one layer of a pipeline's stage in an optimizer step, by axes.

    Args:
        sizes, mesh, batch, element_bytes, statistic_bytes: as in :func:`layer_bytes`.
        lengths: tokens of each segment of all micro-batches, each a multiple of s.
        weight_gather: whether a weight is gathered in each unit's forward and backward ("layer") or once ("step").
        gradient_sync: whether a gradient is reduced after each unit's backward ("unit") or once ("step").
        splits: whether each unit's backward is split into two actions, input gradients and weight gradients.
        fp8_min_dimension: as in :func:`layer_bytes`.
    """
    total = Counter[str]()
    for length in lengths:
        total.update(
            layer_bytes(
                sizes, mesh, batch, length, element_bytes=element_bytes, statistic_bytes=statistic_bytes,
                fp8_min_dimension=fp8_min_dimension,
            )
        )  # fmt: skip
    in_fp8 = None if fp8_min_dimension is None else _InFp8(sizes, mesh, fp8_min_dimension)
    if splits:
        regathered = _ByteCount(mesh)
        for length in lengths:
            tokens = batch / mesh.batch * length
            _add_again(regathered, sizes, mesh, tokens * element_bytes)
            if in_fp8 is not None:
                _spare_gradients(regathered, in_fp8, sizes, mesh, tokens, element_bytes)
        total.update(regathered.bytes)
    saved_bytes = _ByteCount(mesh)
    if weight_gather == "step":
        if in_fp8 is not None:
            # What layer_bytes has counted of them is in fp8.
            _spare_weights(saved_bytes, in_fp8, mesh, element_bytes, times=len(lengths))
        # layer_bytes has counted two gathers for each unit; one gather in the whole step is left.
        _add_weights(saved_bytes, sizes, mesh, element_bytes, times=2 * len(lengths) - 1)
    if gradient_sync == "step":
        units = len(lengths) - 1
        _add_weights(saved_bytes, sizes, mesh, element_bytes, times=units)
        _add_vectors(saved_bytes, sizes, mesh, element_bytes, times=units)
    total.subtract(saved_bytes.bytes)
    return dict(sorted(total.items()))


def _add_projections(
    count: _ByteCount, sizes: BlockSizes, mesh: MeshShape, per_feature: float, *, backward: bool = True
) -> None:
    """Communication of activations over `hidden`; one feature in a `sequence` block takes ``per_feature`` bytes."""
    scattered = sizes.query + (2 if sizes.gated else 1) * sizes.intermediate
    if sizes.summed is None:
        scattered += 2 * sizes.key_value
    else:
        # For key and value, in forward and backward.
        count.add("all_reduce", ("hidden",), per_feature * mesh.sequence * sizes.summed, 4 if backward else 2)
    count.add("reduce_scatter", ("hidden",), per_feature * scattered, 2 if backward else 1)
    # Input of "down": gather in forward and again in backward, and reduce-scatter of its gradient.
    count.add("all_gather", ("hidden",), per_feature * (sizes.output + sizes.intermediate), 3 if backward else 1)
    if sizes.latents is not None:
        latent = per_feature * sum(sizes.latents.features)
        # Of the rank's own positions; then all positions are gathered. Backward does the reverse with the gradients.
        count.add("all_reduce", ("hidden",), latent, 2 if backward else 1)
        count.add("all_gather", ("sequence",), latent * mesh.sequence, 2 if backward else 1)


def _add_again(count: _ByteCount, sizes: BlockSizes, mesh: MeshShape, per_feature: float) -> None:
    """The second gather of the gradients of linear layers' outputs, which both halves of a split backward need."""
    blocks = 1 + (sizes.intermediate > 0)
    count.add("all_gather", ("sequence",), per_feature * sizes.hidden / mesh.hidden, blocks)
    outputs = sizes.query + (2 if sizes.gated else 1) * sizes.intermediate
    if sizes.summed is None:
        outputs += 2 * sizes.key_value
    else:
        count.add("all_reduce", ("hidden",), per_feature * sizes.summed, 2)
    count.add("all_gather", ("hidden",), per_feature / mesh.sequence * outputs)
    if sizes.latents is not None:
        count.add("all_reduce", ("hidden",), per_feature / mesh.sequence * sum(sizes.latents.features))


def _spare_inputs(
    count: _ByteCount,
    in_fp8: _InFp8,
    sizes: BlockSizes,
    mesh: MeshShape,
    tokens: float,
    element_bytes: int,
    *,
    ends_with_mlp: bool = False,
) -> None:
    """Of forward's gathers of inputs, the bytes that fp8 spares."""
    residual = tokens * (sizes.hidden / mesh.hidden * (element_bytes - _FP8_BYTES) - _SCALE_BYTES)
    count.add("all_gather", ("sequence",), residual, -in_fp8.inputs)
    # A recomputation ends before the "down" projection of an MLP.
    for features in in_fp8.downs[: 1 if ends_with_mlp else None]:
        _spare_pieces(count, mesh, tokens, features, element_bytes)


def _spare_pieces(
    count: _ByteCount, mesh: MeshShape, tokens: float, features: float, element_bytes: int, products: int = 1
) -> None:
    """Of a gather of features over `hidden`, whose ranks' rows have scales of their own, the bytes that fp8 spares."""
    of_token = features / mesh.sequence * (element_bytes - _FP8_BYTES) - products * mesh.hidden * _SCALE_BYTES
    count.add("all_gather", ("hidden",), tokens * of_token, -1)


def _spare_gradients(
    count: _ByteCount, in_fp8: _InFp8, sizes: BlockSizes, mesh: MeshShape, tokens: float, element_bytes: int
) -> None:
    """Of the gathers of gradients that the inputs' gradients alone need, the bytes that fp8 spares."""
    residual = tokens * (sizes.hidden / mesh.hidden * (element_bytes - _FP8_BYTES) - _SCALE_BYTES)
    count.add("all_gather", ("sequence",), residual, -len(in_fp8.downs))
    _spare_pieces(count, mesh, tokens, sum(in_fp8.outputs), element_bytes, len(in_fp8.outputs))


def _spare_weights(
    count: _ByteCount,
    in_fp8: _InFp8,
    mesh: MeshShape,
    element_bytes: int,
    times: int = 1,
    *,
    forward: bool = True,
) -> None:
    """Of the gathers of weights in forward and backward, the bytes that fp8 spares."""
    for block in in_fp8.blocks:
        wide = block.rows * block.columns * element_bytes
        if forward:
            count.add("all_gather", ("batch",), wide - _bytes_of_rows(block, mesh), -times)
        padded = padded_length(int(block.rows), mesh.batch)
        count.add("all_gather", ("batch",), wide - padded * block.columns * _FP8_BYTES, -times)
        # The largest elements of columns.
        count.add("all_reduce", ("batch",), block.row_pieces * block.columns * element_bytes, times)


def _bytes_of_rows(block: _WeightBlock, mesh: MeshShape) -> float:
    """A block by rows in fp8, and their scales."""
    return padded_length(int(block.rows), mesh.batch) * (
        block.columns * _FP8_BYTES + block.column_pieces * _SCALE_BYTES
    )


def _add_weights(count: _ByteCount, sizes: BlockSizes, mesh: MeshShape, element_bytes: int, times: int) -> None:
    """Gathers of each weight's block in forward and, unless kept, in backward; reduce-scatter of its gradient."""
    projections = sizes.query + sizes.output + (3 if sizes.gated else 2) * sizes.intermediate
    key_value = 2 * sizes.key_value * sizes.hidden * element_bytes / mesh.hidden
    if sizes.whole_key_value:
        count.add("all_gather", ("batch", "sequence"), key_value, times)
    else:
        count.add("all_gather", ("batch",), key_value / mesh.sequence, times)
    block = projections * sizes.hidden * element_bytes / (mesh.sequence * mesh.hidden)
    count.add("all_gather", ("batch",), block, times)
    if sizes.latents is not None:
        rows = sum(padded_length(width, mesh.of("batch", "sequence")) for width in sizes.latents.features)
        count.add("all_gather", ("batch", "sequence"), rows * sizes.hidden / mesh.hidden * element_bytes, times)
        heads = sizes.latents.weights / (mesh.sequence * mesh.hidden) * element_bytes
        count.add("all_gather", ("batch",), heads, times)
    if sizes.experts is not None:
        experts = sizes.experts
        # Padded to the same number of experts on each rank of `batch`.
        features = padded_length(experts.count, mesh.batch) * (experts.up + experts.intermediate) / mesh.sequence
        count.add("all_gather", ("batch",), features * sizes.hidden * element_bytes / mesh.hidden, times)


def _add_experts(count: _ByteCount, experts: ExpertSizes, per_feature: float, *, backward: bool = True) -> None:
    """As :func:`_add_projections`, for the experts, which have k rows for each token."""
    rows = per_feature * experts.per_token
    count.add("reduce_scatter", ("hidden",), rows * experts.up, 2 if backward else 1)
    count.add("all_gather", ("hidden",), rows * experts.intermediate, 3 if backward else 1)


def _add_routing(
    count: _ByteCount,
    experts: ExpertSizes,
    mesh: MeshShape,
    tokens: float,
    statistic_bytes: int,
    *,
    backward: bool = True,
) -> None:
    """Routing: choices and their weights, gathered over `sequence`; partial logits, gathered over `hidden`."""
    choices = tokens * experts.per_token
    count.add("all_gather", ("sequence",), choices * _INDEX_BYTES)
    # Weights of the choices, and in backward their gradients. Most routers give them in float32.
    count.add("all_gather", ("sequence",), choices * statistic_bytes, 2 if backward else 1)
    for outputs in experts.gates:
        logits = tokens / mesh.sequence * outputs * statistic_bytes
        count.add("all_gather", ("hidden",), mesh.hidden * logits)
        count.add("all_reduce", ("hidden",), logits, int(backward))


def _add_statistics(
    count: _ByteCount, sizes: BlockSizes, mesh: MeshShape, statistics: float, *, backward: bool = True
) -> None:
    """Statistics of the two norms, in forward and backward."""
    if sizes.norm == "rms":
        count.add("all_reduce", ("hidden",), statistics, 2 * (1 + backward))
    else:
        count.add("all_gather", ("hidden",), 2 * statistics * mesh.hidden, 2)
        count.add("all_reduce", ("hidden",), 2 * statistics, 2 * backward)


def _add_vectors(count: _ByteCount, sizes: BlockSizes, mesh: MeshShape, element_bytes: int, times: int) -> None:
    """Gathers of the parameters of norms, biases and routers, or reduce-scatters of their gradients."""
    norms = 2 * (1 if sizes.norm == "rms" else 2)
    outs = sizes.out_bias + sizes.mlp_bias
    vector = sizes.hidden * element_bytes / mesh.hidden
    count.add("all_gather", ("batch", "sequence"), vector, times * norms)
    count.add("all_gather", ("batch", "sequence"), outs * vector, times)
    split = element_bytes / (mesh.sequence * mesh.hidden)
    if sizes.qkv_bias and sizes.summed is None:
        count.add("all_gather", ("batch",), (sizes.query + 2 * sizes.key_value) * split, times)
    elif sizes.qkv_bias:
        count.add("all_gather", ("batch",), sizes.query * split, times)
        axes: tuple[Axis, ...] = ("batch", "sequence", "hidden") if sizes.whole_key_value else ("batch", "hidden")
        block = 2 * sizes.key_value * element_bytes / (1 if sizes.whole_key_value else mesh.sequence)
        count.add("all_gather", axes, block, times)
    if sizes.mlp_bias:
        count.add("all_gather", ("batch",), (2 if sizes.gated else 1) * sizes.intermediate * split, times)
    for features in () if sizes.latents is None else (*sizes.latents.normed, *sizes.latents.biases):
        block = padded_length(features, mesh.size) * element_bytes
        count.add("all_gather", ("batch", "sequence", "hidden"), block, times)
    for outputs in () if sizes.experts is None else sizes.experts.gates:
        rows = padded_length(outputs, mesh.of("batch", "sequence"))
        count.add("all_gather", ("batch", "sequence"), rows * vector, times)
