"""Time of one unit's forward and backward: computing, and the communication that nothing hides.

Where no other source is named, counts are those of docs/formulas.md and docs/traffic.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from cuboid.planner.comm_formula import SparedSizes, spared_sizes
from cuboid.planner.cost.communication import Links
from cuboid.planner.cost.kernels import ATTENTION_BACKWARD, Kernels
from cuboid.planner.cost.layout import Layout, Software
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.model import Experts, Layer, ModelDescription, Projection
from cuboid.planner.description.trunk import QUANTIZED_BYTES
from cuboid.planner.model_formulas import block_sizes
from cuboid.seq1f1b.schedule.unit_costs import seen_keys

_ELEMENT = 2
_STATISTIC = 4
#: Passes of a unit; "input" and "weight" are the halves of a split backward.
UnitPass = Literal["forward", "backward", "input", "weight"]
#: Collectives of each pass: over `sequence`, of a block's input (without its second gather, for weight gradients) and
#: of its output; and over `hidden`, of the inputs of "down" projections.
_EXCHANGES: dict[UnitPass, tuple[float, int, int]] = {
    "forward": (1, 1, 1),
    "backward": (1, 1, 2),
    "input": (1, 1, 1),
    "weight": (0, 1, 1),
}


@dataclass(frozen=True)
class Seconds:
    """Time of a part of a step: computing, and waiting for communication that nothing hides."""

    compute: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.exposed + other.exposed)

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.compute * factor, self.exposed * factor)

    @property
    def total(self) -> float:
        """Computing and waiting together."""
        return self.compute + self.exposed


class UnitTimes:
    """Times of the parts of one micro-batch's segments on one rank."""

    def __init__(
        self, model: ModelDescription, layout: Layout, cluster: Cluster, length: int, software: Software
    ) -> None:
        self._model, self._layout, self._length, self._software = model, layout, length, software
        self.links = Links(cluster, layout)
        self._gpu = cluster.gpu
        self.kernels = Kernels(cluster.gpu, software.products_speed)
        self._rows = layout.micro_batch / layout.mesh.batch
        self._ranks = layout.mesh.of("sequence", "hidden")
        self._passes = software.passes * (cluster.gpu.eager_traffic if software.is_eager else 1.0)

    @cached_property
    def _residual_ranks(self) -> int:
        """Ranks among which the residual stream is divided."""
        return self._ranks if self._software.sequence_parallel else self._layout.mesh.hidden

    @cached_property
    def _spared(self) -> SparedSizes | None:
        """What fp8 spares of a layer's messages; None without it."""
        layout, least = self._layout, self._layout.fp8_min_dimension
        return None if least is None else spared_sizes(block_sizes(self._model, layout.mesh), layout.mesh, least)

    def tokens(self, positions: int) -> float:
        """Tokens of this rank's rows at ``positions`` positions, before they are cut over `sequence`."""
        return self._rows * positions / self._layout.context

    def layer_input(self, tokens: float) -> float:
        """Bytes of a layer's input on this rank."""
        return tokens * self._model.hidden / self._residual_ranks * _ELEMENT

    def kept_attention(self, layer: Layer, tokens: float) -> float:
        """Bytes of attention's output and log-sum-exp, if they are kept under checkpointing; else 0."""
        if self._layout.checkpointing != "attention":
            return 0.0
        ranks = self._ranks if layer.splits_heads else 1
        return tokens * (layer.attention.output * _ELEMENT + layer.attention.heads * _STATISTIC) / ranks

    def _beside_copies(self, layer: Layer, seconds: Seconds, tokens: float) -> Seconds:
        """Raise a layer's time to that of the copy to the host or back which runs beside it."""
        if not self._layout.moves:
            return seconds
        moving_s = (self.layer_input(tokens) + self.kept_attention(layer, tokens)) / self._gpu.host_rate
        return seconds + Seconds(exposed=max(0.0, moving_s - seconds.total))

    # --- a layer ------------------------------------------------------------------------------------------------

    def layer_forward(self, layer: Layer, start: int, stop: int) -> Seconds:
        """Forward of positions ``[start, stop)``."""
        tokens = self.tokens(stop - start)
        compute = self._products(layer, tokens) + self._attention(layer, start, stop, backward=False)
        compute += self._elementwise(layer, tokens, backward=False) + self._restore_s(layer)
        exposed = self._mesh_exchange(layer, tokens, "forward") + self._expert_exchange(layer, tokens)
        seconds = self._at_host_speed(layer, Seconds(compute, exposed), forwards=1)
        gathers = 0 if self._layout.gathers_once else 1
        seconds = self._with_weights(layer, seconds, gathers, 0, self._spared_of_weights("forward"))
        return self._beside_copies(layer, seconds, tokens)

    def layer_backward(self, layer: Layer, start: int, stop: int) -> Seconds:
        """Backward of positions ``[start, stop)``, including recomputation."""
        layout, adds = self._layout, self._add_weight_gradients(self.trained_weights(layer))
        seconds = self._backward(layer, start, stop, "backward") + Seconds(adds)
        seconds = self._at_host_speed(layer, seconds, forwards=int(layout.recomputes), backwards=1)
        gathers, reduces = int(layout.weight_gather == "layer"), int(layout.gradient_sync == "unit")
        seconds = self._with_weights(layer, seconds, gathers, reduces, self._spared_of_weights("backward"))
        return self._beside_copies(layer, seconds, self.tokens(stop - start))

    def layer_split_backward(self, layer: Layer, start: int, stop: int) -> tuple[Seconds, Seconds]:
        """The halves of a split backward: the gradient of the input, and those of the weights.

        On a mesh the second half gathers inputs and output gradients again, and nothing hides its reduction over
        `batch`. The reduction is counted for each segment, although consecutive second halves share one.
        """
        if self._model.is_frozen:
            # Weight gradients of adapters aren't deferred.
            return self.layer_backward(layer, start, stop), Seconds()
        layout, tokens, batch = self._layout, self.tokens(stop - start), self.links.batch
        # Only weight gradients of linear layers can be deferred, not those of routers and experts.
        later = sum(
            self._product(projection, tokens, of_weights=True)
            for projection in layer.projections
            if projection.kind != "router"
        )
        weights, others = self.block_weights(layer, experts=False), 0.0
        if layer.experts is not None:
            others = self.block_weights(layer) - weights
        inputs = self._backward(layer, start, stop, "input") + Seconds(self._add_weight_gradients(others) - later)
        inputs = self._at_host_speed(layer, inputs, forwards=int(layout.recomputes), backwards=0.5)
        reduces = layout.gradient_sync == "unit"
        moving_s = batch.gather_s((weights + others) * _ELEMENT, int(layout.weight_gather == "layer"))
        moving_s -= batch.moving_s(self._spared_of_weights("backward"))
        moving_s += batch.gather_s(others * _ELEMENT, int(reduces and others > 0))
        inputs += Seconds(exposed=max(0.0, moving_s - batch.overlap * inputs.compute))
        inputs = self._beside_copies(layer, inputs, tokens)
        deferred = Seconds(later + self._add_weight_gradients(weights), self._mesh_exchange(layer, tokens, "weight"))
        deferred = self._at_host_speed(layer, deferred, backwards=0.5)
        return inputs, deferred + Seconds(exposed=batch.gather_s(weights * _ELEMENT, int(reduces)))

    def _backward(self, layer: Layer, start: int, stop: int, half: Literal["backward", "input"]) -> Seconds:
        """Recomputation and all products of backward, without accumulating or reducing the weights' gradients."""
        tokens, layout = self.tokens(stop - start), self._layout
        compute = self._products(layer, tokens) + self._products(layer, tokens, of_weights=True)
        compute += self._attention(layer, start, stop, backward=True) + self._restore_s(layer)
        compute += self._elementwise(layer, tokens, backward=True)
        exposed = self._mesh_exchange(layer, tokens, half) + self._expert_exchange(layer, tokens)
        again = Seconds()
        if layout.recomputes:
            kernel_s = 0.0
            if layout.checkpointing == "layers":
                kernel_s = self._attention(layer, start, stop, backward=False)
            again = Seconds(
                self._products(layer, tokens)
                + self._restore_s(layer)
                + kernel_s
                + self._elementwise(layer, tokens, backward=False),
                self._mesh_exchange(layer, tokens, "forward") + self._expert_exchange(layer, tokens),
            )
        elif layout.checkpointing == "scores" and self._software.attention == "scores":
            again = Seconds(self._attention(layer, start, stop, backward=False))
        elif layout.checkpointing == "mlp_up":
            norm = self.kernels.elementwise_s(tokens * 4 * self._model.hidden / self._residual_ranks)
            again = Seconds(norm + self._product(self._mlp_up(layer), tokens))
        return Seconds(compute, exposed) + again

    def once_s(self, layer: Layer, forward: Seconds, backward: Seconds) -> float:
        """Waiting once a step: for weights gathered by its first forward, and gradients reduced by its last backward.

        Args:
            layer: one of the model's kinds.
            forward, backward: times of the first segment, to which both units belong.
        """
        layout, waiting_s = self._layout, 0.0
        if layout.gathers_once:
            waiting_s += self._waiting_s(layer, forward, gathers=1, reduces=0)
        if layout.gradient_sync == "step":
            before = int(layout.weight_gather == "layer")
            spared = self._spared_of_weights("backward")
            waiting_s += self._waiting_s(layer, backward, before, 1, spared)
            waiting_s -= self._waiting_s(layer, backward, before, 0, spared)
        return waiting_s

    def _at_host_speed(self, layer: Layer, seconds: Seconds, forwards: int = 0, backwards: float = 0.0) -> Seconds:
        """Raise a time to what the host needs to launch the work of a layer's passes."""
        host_s = self._software.host_s
        if self._layout.mesh.sequence > 1:
            host_s += 2 * self._software.host_collective_s
        # A backward launches as much as two forwards, of which a frozen layer spares the weights' gradients.
        of_backward = 4 / 3 if self._model.is_frozen else 2
        launched_s = (forwards + backwards * of_backward) * host_s
        launched_s += (forwards + backwards) * layer.updates * self._software.host_update_s
        return Seconds(max(seconds.compute, launched_s - seconds.exposed), seconds.exposed)

    def _products(self, layer: Layer, tokens: float, *, of_weights: bool = False) -> float:
        """Time of the products of a forward, of the gradients of inputs, or ``of_weights``."""
        is_frozen = of_weights and self._model.is_frozen
        total = sum(self._factor_products(projection, tokens) for projection in layer.projections if projection.factors)
        if not is_frozen:
            total += sum(self._product(projection, tokens, of_weights=of_weights) for projection in layer.projections)
        if layer.experts is not None and not (is_frozen and layer.experts.factors is None):
            local_experts = layer.experts.count / self._layout.expert_ranks
            expert_rows = tokens * layer.experts.per_token / local_experts
            total += sum(
                self._product(projection, expert_rows, round(local_experts)) for projection in layer.experts.projections
            )
            if layer.experts.factors is not None:
                total += self._expert_update_s(layer.experts)
        return total

    def _factor_products(self, projection: Projection, tokens: float) -> float:
        """Time of the products with both factors of an update, cut as :mod:`cuboid.tensor3d.low_rank` says."""
        assert projection.factors is not None
        factors, mesh, kind = projection.factors, self._layout.mesh, projection.kind
        inputs, outputs, before, after = factors.inputs, float(factors.outputs), tokens, tokens
        if kind == "up":
            inputs, outputs, before = inputs / mesh.hidden, outputs / self._ranks, tokens / mesh.sequence
        elif kind == "down":
            inputs, outputs, after = inputs / self._ranks, outputs / mesh.hidden, tokens / mesh.sequence
        elif kind in ("latent", "router"):
            inputs, before = inputs / mesh.hidden, tokens / mesh.sequence
        elif kind == "from latent":
            outputs /= self._ranks
        first_s = self.kernels.matmul_s(before, factors.features, inputs)
        return first_s + self.kernels.matmul_s(after, outputs, factors.rank)

    def _expert_update_s(self, experts: Experts) -> float:
        """Time to add B A to a rank's block of all experts' weights."""
        assert experts.factors is not None
        rank = experts.factors.features / (len(experts.projections) * experts.count)
        elements = experts.parameters / (self._ranks * self._layout.expert_ranks)
        update_s = 2 * elements * rank / self.kernels.product_flops
        return update_s + self.kernels.elementwise_s(3 * _ELEMENT * elements, 2 * len(experts.projections))

    def _product(self, projection: Projection, tokens: float, count: int = 1, *, of_weights: bool = False) -> float:
        mesh, layout = self._layout.mesh, self._layout
        kind, outputs, inputs = projection.kind, float(projection.outputs), float(projection.inputs)
        if kind == "up":
            outputs, inputs = outputs / mesh.sequence, inputs / mesh.hidden
        elif kind == "down":
            outputs, inputs = outputs / mesh.hidden, inputs / mesh.sequence
        elif kind in ("router", "latent"):
            tokens, inputs = tokens / mesh.sequence, inputs / mesh.hidden
        elif kind == "from latent":
            outputs /= self._ranks
        grouped = layout.splits_experts and kind in ("up", "down")
        least = layout.fp8_min_dimension
        # The recipe computes gradients of weights in 16 bits.
        in_16_bits = of_weights or kind in ("router", "whole")
        fp8 = least is not None and not in_16_bits and min(outputs, inputs) >= least
        return self.kernels.matmul_s(tokens, outputs, inputs, count, grouped=grouped, fp8=fp8)

    @staticmethod
    def _mlp_up(layer: Layer) -> Projection:
        return next(projection for projection in layer.projections if projection.name in ("gate_up", "up"))

    def _attention(self, layer: Layer, start: int, stop: int, *, backward: bool) -> float:
        attention, rows = layer.attention, self._rows
        share = self._ranks * self._layout.context
        features = attention.query_dim + attention.value_dim
        heads = attention.heads / share
        if self._software.attention == "flash":
            pairs = rows * heads * seen_keys(start, stop, attention.window)
            if not self._software.balances_context:
                # The last rank sees all keys; the others wait for it.
                pairs *= (2 * self._layout.context - 1) / self._layout.context
            return self.kernels.attention_s(pairs, features) * (ATTENTION_BACKWARD if backward else 1)
        # The whole rectangle is multiplied. Each score is written, scaled and masked, normalized, dropped out and read.
        pairs = rows * heads * (stop - start) * stop
        times = 2 if backward else 1
        moved = (19 if self._software.dropout else 14) if backward else (13 if self._software.dropout else 8)
        length = stop - start
        products = sum(
            self.kernels.matmul_s(length, stop, dim, count=1) + (rows * heads - 1) * 2 * length * stop * dim
            / self.kernels.product_flops
            for dim in (attention.query_dim, attention.value_dim)
        )  # fmt: skip
        return times * products + self.kernels.elementwise_s(pairs * moved * self._passes, 4 if backward else 2)

    def _elementwise(self, layer: Layer, tokens: float, *, backward: bool) -> float:
        """Time of norms, residual additions, rotations and the nonlinearity, by the bytes that they read and write."""
        software, hidden = self._software, self._model.hidden
        residual = (24 if backward else 20) * hidden
        if software.dropout:
            residual += 10 * hidden
        inner = 4 * (layer.attention.query + layer.attention.key) if layer.attention.rotary else 0
        inner += self._nonlinearity_bytes(layer.intermediate, layer.gated, backward=backward)
        if layer.experts is not None:
            routed = layer.experts.per_token
            inner += routed * self._nonlinearity_bytes(layer.experts.width, layer.gated, backward=backward)
            # Tokens are permuted into the experts' order and back; on a mesh those of all ranks of `sequence`, and in
            # backward their inputs once more.
            if self._layout.splits_experts:
                inner += routed * (12 if backward else 8) * hidden * self._layout.mesh.sequence
            else:
                inner += routed * 8 * hidden
        # Norms of latents, which all ranks of the mesh compute.
        latents = (10 if backward else 8) * sum(projection.inputs for projection in layer.from_latents)
        moved = tokens * (residual / self._residual_ranks + inner / self._ranks + latents)
        moved = moved * self._passes + self._added_updates(layer, tokens, backward=backward)
        return self.kernels.elementwise_s(moved, 14 if backward else 8)

    def _added_updates(self, layer: Layer, tokens: float, *, backward: bool) -> float:
        """Bytes that are moved to add adapters' updates to the outputs, or to sum the gradients of inputs."""
        factors = [projection.factors for projection in layer.projections if projection.factors is not None]
        moved = sum(6 * one.inputs if backward else 2 * one.outputs for one in factors) * tokens / self._ranks
        # On one rank the layers are PEFT's, which scales and adds in passes of their own.
        return moved * self._passes if self._layout.mesh.size == 1 else moved

    @staticmethod
    def _nonlinearity_bytes(features: int, gated: bool, *, backward: bool) -> int:
        if gated:
            return (10 if backward else 6) * features
        return (6 if backward else 4) * features

    def block_weights(self, layer: Layer, *, experts: bool = True) -> float:
        """Elements of a layer's unsharded blocks on a rank; ``experts``: whether to include experts and routers."""
        elements = sum(
            projection.weights / self._pieces(projection)
            for projection in layer.projections
            if experts or projection.kind != "router"
        )
        if layer.experts is not None and experts:
            elements += layer.experts.padded(self._layout.mesh.batch) / (self._layout.expert_ranks * self._ranks)
        return elements

    def trained_weights(self, layer: Layer) -> float:
        """Elements of a layer's unsharded blocks of which a rank computes gradients."""
        if not self._model.is_frozen:
            return self.block_weights(layer)
        mesh, elements = self._layout.mesh, 0.0
        for projection in layer.projections:
            if (factors := projection.factors) is not None:
                a, b = {
                    "up": (mesh.hidden, self._ranks),
                    "down": (self._ranks, mesh.hidden),
                    "latent": (mesh.hidden, 1),
                    "from latent": (1, self._ranks),
                }.get(projection.kind, (1, 1))
                elements += factors.a / a + factors.b / b
        if layer.experts is not None and layer.experts.factors is not None:
            elements += layer.experts.factors.parameters
        return elements

    def gathered_bytes(self, layer: Layer) -> float:
        """Bytes of a layer's unsharded blocks as they are gathered, without the factors of adapters."""
        return self.block_weights(layer) * _ELEMENT - self._model.spared_bytes(self.block_weights(layer, experts=False))

    def restored_bytes(self, layer: Layer) -> float:
        """Bytes of the largest block that is restored for a product from 4 bits; 0 if none are."""
        blocks = [projection.weights / self._pieces(projection) for projection in layer.projections]
        return max(blocks, default=0.0) * _ELEMENT if self._model.four_bits else 0.0

    def _restore_s(self, layer: Layer) -> float:
        """Time to restore a layer's weights from 4 bits."""
        if not self._model.four_bits:
            return 0.0
        return self.kernels.elementwise_s(
            self.block_weights(layer, experts=False) * (_ELEMENT + QUANTIZED_BYTES), len(layer.projections)
        )

    def _pieces(self, projection: Projection) -> int:
        """Number of unsharded blocks of a weight."""
        if projection.kind in ("router", "latent"):
            return self._layout.mesh.hidden
        return 1 if projection.kind == "whole" else self._ranks

    def _add_weight_gradients(self, weights: float) -> float:
        """Time to add a unit's gradients of ``weights`` elements to a sum: it is read and written, they are read."""
        software = self._software
        per_weight = 2 * software.gradient_bytes + (0 if software.fused_weight_gradients else _ELEMENT)
        if not software.fused_weight_gradients and self._layout.micro_batches * self._layout.segments == 1:
            per_weight = 0
        return self.kernels.elementwise_s(weights / self._layout.mesh.batch * per_weight, 0)

    # --- communication ------------------------------------------------------------------------------------------

    def _mesh_exchange(self, layer: Layer, tokens: float, which: UnitPass) -> float:
        mesh, links, software = self._layout.mesh, self.links, self._software
        is_frozen = self._model.is_frozen
        # Gradients of frozen weights would need the inputs again.
        of_inputs, of_outputs, of_downs = _EXCHANGES["input" if is_frozen and which == "backward" else which]
        if which in ("backward", "weight") and software.sequence_parallel and not is_frozen:
            of_inputs += software.regathers
        hidden_bytes = tokens * self._model.hidden / mesh.hidden * _ELEMENT
        routed = layer.experts if which != "weight" else None
        splits_experts = routed is not None and self._layout.splits_experts
        # Attention and the MLP or the experts; shared experts are a third block.
        blocks = 3 if splits_experts and layer.intermediate else 2
        if which == "weight" and not layer.intermediate:
            blocks = 1
        gathered_blocks = blocks - (not layer.gathers_attention_input)
        exchanged = gathered_blocks * of_inputs + blocks * of_outputs
        trains_experts = routed is not None and (not is_frozen or routed.factors is not None)
        if which == "input" and splits_experts and trains_experts:
            exchanged += software.regathers
        total = links.sequence.gather_s(hidden_bytes, exchanged) * (1 - software.hides_exchange)
        if layer.latents:
            total += self._latent_exchange(layer, tokens, which)
        if mesh.hidden > 1:
            ups: float = sum(projection.outputs for projection in layer.projections if projection.kind == "up")
            downs: float = sum(projection.inputs for projection in layer.projections if projection.kind == "down")
            if routed is not None:
                ups += routed.per_token * routed.projections[0].outputs
                # Experts' backward isn't split: all of it is in the "input" half.
                downs += routed.per_token * routed.width * (2 if which == "input" and trains_experts else 1)
            total += links.hidden.gather_s(tokens * ups / mesh.sequence * _ELEMENT)
            total += links.hidden.gather_s(tokens * downs / mesh.sequence * _ELEMENT, of_downs)
        if self._spared is not None:
            spared = {"forward": self._spared.forward, "input": self._spared.gradients}.get(which, {})
            sequence = links.sequence.moving_s(tokens * spared.get("sequence", 0.0)) * (1 - software.hides_exchange)
            total -= sequence + links.hidden.moving_s(tokens * spared.get("hidden", 0.0))
        if is_frozen:
            total += sum(self._factor_exchange(one, tokens) for one in layer.projections if one.factors)
        if routed is not None and splits_experts:
            total += self._routing_exchange(routed, tokens, backward=which != "forward")
        return total if which == "weight" else total + self._context_exchange(layer, backward=which != "forward")

    def _factor_exchange(self, projection: Projection, tokens: float) -> float:
        """The r features between both factors of an update: summed over `hidden`, gathered or scattered."""
        assert projection.factors is not None
        sequence, hidden = self.links.sequence, self.links.hidden
        features_bytes = tokens * projection.factors.features * _ELEMENT
        match projection.kind:
            case "up" if sequence.size == 1:
                # In the messages of the layers themselves.
                return 2 * hidden.moving_s(features_bytes)
            case "up" | "down" | "latent":
                return sequence.gather_s(features_bytes) + hidden.reduce_s(features_bytes / sequence.size)
        return 0.0

    def _latent_exchange(self, layer: Layer, tokens: float, which: UnitPass) -> float:
        """Latents, summed over `hidden` and gathered over `sequence`, and the weights that they are computed with."""
        layout, sequence, hidden = self._layout, self.links.sequence, self.links.hidden
        features = sum(projection.outputs for projection in layer.latents)
        weights = sum(projection.weights for projection in layer.latents) / layout.mesh.hidden
        gathers, reduces = layout.weight_gather == "layer", layout.gradient_sync == "unit"
        moves = {"forward": not layout.gathers_once, "backward": gathers + reduces, "input": gathers, "weight": reduces}
        if self._model.is_frozen and which == "backward":
            moves["backward"] = gathers
        # Over `batch` they are gathered with the layer's other weights.
        weights_bytes = weights * _ELEMENT - self._model.spared_bytes(weights)
        total = sequence.gather_s(weights_bytes, int(moves[which]))
        total += hidden.reduce_s(tokens / sequence.size * features * _ELEMENT)
        return total if which == "weight" else total + sequence.gather_s(tokens * features * _ELEMENT)

    def _routing_exchange(self, experts: Experts, tokens: float, *, backward: bool) -> float:
        """Router logits summed over `hidden`, and choices gathered over `sequence`; in float32."""
        sequence, hidden = self.links.sequence, self.links.hidden
        # Indices and weights of the choices; in backward the gradients of the weights.
        told = sequence.gather_s(tokens * experts.per_token * _STATISTIC, 1 if backward else 2)
        logits = tokens / sequence.size * experts.count * _STATISTIC
        return told + (hidden.reduce_s(logits) if backward else hidden.gather_s(logits * hidden.size))

    def _context_exchange(self, layer: Layer, *, backward: bool) -> float:
        """Exchange of keys and values among ranks that share a sequence; attention to keys already there hides half."""
        if self._layout.context == 1:
            return 0.0
        attention = layer.attention
        length_bytes = self._length * self._rows * (attention.key + attention.value) / self._ranks * _ELEMENT
        return 0.5 * self.links.context.gather_s(length_bytes, 2 if backward else 1)

    def _expert_exchange(self, layer: Layer, tokens: float) -> float:
        """Tokens to the experts' ranks and back."""
        if layer.experts is None or self._layout.expert_ranks == 1:
            return 0.0
        return self.links.experts.exchange_s(tokens * layer.experts.per_token * self._model.hidden * _ELEMENT, 2)

    def _with_weights(self, layer: Layer, seconds: Seconds, gathers: int, reduces: int, spared: float) -> Seconds:
        """Add what ``seconds`` doesn't hide of the gathers of weights over `batch` and the reduction of gradients."""
        return Seconds(seconds.compute, seconds.exposed + self._waiting_s(layer, seconds, gathers, reduces, spared))

    def _waiting_s(self, layer: Layer, seconds: Seconds, gathers: int, reduces: int, spared: float = 0.0) -> float:
        """What computing doesn't hide of gathers and reductions of a layer's weights, of which fp8 spares some."""
        batch = self.links.batch
        moving_s = batch.gather_s(self.gathered_bytes(layer), gathers)
        moving_s += batch.gather_s(self.trained_weights(layer) * _ELEMENT, reduces)
        return max(0.0, moving_s - batch.moving_s(spared) - batch.overlap * seconds.compute)

    def _spared_of_weights(self, which: Literal["forward", "backward"]) -> float:
        """What fp8 spares of a pass's gather of weights over `batch`, of its total size."""
        layout, spared = self._layout, self._spared
        if spared is None or layout.weight_gather == "step":
            return 0.0
        if which == "forward":
            return spared.rows
        if not layout.recomputes:
            return spared.columns
        # Uncompiled layers gather what recomputation and backward share as it is.
        return spared.columns - spared.rows_again if layout.compiled else 0.0

    # --- the ends -----------------------------------------------------------------------------------------------

    @property
    def _gathers_of_ends(self) -> int:
        """Collectives of the embedding or the head in each unit: the gather of its weight, its gradient's reduction."""
        return (not self._layout.gathers_once) + (self._layout.gradient_sync == "unit" and self._trains_ends)

    @property
    def _trains_ends(self) -> bool:
        return not self._model.is_frozen

    def once_of_ends_s(self, *, is_spread: bool = False) -> float:
        """As :meth:`once_s`, for the embedding or the head; all of it for a head that is spread over the stages."""
        rows = self._model.vocabulary * self._model.hidden / self._ranks
        most = 1 + self._trains_ends
        return self.links.batch.gather_s(rows * _ELEMENT, most if is_spread else most - self._gathers_of_ends)

    def head_forward(self, start: int, stop: int, shares: int = 1) -> Seconds:
        """The head with its loss: forward and, as logits aren't kept, also backward.

        Or one of several equal ``shares``, each of all tokens. Its rows stay unsharded for the whole step.
        """
        tokens, mesh, model = self.tokens(stop - start), self._layout.mesh, self._model
        own_outputs = model.outputs / mesh.sequence
        product = self.kernels.matmul_s(tokens, own_outputs, model.hidden / mesh.hidden)
        if mesh.sequence == 1:
            product /= self._software.unsplit_head
        passes = {"chunked": 16, "fused": 10, "whole": 26}[self._software.loss]
        moved = tokens * own_outputs / mesh.hidden * passes
        weights = own_outputs * model.hidden / mesh.hidden
        products = 3 if self._trains_ends else 2
        add = weights / mesh.batch * 2 * self._software.gradient_bytes * self._trains_ends
        exposed = self.links.sequence.gather_s(tokens * model.hidden / mesh.hidden * _ELEMENT, 3)
        exposed += self.links.hidden.gather_s(tokens * own_outputs / shares * _ELEMENT, 2)
        exposed += self.links.batch.gather_s(weights * _ELEMENT, self._gathers_of_ends if shares == 1 else 0)
        return Seconds((products * product + self.kernels.elementwise_s(moved + add, 8)) / shares, exposed)

    def head_rows_s(self) -> tuple[float, float]:
        """Times in which the last stage sends the other stages their rows of the head, and is sent the gradients."""
        share = self._model.outputs * self._model.hidden / self._ranks / self._layout.stages * _ELEMENT
        sent_s = (self._layout.stages - 1) * self.links.stages.send_s(share)
        return sent_s, sent_s * self._trains_ends

    def embedding(self, start: int, stop: int) -> Seconds:
        """Lookup of tokens, and accumulation of the whole table's gradient: forward and backward together."""
        tokens, mesh, model = self.tokens(stop - start), self._layout.mesh, self._model
        rows = model.vocabulary * model.hidden / self._ranks
        moved = 8 * tokens * model.hidden / self._ranks
        moved += rows / mesh.batch * (2 * self._software.gradient_bytes + 4) * self._trains_ends
        exposed = self.links.sequence.gather_s(tokens * model.hidden / mesh.hidden * _ELEMENT, 2)
        exposed += self.links.batch.gather_s(rows * _ELEMENT, self._gathers_of_ends)
        return Seconds(self.kernels.elementwise_s(moved, 4), exposed)

    def message_s(self, start: int, stop: int) -> float:
        """Time to send a unit's hidden states to the next stage."""
        sent_bytes = self.tokens(stop - start) * self._model.hidden / self._ranks * _ELEMENT
        return self.links.stages.send_s(sent_bytes)
