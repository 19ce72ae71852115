"""Time of an optimizer step: units, combined by the pipeline's simulator, and what occurs once a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from cuboid.planner.cost.layout import CUBOID, Layout, Software
from cuboid.planner.cost.units import Seconds, UnitTimes
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.halves import sizes_with_halves
from cuboid.planner.description.model import ModelDescription
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import CHUNKED, ModelPipeline, fixed_schedule
from cuboid.seq1f1b.schedule.list_scheduling import TRIED_ACTIONS
from cuboid.seq1f1b.schedule.lowering import to_simulate
from cuboid.seq1f1b.schedule.partition import balance_by_flops, cut_sequence
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import ActionGraph, Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, ends_of, segment_flops, unit_flops

#: Bytes that Adam reads and writes for each parameter: gradient, master copy and both moments, and the new weight.
_OPTIMIZER_BYTES = 34
#: Bytes of a parameter.
_ELEMENT = 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind; they add up to :attr:`total_s`.

    Args:
        compute_s: computing of the busiest stage.
        exposed_s: its communication inside layers that nothing hides.
        bubble_s: its waiting for other stages.
        reduce_s: reduction of gradients between replicas and gather of new weights, as far as nothing hides them.
        optimizer_s: the update.
        constant_s: fixed overhead of a step.
    """

    compute_s: float
    exposed_s: float
    bubble_s: float
    reduce_s: float
    optimizer_s: float
    constant_s: float

    @property
    def total_s(self) -> float:
        """Time of the whole step."""
        return self.pipeline_s + self.reduce_s + self.optimizer_s + self.constant_s

    @property
    def pipeline_s(self) -> float:
        """Time from the first forward to the last backward."""
        return self.compute_s + self.exposed_s + self.bubble_s

    @property
    def bubble(self) -> float:
        """Fraction of the time from first forward to last backward in which the busiest stage waits."""
        return self.bubble_s / self.pipeline_s if self.pipeline_s else 0.0


@dataclass(frozen=True)
class StageTimes:
    """Times of units on the parts that the layers are cut into.

    Args:
        units: by operation, time of each unit as ``[part][segment]``.
        once_s: what each rank waits once a step.
        rank_of: pipeline rank of each part.
        splits: whether backwards are split into two actions.
    """

    units: Mapping[Op, tuple[tuple[Seconds, ...], ...]]
    once_s: tuple[float, ...]
    rank_of: tuple[int, ...]
    splits: bool = False

    def busy(self, rank: int) -> Seconds:
        """Time of one micro-batch on one rank."""
        backward = (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT) if self.splits else (Op.BACKWARD,)
        parts = [part for part, owner in enumerate(self.rank_of) if owner == rank]
        units = [seconds for op in (Op.FORWARD, *backward) for part in parts for seconds in self.units[op][part]]
        # Every part has the times of a rank's share of the head, of which a rank has one.
        shares = (op for op in (Op.HEAD_FORWARD, Op.HEAD_BACKWARD) if op in self.units)
        return sum((seconds for op in shares for seconds in self.units[op][0]), sum(units, Seconds()))

    @property
    def busiest(self) -> int:
        """The rank whose units take longest."""
        return max(range(len(self.once_s)), key=lambda rank: self.busy(rank).total)


@dataclass(frozen=True)
class LayerPart:
    """A layer of a stage, by its index in the model, or one of its halves, 0 or 1."""

    index: int
    half: int | None = None


def _parts_between(start: float, stop: float) -> Iterator[LayerPart]:
    """The layers from ``start`` to ``stop``, which may be inside one."""
    for index in range(math.floor(start), math.ceil(stop)):
        if index < start:
            yield LayerPart(index, 1)
        elif index + 1 > stop:
            yield LayerPart(index, 0)
        else:
            yield LayerPart(index)


#: Times of a layer by operation, and seconds that it waits once a step.
LayerTimes = tuple[dict[Op, Seconds], float]


class StepCost:
    """The time of one step.

    Args:
        model: what is trained.
        layout: how ranks share the work.
        cluster: the machines.
        length: S, tokens of a sequence.
        software: the framework that runs it.
        known: cache of layer times, shared by the costs of many layouts of one model, cluster, length and software.
    """

    def __init__(
        self,
        model: ModelDescription,
        layout: Layout,
        cluster: Cluster,
        length: int,
        software: Software = CUBOID,
        *,
        known: dict[Any, dict[tuple[int, int, int], LayerTimes]] | None = None,
    ) -> None:
        self.model, self.layout, self.cluster, self.length = model, layout, cluster, length
        self.software = software
        self._known = {} if known is None else known

    @cached_property
    def units(self) -> UnitTimes:
        """Times of units."""
        return UnitTimes(self.model, self.layout, self.cluster, self.length, self.software)

    @cached_property
    def stage_layers(self) -> tuple[float, ...]:
        """Number of layers of each part: the layout's, or else as ``"stage_balance": "flops"`` cuts them."""
        return self.layout.stage_layers or _balance(self.model, self.layout.parts, has_head=not self.layout.head_ranks)

    @cached_property
    def _sizes(self) -> ModelSizes:
        """The model's sizes, with those of halves if there are any."""
        cuts = any(count != math.floor(count) for count in self.stage_layers)
        return sizes_with_halves(self.model) if cuts else self.model.sizes

    @cached_property
    def _stages(self) -> list[list[LayerPart]]:
        """The layers of each part, and the parts of them."""
        return [list(_parts_between(start, stop)) for start, stop in ends_of(self.stage_layers)]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the segments: the layout's, or else as ``"partition": "flops"`` cuts them."""
        mesh, segments = self.layout.mesh, self.layout.segments
        if self.layout.lengths:
            return self.layout.lengths
        if segments == 1:
            return (self.length,)
        return _cut(self.model, self.length, segments, math.lcm(mesh.sequence, mesh.hidden))

    @cached_property
    def _known_layers(self) -> dict[tuple[int, int, int], LayerTimes]:
        """Times of layers by kind, start and stop. They don't depend on where stages and replicas are.

        So layouts that agree in all else share them in ``known``.
        """
        layout = self.layout
        adds = layout.micro_batches * layout.segments > 1
        rest = layout.micro_batch, layout.checkpointing, layout.moves, layout.context, layout.expert_ranks
        weights = layout.weight_gather, layout.gathers_once, layout.gradient_sync, layout.may_split
        rates = layout.fp8_min_dimension, self.software.is_eager, self.software.gradient_bytes
        return self._known.setdefault((layout.mesh, rest, weights, adds, rates), {})

    def _layer(self, kind: int, start: int, stop: int) -> LayerTimes:
        """Times of a layer of one of the model's kinds, by operation, and seconds that it waits once a step."""
        known = self._known_layers.get((kind, start, stop))
        if known is None:
            layer, units = self.model.kinds[kind], self.units
            by_op = {
                Op.FORWARD: units.layer_forward(layer, start, stop),
                Op.BACKWARD: units.layer_backward(layer, start, stop),
            }
            if self.layout.may_split:
                halves = units.layer_split_backward(layer, start, stop)
                by_op |= zip((Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT), halves, strict=True)
            # What occurs once a step is counted with the first segment.
            once_s = units.once_s(layer, by_op[Op.FORWARD], by_op[Op.BACKWARD]) if start == 0 else 0.0
            known = by_op, once_s
            self._known_layers[kind, start, stop] = known
        return known

    def stage_times(self) -> StageTimes:
        """Times of each part and segment."""
        layout, rank_of = self.layout, self.layout.rank_of
        waits_s = [0.0] * layout.stages
        by_op: dict[Op, list[tuple[Seconds, ...]]] = {}
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        for rank, (first, stop), layers in zip(rank_of, ends_of(self.stage_layers), self._stages, strict=True):
            kinds = Counter(self.model.kind_of_layers[layer.index] for layer in layers if layer.half is None)
            halves = [layer for layer in layers if layer.half is not None]
            segments = []
            waits_s[rank] += self.units.once_of_ends_s() if first == 0 else 0.0
            if stop == len(self.model.layers):
                waits_s[rank] += self.units.once_of_ends_s(is_spread=bool(layout.head_ranks))
            for begin, end in ends:
                times: dict[Op, Seconds] = {}
                for kind, count in kinds.items():
                    one, once_s = self._layer(kind, begin, end)
                    times = {op: times.get(op, Seconds()) + seconds * count for op, seconds in one.items()}
                    waits_s[rank] += once_s * count
                for half in halves:
                    one, once_s = self._layer(self.model.kind_of_layers[half.index], begin, end)
                    shares = {op: self._share(half, op, begin, end) for op in one}
                    times = {op: times.get(op, Seconds()) + seconds * shares[op] for op, seconds in one.items()}
                    waits_s[rank] += once_s * shares[Op.FORWARD]
                if first == 0:
                    # This is forward and backward together; all of it is counted in backward.
                    embedding = self.units.embedding(begin, end)
                    times |= {op: times[op] + embedding for op in (Op.BACKWARD, Op.INPUT_GRADIENT) if op in times}
                if layout.head_ranks:
                    head = self.units.head_forward(begin, end, layout.head_ranks)
                    times |= {Op.HEAD_FORWARD: head * (1 / 3), Op.HEAD_BACKWARD: head * (2 / 3)}
                elif stop == len(self.model.layers):
                    times[Op.FORWARD] += self.units.head_forward(begin, end)
                segments.append(times)
            for op in segments[0]:
                by_op.setdefault(op, []).append(tuple(segment[op] for segment in segments))
        units = {op: tuple(table) for op, table in by_op.items()}
        return StageTimes(units, tuple(waits_s), rank_of, self.splits)

    def _share(self, part: LayerPart, op: Op, start: int, stop: int) -> float:
        """A half's fraction of its layer's time, by operations."""
        layer = self._sizes.layers[part.index]
        assert part.half is not None
        lengths = start, stop - start
        half, whole_layer = (
            unit_flops(ModelSizes((sizes,), 0), (1,), lengths)(Action(op, 0, 0, 1))
            for sizes in (layer.halves[part.half], layer)
        )
        return half / whole_layer

    def simulated(self) -> Timeline:
        """Simulate the pipeline's step, with no more micro-batches than a picture can show."""
        order = self.order(min(self.layout.micro_batches, 2 * self.layout.stages))
        duration, transfer = self._durations(self.stage_times())
        return simulate(order.sequences, order.shape, duration, transfer_s=transfer)

    def simulated_s(self, times: StageTimes, micro_batches: int) -> float:
        """Time from first forward to last backward of a step of ``micro_batches`` micro-batches, by simulation."""
        return max(end_s for *_, end_s in self.order(micro_batches).times(*self._durations(times)))

    def order(self, micro_batches: int) -> ActionGraph:
        """Order of actions in a step of ``micro_batches`` micro-batches, as training runs it."""
        layout = self.layout
        if not layout.may_split:
            return _fixed_order(layout.schedule, layout.stages, layout.parts, micro_batches, len(self.lengths))
        pipeline = ModelPipeline(
            layout.schedule, layout.stages, layout.chunks, self.stage_layers, self.lengths, layout.memory_limit,
            layout.recomputes, layout.spreads_head,
        )  # fmt: skip
        # Training's budget, scaled down so that as many rules are tried for fewer micro-batches, and limited.
        tried = min(_TRIED_ACTIONS, TRIED_ACTIONS * micro_batches // layout.micro_batches)
        return _generated_order(self._sizes, pipeline, micro_batches, tried)

    @cached_property
    def splits(self) -> bool:
        """Whether the generated schedule splits backwards into two actions."""
        if not self.layout.may_split:
            return False
        return any(action.op is Op.WEIGHT_GRADIENT for action in self.order(self.enough).schedule[0])

    @property
    def _group(self) -> int:
        """Micro-batches whose units keep all ranks busy."""
        return -(-self.layout.stages // len(self.lengths))

    @property
    def enough(self) -> int:
        """Micro-batches after which a longer step has no more units in flight and repeats itself."""
        layout = self.layout
        if layout.may_split:
            # Generated schedules aren't periodic, so they are simulated as far as time allows.
            most = _TRIED_ACTIONS // (3 * layout.parts * len(self.lengths))
            return min(layout.micro_batches, max(most, 3 * self._group + 4))
        if layout.schedule in CHUNKED:
            return min(layout.micro_batches, 2 * self._group + 2)
        if layout.schedule in ("seq1f1b", "1f1b"):
            return min(layout.micro_batches, (layout.stages - 1 + len(self.lengths)) // len(self.lengths) + 2)
        # Of other rules, such as GPipe's, nothing is known.
        return layout.micro_batches

    def _durations(self, times: StageTimes) -> tuple[Callable[[Action], float], Callable[[Action], float]]:
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        messages = [self.units.message_s(begin, end) for begin, end in ends]
        blocking = not self.software.overlaps_messages
        # A blocking send keeps the stage busy until it is received.
        busy = messages if blocking else [0.0] * len(ends)
        seconds = {
            op: [[unit.total + busy_s for unit, busy_s in zip(part, busy, strict=True)] for part in parts]
            for op, parts in times.units.items()
        }
        return (
            lambda action: seconds[action.op][action.stage][action.segment],
            lambda action: 0.0 if blocking else messages[action.segment],
        )

    def pipeline_s(self, times: StageTimes) -> float:
        """Time from the first forward to the last backward."""
        layout = self.layout
        if layout.stages == 1:
            return times.busy(0).total * layout.micro_batches
        is_placed = layout.schedule in CHUNKED
        if (layout.chunks > 1 and not is_placed) or not self.software.overlaps_messages:
            return self._whole_sequences_s(times)
        # Once every stage has a micro-batch, each further one, or group of them, takes as long as the one before.
        if layout.may_split:
            exact, fewer = self.enough, self.enough // 2
        elif is_placed:
            exact, fewer = self.enough, self._group
        else:
            exact, fewer = min(layout.micro_batches, layout.stages + 1), 1
        step = self.simulated_s(times, exact)
        if exact == layout.micro_batches:
            return step
        further_s = (step - self.simulated_s(times, exact - fewer)) / fewer
        return step + (layout.micro_batches - exact) * max(further_s, times.busy(times.busiest).total)

    def _whole_sequences_s(self, times: StageTimes) -> float:
        """A closed form for 1F1B, interleaved or not: all micro-batches on the busiest stage, and one on the others.

        With v chunks or k segments the other stages' time is divided by them (Narayanan et al. 2021). It is used where
        there is no schedule to simulate; a test compares the two where there is one.
        """
        layout = self.layout
        busy = [times.busy(stage).total for stage in range(layout.stages)]
        longest = times.busiest
        messages = sum(self.units.message_s(begin, end) for begin, end in pairwise(accumulate(self.lengths, initial=0)))
        if not self.software.overlaps_messages:
            busy = [busy_s + 2 * layout.chunks * messages for busy_s in busy]
            messages = 0.0
        others = sum(busy) - busy[longest]
        parts = layout.chunks * layout.segments
        return (
            layout.micro_batches * busy[longest] + others / parts + 2 * (layout.stages - 1) * messages / layout.segments
        )

    def least_s(self) -> float:
        """A bound of the step's time, cheap to compute: layers and head in equal stages and equal segments only.

        For a generated schedule it leaves out the bubble.
        """
        return self._whole_stage_s * self.layout.micro_batches + (0.0 if self.layout.may_split else self.least_bubble_s)

    @property
    def least_bubble_s(self) -> float:
        """The bubble of a schedule that isn't generated, with equal stages and segments."""
        layout = self.layout
        return self._whole_stage_s * (layout.stages - 1) / (layout.segments * layout.chunks)

    @cached_property
    def _whole_stage_s(self) -> float:
        """Time of one micro-batch on one stage, with equal stages and segments."""
        count = self.layout.segments
        ends = list(pairwise(self.length * index // count for index in range(count + 1)))
        layers = Counter(self.model.kind_of_layers)
        work = sum(
            number * sum(self._layer(kind, *span)[0][op].total for op in (Op.FORWARD, Op.BACKWARD))
            for kind, number in layers.items()
            for span in ends
        )
        work += self.units.head_forward(0, self.length).total
        return work / self.layout.stages

    def step_time(self) -> StepTime:
        """Time of the whole step, by kind."""
        times = self.stage_times()
        busy = times.busy(times.busiest) * self.layout.micro_batches
        pipeline_s = self.pipeline_s(times)
        return StepTime(
            compute_s=busy.compute,
            exposed_s=busy.exposed + times.once_s[times.busiest],
            bubble_s=pipeline_s - busy.total,
            reduce_s=self._reduce_s(times),
            optimizer_s=self._optimizer_s(),
            constant_s=self.cluster.gpu.step_s + self._head_rows_s(times),
        )

    def _head_rows_s(self, times: StageTimes) -> float:
        """What rows of a spread head and their gradients take on their way, as far as units don't hide it.

        The rows travel beside the first unit's forward on all stages, the gradients beside the last one's backward.
        """
        if not self.layout.head_ranks:
            return 0.0
        backward = Op.INPUT_GRADIENT if times.splits else Op.BACKWARD
        first_s, last_s = (
            sum(part[segment].total for part in times.units[op]) for op, segment in ((Op.FORWARD, 0), (backward, -1))
        )
        sent_s, returned_s = self.units.head_rows_s()
        return max(0.0, sent_s - first_s) + max(0.0, returned_s - last_s)

    @cached_property
    def own_parameters(self) -> list[tuple[float, float]]:
        """Elements that a rank of each stage owns: those of everything but experts, and those of experts."""
        model, layout = self.model, self.layout
        elements = [(0.0, 0.0)] * layout.stages
        for rank, (first, stop), parts in zip(layout.rank_of, ends_of(self.stage_layers), self._stages, strict=True):
            dense = float(sum(map(self._dense_parameters, parts)))
            # Experts are an MLP, in the second half.
            layers = [model.layers[part.index] for part in parts if part.half != 0]
            if first == 0:
                dense += model.embedding_parameters
            if stop == len(model.layers):
                dense += model.extra_parameters
                # A tied head that isn't on the embedding's rank has a copy of it.
                dense += model.head_weights if layout.rank_of[0] != rank else model.head_parameters
            experts = sum(layer.experts.padded(layout.mesh.batch) for layer in layers if layer.experts is not None)
            before = elements[rank]
            dense, expert_elements = dense / layout.mesh.size, experts / (layout.mesh.size * layout.expert_ranks)
            elements[rank] = before[0] + dense, before[1] + expert_elements
        return elements

    @cached_property
    def own_trained(self) -> list[tuple[float, float]]:
        """Those of :attr:`own_parameters` that are trained."""
        model, layout = self.model, self.layout
        if not model.is_frozen:
            return self.own_parameters
        elements = [0.0] * layout.stages
        for rank, (_, stop), parts in zip(layout.rank_of, ends_of(self.stage_layers), self._stages, strict=True):
            for part in parts:
                elements[rank] += model.layers[part.index].factor_parameters * self._fraction(part)
            if stop == len(model.layers):
                elements[rank] += model.extra_factors
        return [(count / layout.mesh.size, 0.0) for count in elements]

    @cached_property
    def own_bytes(self) -> list[float]:
        """Bytes of all parameters that a rank of each stage owns."""
        layout, sizes = self.layout, [_ELEMENT * sum(elements) for elements in self.own_parameters]
        if not self.model.is_frozen:
            return sizes
        for rank, parts in zip(layout.rank_of, self._stages, strict=True):
            quantized = sum(self.model.layers[part.index].quantized * self._fraction(part) for part in parts)
            sizes[rank] -= self.model.spared_bytes(quantized) / layout.mesh.size
        return [size + _ELEMENT * sum(trained) for size, trained in zip(sizes, self.own_trained, strict=True)]

    def _fraction(self, part: LayerPart) -> float:
        """A part's fraction of its layer's parameters without experts."""
        return self._dense_parameters(part) / self.model.layers[part.index].dense_parameters

    def _dense_parameters(self, part: LayerPart) -> int:
        parameters = self.model.layers[part.index].dense_parameters
        if part.half is None:
            return parameters
        first = self._sizes.layers[part.index].halves[0].weights
        return first if part.half == 0 else parameters - first

    def _reduce_s(self, times: StageTimes) -> float:
        """Reduction of gradients between replicas, and with ZeRO the gather of new weights."""
        links, software = self.units.links, self.software
        dense, experts = max(self.own_trained, key=sum)
        # In Cuboid every replica has all experts: then both groups are one, whose collectives are shared.
        elements = {links.replicas: dense}
        elements[links.expert_replicas] = elements.get(links.expert_replicas, 0.0) + experts
        gathered_bytes = _GATHERED if self.layout.zero_stage else software.reduce_bytes
        reduced = sum(group.gather_s(count * software.reduce_bytes) for group, count in elements.items())
        gathered = sum(group.gather_s(count * gathered_bytes) for group, count in elements.items())
        if software.overlaps_reduction:
            hidden = 0.5 * times.busy(0).total
            return max(reduced * 0.1, reduced - hidden) + max(gathered * 0.1, gathered - hidden)
        return reduced + gathered

    def _optimizer_s(self) -> float:
        dense, experts = max(self.own_trained, key=sum)
        ranks = self.units.links.replicas.size if self.layout.zero_stage else 1
        expert_ranks = max(1, ranks // self.layout.expert_ranks)
        owned = dense / ranks + experts / expert_ranks
        # Zeroing and the norm touch all gradients of a rank, not only those that it updates.
        gradients = (dense + experts) * 2 * self.software.gradient_bytes
        if self.layout.optimizer_on_host:
            # A gradient goes there in 16 bits and a weight comes back; the CPU reads 16 bytes and writes 12.
            gpu = self.cluster.gpu
            return (
                self.units.kernels.elementwise_s(gradients, 20)
                + owned * 4 / gpu.host_rate
                + owned * _HOST_UPDATE_BYTES / gpu.host_memory_bytes_per_s
            )
        return self.units.kernels.elementwise_s(owned * _OPTIMIZER_BYTES + gradients, 20)


#: Bytes of a parameter that an update in host memory reads and writes.
_HOST_UPDATE_BYTES = 28
#: Bytes of a weight as replicas gather it.
_GATHERED = 2
#: Limit on actions that are scheduled to try rules, and simulated; training takes the time for more.
_TRIED_ACTIONS = 100_000
#: As in cuboid.models.stages.stage_cut, which cuts the layers before the length of sequences is known.
_ASSUMED_LENGTH = 4096


@lru_cache(maxsize=1024)
def _balance(model: ModelDescription, stages: int, *, has_head: bool) -> tuple[int, ...]:
    return balance_by_flops(model.sizes, stages, _ASSUMED_LENGTH, has_head=has_head)


@lru_cache(maxsize=1024)
def _cut(model: ModelDescription, length: int, segments: int, multiple: int) -> tuple[int, ...]:
    # A grain below a thousandth of the sequence isn't worth the longer search.
    grain = multiple * max(1, length // multiple // 1024)
    if length % grain:
        grain = multiple
    return cut_sequence(length, segments, multiple=grain, cost=segment_flops(model.sizes))


@lru_cache(maxsize=256)
def _fixed_order(name: str, ranks: int, parts: int, micro_batches: int, segments: int) -> ActionGraph:
    shape = PipelineShape(parts, micro_batches, segments)
    return ActionGraph(fixed_schedule(name, shape, ranks), shape)


@lru_cache(maxsize=256)
def _generated_order(sizes: ModelSizes, pipeline: ModelPipeline, micro_batches: int, tried: int) -> ActionGraph:
    schedule = pipeline.order(sizes, micro_batches, tried_actions=tried)
    head_ranks = pipeline.ranks if pipeline.spreads_head else 0
    shape = PipelineShape(len(pipeline.counts), micro_batches, len(pipeline.lengths), head_ranks)
    return ActionGraph(to_simulate(schedule, shape, pipeline.durations(sizes)), shape)
