"""Peak memory of a rank, by kind and stage.

What layers save is counted in their own code; where that is impossible, and for other frameworks, formulas stand, which
extend those of docs/formulas.md to layers of any architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, floor

from cuboid.models.cross_entropy.chunked import CHUNK_BYTES, CHUNK_TOKENS
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import CPU, Cluster
from cuboid.planner.description.kept import CountedAs, LayerCount, ModelCount, count_kept
from cuboid.planner.description.model import Layer
from cuboid.planner.description.peak import ModelPeak, PeakOf, count_peak, is_long
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import CHUNKED
from cuboid.seq1f1b.schedule.unit_costs import ends_of
from cuboid.seq1f1b.schedule.units_on_host import UnitOnRank, unit_of, units_on_host

#: Fraction of a GPU's memory that tensors can use. The rest is the context, the buffers of the communication library,
#: and fragmentation: of the runs in docs/data, those estimated at 0.92 ran, and those at 0.94 didn't.
USABLE = 0.93
#: Of a parameter: master weight and two moments in float32.
_OPTIMIZER_BYTES = 12
#: Of a parameter whose master is in host memory: besides these its gradient in float32, and a new weight in 16 bits.
_HOST_OPTIMIZER_BYTES = _OPTIMIZER_BYTES + 6
_ELEMENT = 2
_STATISTIC = 4
#: Bytes of each choice of an expert on a mesh: its row, the row's choice and expert, and its weight.
_ROUTED = 3 * 4 + _STATISTIC


@dataclass(frozen=True)
class Memory:
    """Peak memory of one rank by kind, in bytes.

    Args:
        parameters: the parameters that it owns, in 16 bits.
        gradients: gradients of these.
        optimizer: float32 masters and moments.
        gathered: blocks of weights that are unsharded while layers run.
        activations: activations saved for backward.
        key_value_store: KV caches that segments share, and their gradients.
        logits: logits, and what else the loss needs.
        working: gradients inside the layer that runs, and what it recomputes.
        messages: messages between stages.
        framework: buffers of the framework and its libraries.
        on_host: what layers keep, and the optimizer, in host memory, which isn't in the total.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    activations: float = 0
    key_value_store: float = 0
    logits: float = 0
    working: float = 0
    messages: float = 0
    framework: float = 0
    on_host: float = 0

    @property
    def total(self) -> float:
        """Bytes of all kinds on the device."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Bytes on the device by name of the kind, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "on_host"}


def stage_memory(cost: StepCost) -> list[Memory]:
    """Memory of a rank of each stage."""
    return [_Stage(cost, stage).memory() for stage in range(cost.layout.stages)]


def uncounted(cost: StepCost) -> str:
    """What the estimate of a step leaves out, in words; "" if nothing."""
    left_out = [cost.model.uncounted] if cost.model.uncounted else []
    count = _Stage(cost, 0).count
    if not count.layers and cost.model.uncounted_by_formulas:
        left_out.append(cost.model.uncounted_by_formulas)
    if count.obstacle:
        left_out.append(f"what its layers keep by their own code, instead of which formulas stand ({count.obstacle})")
    if count.layers and any(layer.attention.query == 0 for layer in cost.model.kinds):
        left_out.append("what kernels for layers without attention would keep in place of what torch's operations keep")
    return "; ".join(left_out)


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a GPU's memory that tensors can use."""
    return USABLE * cluster.gpu.memory_bytes


def states_bytes(cost: StepCost) -> float:
    """A cheap lower bound of memory: parameters, gradients and optimizer states, divided equally over the stages."""
    layout, model = cost.layout, cost.model
    ranks = layout.mesh.size * layout.stages * layout.expert_ranks
    quantized = sum(layer.quantized for layer in model.layers)
    weights_bytes = (model.parameters * _ELEMENT - model.spared_bytes(quantized)) / ranks
    trained = model.trained_parameters / ranks
    shared = layout.replicas * layout.context
    gradients = trained * cost.software.gradient_bytes / (shared if layout.zero_stage >= 2 else 1)
    updated = trained / (shared if layout.zero_stage else 1)
    if layout.optimizer_on_host:
        return weights_bytes + gradients
    return weights_bytes + gradients + updated * _OPTIMIZER_BYTES


def ends_memory(cost: StepCost) -> float:
    """Bytes of the fuller one of the first and the last stage, which are the fullest if stages are balanced."""
    return max(_Stage(cost, stage).memory().total for stage in {0, cost.layout.rank_of[-1]})


def fullest(cost: StepCost) -> Memory:
    """Memory of the fullest rank."""
    return max(stage_memory(cost), key=lambda memory: memory.total)


def counted_bytes(cost: StepCost) -> float | None:
    """Bytes of the fullest rank, with what is alive while a layer runs counted by running it.

    Returns:
        None if the layers' code can't be run without values, or isn't Cuboid's.
    """
    stages = [_Stage(cost, stage) for stage in range(cost.layout.stages)]
    if not stages[0].peak.layers:
        return None
    return max(stage.counted_bytes() for stage in stages)


class _Stage:
    """One stage of a layout: a pipeline rank with all its parts."""

    def __init__(self, cost: StepCost, stage: int) -> None:
        self.cost, self.stage = cost, stage
        self.model, self.layout, self.software = cost.model, cost.layout, cost.software
        self._units = cost.units
        rank_of = cost.layout.rank_of
        # A layer that two stages share counts on both: what each half keeps isn't known, its input is kept by both.
        indices_of = {
            part: range(floor(start), ceil(stop))
            for part, (start, stop) in enumerate(ends_of(cost.stage_layers))
            if rank_of[part] == stage
        }
        #: For each of its parts, the number of layers of each of the model's kinds.
        self.parts = {
            part: Counter(cost.model.kind_of_layers[index] for index in indices) for part, indices in indices_of.items()
        }
        self.layers = [cost.model.layers[index] for indices in indices_of.values() for index in indices]
        self.is_first, self.is_last = rank_of[0] == stage, rank_of[-1] == stage
        self._ranks = self.layout.mesh.of("sequence", "hidden")

    def memory(self) -> Memory:
        layout, software = self.layout, self.software
        dense, experts = self.cost.own_trained[self.stage]
        shared = layout.replicas * layout.context
        optimizer = dense / (shared if layout.zero_stage else 1)
        optimizer += experts / (max(1, shared // layout.expert_ranks) if layout.zero_stage else 1)
        over_context = layout.context if software.shards_over_context else 1
        gradients = (dense + experts) / over_context * software.gradient_bytes
        gradients /= shared if layout.zero_stage >= 2 else 1
        activations, store, on_host = self._activations()
        logits = self._logits() if self.is_last or layout.head_ranks else 0.0
        units = {
            "gathered": self._gathered(),
            "activations": activations,
            "key_value_store": store,
            "logits": logits,
            # The peak is either in the loss or in a layer's backward: add only what exceeds the logits.
            "working": self._buffers() + max(0.0, self._working() - logits),
            "messages": self._messages(),
        }
        on_device = 0.0 if layout.optimizer_on_host else optimizer
        return Memory(
            parameters=self.cost.own_bytes[self.stage] / over_context,
            gradients=gradients,
            optimizer=on_device * _OPTIMIZER_BYTES,
            **units,
            framework=software.own_bytes,
            on_host=on_host + (optimizer - on_device) * _HOST_OPTIMIZER_BYTES,
        )

    # --- weights ------------------------------------------------------------------------------------------------

    def _gathered(self) -> float:
        # Weights in 4 bits are restored one after the other.
        restored = max(map(self._units.restored_bytes, self.layers), default=0.0)
        if self.layout.mesh.batch == 1:
            return restored
        blocks = [self._units.gathered_bytes(layer) for layer in self.layers]
        head = self.model.vocabulary * self.model.hidden / self._ranks * _ELEMENT
        ends = head if self.is_last or self.is_first else 0
        trained = sum(map(self._units.trained_weights, self.layers))
        trained += 0.0 if self.model.is_frozen else ends / _ELEMENT
        # Gradients that are reduced by the step's last unit are accumulated in float32 until then.
        waiting = restored + (trained * 4 if self.layout.gradient_sync == "step" else 0)
        if self.layout.weight_gather == "step":
            return sum(blocks) * (2 if self.software.keeps_whole_gradients else 1) + ends + waiting
        # The layer that runs, and one whose gather is in flight.
        return max(2 * max(blocks), ends) + waiting

    # --- activations --------------------------------------------------------------------------------------------

    @cached_property
    def count(self) -> ModelCount:
        """What layers keep on a rank, by their own code; empty if only the formulas apply."""
        if not self.software.counted or self.model.config is None:
            return ModelCount()
        return count_kept(self.model, self._counted_as)

    @property
    def _counted_as(self) -> CountedAs:
        # Stages without a mesh have Hugging Face's own modules.
        mesh = self.layout.mesh if self.layout.mesh.size > 1 or self.layout.stages == 1 else None
        alone = self._units.tokens(1) == 1
        return CountedAs(mesh, segmented=self._is_cut, alone=alone, splits=self.cost.splits)

    @property
    def _is_cut(self) -> bool:
        return len(self.cost.lengths) > 1

    def _sizes(self, kind: int, segment: int) -> tuple[tuple[float, int, int], bool]:
        """A segment's rows, tokens, and keys that these see in a kind of layer; whether these end beyond its window."""
        length, window = self.cost.lengths[segment], self.model.kinds[kind].attention.window
        stop = sum(self.cost.lengths[: segment + 1])
        reached = window is not None and stop > window
        keys = min(stop, length + window - 1) if reached and window and self._is_cut else stop
        return (self._units.tokens(1), length, keys), reached

    def _layer_count(self, kind: int, segment: int) -> tuple[LayerCount, tuple[float, int, int]]:
        """The count of a kind of layer, and a segment's sizes: rows, tokens, and keys that these see."""
        sizes, reached = self._sizes(kind, segment)
        return (self.count.windowed if reached else self.count.layers)[kind], sizes

    def _kept(self, kind: int, segment: int) -> float:
        """Bytes that a layer of one of the model's kinds saves of a segment, without what segments share."""
        if self.count.layers:
            counted, sizes = self._layer_count(kind, segment)
            return counted.kept.of(*sizes)
        layer, tokens = self.model.kinds[kind], self._units.tokens(self.cost.lengths[segment])
        key_value = 0.0 if self._shares_keys else self._key_value(layer)
        return tokens * (key_value + self._kept_by_formula(layer))

    def _kept_by_formula(self, layer: Layer) -> float:
        """Bytes that a layer saves of one token, without keys and values."""
        layout, software, hidden, sizes = self.layout, self.software, self.model.hidden, layer.attention
        routing = 0.0
        residual = 2 * hidden * _ELEMENT
        if software.dropout:
            residual += 2 * hidden
        norms = 2 * self._norm()
        attention = (sizes.query + sizes.output) * _ELEMENT + sizes.heads * _STATISTIC
        if sizes.query_dim != sizes.value_dim and self._is_cut:
            # Kernels for two head dims return heads by heads, which the output projection has a copy of.
            attention += sizes.output * _ELEMENT
        if sizes.head_norms:
            attention += (sizes.query + sizes.key) * _ELEMENT
        between = self.model.nonlinearity if not software.fused_nonlinearity else (2 if layer.gated else 1)
        mlp = (between + 1) * layer.intermediate * _ELEMENT
        if layer.experts is not None:
            # For each expert of a token: its input, and what is saved between its products. On a mesh the input is
            # saved once for each token, and besides what the choice's weight is multiplied by.
            routed, width = layer.experts.per_token, layer.experts.width
            if layout.splits_experts:
                mlp += routed * (between + 2) * width * _ELEMENT
                # The shared experts' output, if it is multiplied with a gate.
                residual += (
                    (sum(projection.kind == "router" for projection in layer.projections) - 1) * hidden * _ELEMENT
                )
                residual += layer.experts.router_kept
                routing = routed * _ROUTED + layer.experts.count * _STATISTIC / layout.mesh.sequence
            else:
                mlp += routed * (hidden + (between + 1) * width) * _ELEMENT
        if software.attention == "scores":
            # The softmax's result, and with dropout its mask and its result.
            attention += sizes.heads * self.cost.length * (2 + (3 if software.dropout else 0)) * self._with_scores()
        if layout.checkpointing == "mlp_up":
            mlp -= between * layer.intermediate * _ELEMENT
            residual -= hidden * _ELEMENT
        split = (residual + norms) / self._residual_ranks + (attention + mlp) / self._ranks
        return split + routing + _whole_latents(layer)

    def _norm(self) -> float:
        """Bytes that a norm saves of one token, by formula: its input and statistics."""
        if self.model.norm == "layer":
            return self.model.hidden * _ELEMENT + 2 * _ELEMENT
        return self.model.hidden * _ELEMENT + _STATISTIC

    def _end(self, segment: int) -> float:
        """Bytes that a unit saves after the last layer: the last norm's, and the gradient of the head's input."""
        length, rows = self.cost.lengths[segment], self._units.tokens(1)
        gradient = rows * length * self.model.hidden * _ELEMENT / self._residual_ranks
        if self.count.layers:
            return self.count.end.of(rows, length, length) + gradient
        return rows * length * self._norm() / self._residual_ranks + gradient

    @property
    def _residual_ranks(self) -> int:
        return self._ranks if self.software.sequence_parallel else self.layout.mesh.hidden

    def _with_scores(self) -> int:
        return 0 if self.layout.checkpointing == "scores" else 1

    def _key_value(self, layer: Layer) -> float:
        """Bytes of keys and values of one token."""
        attention = layer.attention
        heads = max(attention.key_value_heads / self._ranks, 1)
        return heads * (attention.query_dim + attention.value_dim) * _ELEMENT

    def _kept_attention(self, kind: int, segment: int) -> float:
        return self._units.kept_attention(self.model.kinds[kind], self._units.tokens(self.cost.lengths[segment]))

    def _unit(self, kinds: Counter[int], segment: int) -> float:
        """Bytes that a unit saves in ``kinds`` layers of each kind until its backward, without a shared KV cache."""
        tokens = self._units.tokens(self.cost.lengths[segment])
        if self.layout.recomputes:
            kept_attention = sum(count * self._kept_attention(kind, segment) for kind, count in kinds.items())
            return kinds.total() * self._units.layer_input(tokens) + kept_attention
        kept = sum(count * self._kept(kind, segment) for kind, count in kinds.items())
        if self.software.keeps_prefixes and segment:
            # Concatenated to a copy. The segment's own keys and values stay in the fused projection's result as well,
            # which queries, as a view, keep alive.
            prefix = self._units.tokens(sum(self.cost.lengths[: segment + 1]))
            kept += prefix * sum(count * self._key_value(self.model.kinds[kind]) for kind, count in kinds.items())
        for kind in kinds if self.count.layers else ():
            counted, sizes = self._layer_count(kind, segment)
            kept += counted.shared.of(*sizes)
        return kept

    def _waiting(self, kinds: Counter[int], segment: int) -> float:
        """Bytes that a unit keeps from I to W: inputs of linear layers, and gradients of their outputs."""
        if self.count.layers:
            waiting = 0.0
            for kind, number in kinds.items():
                counted, sizes = self._layer_count(kind, segment)
                waiting += number * counted.waiting.of(*sizes)
            return waiting
        tokens = self._units.tokens(self.cost.lengths[segment])
        return sum(number * tokens * self._waiting_by_formula(self.model.kinds[kind]) for kind, number in kinds.items())

    def _waiting_by_formula(self, layer: Layer) -> float:
        """Bytes that a layer keeps of one token from I to W."""
        products = [projection for projection in layer.projections if projection.kind != "router"]
        waiting = sum(product.inputs + product.outputs for product in products) * _ELEMENT
        # Every rank keeps whole latents, and the gradients of those of its own positions.
        latents = sum(product.inputs for product in layer.from_latents) * _ELEMENT
        gradients = sum(product.outputs for product in layer.latents) * _ELEMENT
        return (waiting - latents - gradients) / self._ranks + latents + gradients / self.layout.mesh.sequence

    @property
    def _shares_keys(self) -> bool:
        return self._is_cut and self.software.shares_keys

    def _activations(self) -> tuple[float, float, float]:
        """Bytes that units in flight save, bytes of KV caches, and bytes in host memory."""
        layout = self.layout
        ends = self._units.tokens(self.cost.length) * 8
        segments = range(len(self.cost.lengths))
        if layout.chunks > 1 and layout.schedule not in CHUNKED:
            units = (self._unit(kinds, segment) for kinds in self.parts.values() for segment in segments)
            chunk = sum(units) / layout.chunks
            in_flight = self._chunks_in_flight()
            resident = in_flight - layout.offload * max(0.0, in_flight - _NEVER_OFFLOADED)
            return chunk * resident + ends, 0, 0
        activations, stores, on_host = self._peak()
        return activations * (1 - layout.offload) + ends, stores, on_host

    def _chunks_in_flight(self) -> float:
        """Chunks in flight on stage p, if interleaved: 2(P−p−1) + (v−1)P + k units, k of which are a chunk."""
        layout, segments = self.layout, len(self.cost.lengths)
        units = 2 * (layout.stages - self.stage - 1) + (layout.chunks - 1) * layout.stages + segments
        return min(units / segments, layout.micro_batches * layout.chunks)

    def _store_bytes(self, kinds: Counter[int]) -> float:
        """Bytes of one micro-batch's KV cache in ``kinds`` layers of each kind; 0 if segments don't share one."""
        if not self._shares_keys:
            return 0.0
        caches = [layer.cache for layer in self.count.layers] or [*map(self._key_value, self.model.kinds)]
        return self._units.tokens(self.cost.length) * sum(count * caches[kind] for kind, count in kinds.items())

    def _peak(self) -> tuple[float, float, float]:
        """Bytes of units and of KV caches at the peak of their sum, going through the stage's actions in order.

        And at the peak of its own what waits in host memory.
        """
        last = len(self.cost.lengths) - 1
        kept = {part: [self._unit(kinds, segment) for segment in range(last + 1)] for part, kinds in self.parts.items()}
        waiting = {
            part: [self._waiting(kinds, segment) if self.cost.splits else 0.0 for segment in range(last + 1)]
            for part, kinds in self.parts.items()
        }
        stores = {part: self._store_bytes(kinds) for part, kinds in self.parts.items()}
        ends = {part: [0.0] * (last + 1) for part in kept}
        if self.is_last and self.software.loss == "chunked":
            ends[max(kept)] = [self._end(segment) for segment in range(last + 1)]
        actions = self.cost.order(self.cost.enough).schedule[self.stage]
        away = self._units_away(actions)
        gradients = self.layout.key_value_gradient_bytes / _ELEMENT
        now, most, on_host, most_on_host = 0.0, (0.0, 0.0), 0.0, 0.0
        opened: dict[tuple[int, int], float] = {}
        last_share = next((action for action in reversed(actions) if action.op is Op.HEAD_BACKWARD), None)
        # Layer by layer a backward frees what its forward saved, and allocates what W needs and the gradients of keys
        # and values. So its peak is at its beginning or at its end.
        for action in actions:
            part, segment, store = action.stage, action.segment, (action.stage, action.micro_batch)
            if action.op.is_head:
                share = self._share(segment)
                now += share if action.op is Op.HEAD_FORWARD else -share
                if self.is_last and action == last_share and self.model.trunk is None:
                    # The gradients of all rows arrive beside the backwards that follow.
                    now += self.model.outputs * self.model.hidden / self._ranks * _ELEMENT
                if now + sum(opened.values()) > sum(most):
                    most = now, sum(opened.values())
                continue
            moved = kept[part][segment] if unit_of(action) in away else 0.0
            saved = kept[part][segment] - moved + ends[part][segment]
            later = waiting[part][segment]
            match action.op:
                case Op.FORWARD:
                    now += saved
                    on_host += moved
                    most_on_host = max(most_on_host, on_host)
                    opened.setdefault(store, stores[part])
                case Op.WEIGHT_GRADIENT:
                    now -= later
                case _:
                    now -= saved - (later if action.op is Op.INPUT_GRADIENT else 0.0)
                    on_host -= moved
                    if segment == last:
                        opened[store] += stores[part] * gradients
            if now + sum(opened.values()) > sum(most):
                most = now, sum(opened.values())
            if segment == 0 and action.op in (Op.BACKWARD, Op.INPUT_GRADIENT):
                opened.pop(store)
        most_saved, most_stored = most
        return most_saved + (self._passing() if away else 0.0), most_stored, most_on_host

    def _units_away(self, actions: Sequence[Action]) -> frozenset[UnitOnRank]:
        """The units that wait in host memory."""
        if not self.layout.moves:
            return frozenset()
        return units_on_host(actions, lambda action: self.cost.lengths[action.segment])

    def _passing(self) -> float:
        """Bytes of layers on the device that are on their way to the host or back.

        One is computed, and one leaves or arrives; in a pipeline the last layer of the next unit arrives besides. The
        input of the one that is computed is among what its recomputation keeps.
        """
        layers = min(len(self.layers), 2 if self.layout.stages == 1 and not self._is_cut else 3)
        kinds = {kind for part in self.parts.values() for kind in part}
        segments = range(len(self.cost.lengths))
        largest = max(self._unit(Counter([kind]), segment) for kind in kinds for segment in segments)
        return layers * largest - self._units.layer_input(max(map(self._units.tokens, self.cost.lengths)))

    # --- while it runs ------------------------------------------------------------------------------------------

    def _logits(self) -> float:
        model, mesh = self.model, self.layout.mesh
        tokens = max(self._units.tokens(length) for length in self.cost.lengths)
        shares = self.layout.head_ranks or 1
        weight = model.outputs * model.hidden / self._ranks / shares * _ELEMENT
        numbers = tokens * model.outputs / self._ranks / shares
        is_trained = not model.is_frozen
        if shares > 1:
            # The rank's rows, unsharded, and the sum of their gradients in float32 are there for the whole step.
            weight *= (4 if is_trained else 1) * mesh.batch
        elif not is_trained:
            weight = 0.0
        if self.software.loss == "chunked":
            least = 0 if self.cost.cluster.gpu.name == CPU.name else CHUNK_TOKENS * numbers / tokens
            chunk = min(numbers, max(CHUNK_BYTES / 4, least))
            # A chunk's logits and their gradient, each in 32 and in 16 bits; and the gradient of the weight.
            return chunk * 12 + weight / mesh.batch
        return numbers * (4 if self.software.loss == "fused" else 14)

    def _share(self, segment: int) -> float:
        """Bytes of the logits of a unit's share of the head, and of the hidden states that they come from."""
        tokens = self._units.tokens(self.cost.lengths[segment])
        return tokens * (self.model.outputs / self.layout.stages + self.model.hidden) / self._ranks * _ELEMENT

    def _working(self) -> float:
        """Bytes of the layer in backward: gradients inside the MLP; with checkpointing also all that it recomputes."""
        tokens = max(self._units.tokens(length) for length in self.cost.lengths)
        working = max(tokens * self._features_at_work(layer) * _ELEMENT for layer in self.layers)
        if self.layout.mesh.batch > 1:
            # The gradient of a block before its reduce-scatter.
            working += max(self._units.trained_weights(layer) * _ELEMENT for layer in self.layers)
        if self.layout.recomputes:
            longest = max(range(len(self.cost.lengths)), key=self.cost.lengths.__getitem__)
            # Attention that is kept isn't computed a second time.
            working += max(
                self._kept(kind, longest) - self._kept_attention(kind, longest)
                for kinds in self.parts.values()
                for kind in kinds
            )
        return working

    # --- while it runs, counted -----------------------------------------------------------------------------------

    def counted_bytes(self) -> float:
        """All bytes, with those that are alive while a layer runs counted in its own code."""
        memory, segments = self.memory(), range(len(self.cost.lengths))
        kinds = {kind for kinds in self.parts.values() for kind in kinds}
        alive = max(self._peak_of(kind, segment) for kind in kinds for segment in segments)
        if self.is_last:
            alive = max(alive, *map(self._peak_of_end, segments))
        if self.layout.moves:
            # The input of the layer that runs, which the formula of `_working` has and these counts don't.
            alive += self._units.layer_input(max(map(self._units.tokens, self.cost.lengths)))
        return memory.total - memory.working + self._buffers() + max(0.0, alive - memory.logits)

    @property
    def peak(self) -> ModelPeak:
        """What is alive while a layer runs on a rank, by its own code; empty if that can't be run."""
        return self._peak_in(0)

    def _peak_in(self, segment: int) -> ModelPeak:
        rank, checkpointing = self._counted_as, self.layout.checkpointing
        if not self.count.layers or checkpointing not in ("none", "layers", "attention"):
            return ModelPeak()
        is_late = is_long(self.model.hidden, self.model.kinds, rank, self._units.tokens(self.cost.lengths[segment]))
        return count_peak(self.model, PeakOf(rank, checkpointing, is_late))

    def _peak_of(self, kind: int, segment: int) -> float:
        """Bytes at the fullest moment of a layer, beside what is kept and what :meth:`_gathered` has."""
        counted, (sizes, reached) = self._peak_in(segment), self._sizes(kind, segment)
        peak = (counted.windowed if reached else counted.layers)[kind]
        mesh, weights = self.layout.mesh, self._units.trained_weights(self.model.kinds[kind]) * _ELEMENT
        if mesh.batch == 1:
            return peak.of(*sizes, with_gathered=False)
        # Ranks of one node exchange slices of gradients and sum them, instead of a reduction by the backend.
        exchanged = weights if mesh.batch > 2 and mesh.size <= self.cost.cluster.gpus_per_node else 0.0
        # In the count, weights are gathered in 16 bits.
        if self.layout.weight_gather == "step" or self.model.four_bits:
            return peak.of(*sizes, with_gathered=False) + exchanged
        return max(0.0, peak.of(*sizes, with_gathered=True) + exchanged - self._gathered())

    def _peak_of_end(self, segment: int) -> float:
        """The same of what runs after the last layer."""
        rows, length = self._units.tokens(1), self.cost.lengths[segment]
        return self._peak_in(segment).end.of(rows, length, length, with_gathered=False)

    def _features_at_work(self, layer: Layer) -> float:
        """Features of a token: inside the MLP; for experts on a mesh also gradients of their input and output rows."""
        features = 3 * layer.intermediate / self._ranks
        if layer.experts is not None and self.layout.splits_experts:
            features += 3 * layer.experts.per_token * layer.experts.width / self._ranks
            features += 2 * layer.experts.per_token * self.model.hidden / self.layout.mesh.hidden
        return features

    def _buffers(self) -> float:
        """Bytes of a 16-bit gradient of each shape of weight, if the software keeps these allocated."""
        if not self.software.buffers_weight_gradients:
            return 0.0
        shapes = {
            (projection.inputs, projection.outputs, projection.kind)
            for layer in self.layers
            for projection in layer.projections
        }
        if self.is_last:
            shapes.add((self.model.hidden, self.model.outputs, "up"))
        return _ELEMENT * sum(i * o / (1 if kind in ("whole", "latent") else self._ranks) for i, o, kind in shapes)

    def _messages(self) -> float:
        if self.layout.stages == 1:
            return 0
        tokens = max(self._units.tokens(length) for length in self.cost.lengths)
        # One received and one sent, of hidden states and of their gradients.
        return 4 * tokens * self.model.hidden / self._ranks * _ELEMENT


def _whole_latents(layer: Layer) -> int:
    """Bytes that every rank saves of one token's latents: as they are computed, and as they are normalized."""
    latents = sum(projection.outputs for projection in layer.latents) * _ELEMENT
    return latents + sum(projection.inputs * _ELEMENT + _STATISTIC for projection in layer.from_latents)


#: Number of chunks that are about to run or have just run, and so stay on the device.
_NEVER_OFFLOADED = 3
