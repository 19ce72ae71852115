"""Time of an optimizer step: units, put together by the pipeline's simulator, and what comes once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from cuboid.planner.cost.layout import CUBOID, Layout, Software
from cuboid.planner.cost.units import Seconds, UnitTimes
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.model import ModelDescription
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import CHUNKED, ModelPipeline, fixed_schedule
from cuboid.seq1f1b.schedule.list_scheduling import TRIED_ACTIONS
from cuboid.seq1f1b.schedule.partition import balance_by_flops, cut_sequence
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import ActionGraph, Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import segment_flops

#: Bytes that Adam reads and writes for each parameter: gradient, master copy and both moments, and the new weight.
_OPTIMIZER_BYTES = 34


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind; they add up to :attr:`total_s`.

    Args:
        compute_s: of the busiest stage.
        exposed_s: of its communication inside layers that nothing hides.
        bubble_s: in which it waits for other stages.
        reduce_s: of the gradients of replicas and the gather of new weights, as far as nothing hides them.
        optimizer_s: of the update.
        constant_s: of whatever a step has besides.
    """

    compute_s: float
    exposed_s: float
    bubble_s: float
    reduce_s: float
    optimizer_s: float
    constant_s: float

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return self.pipeline_s + self.reduce_s + self.optimizer_s + self.constant_s

    @property
    def pipeline_s(self) -> float:
        """From the first forward to the last backward."""
        return self.compute_s + self.exposed_s + self.bubble_s

    @property
    def bubble(self) -> float:
        """Part of the time from first forward to last backward in which the busiest stage waits."""
        return self.bubble_s / self.pipeline_s if self.pipeline_s else 0.0


@dataclass(frozen=True)
class StageTimes:
    """What the parts of the layers take.

    Args:
        units: by operation, each segment on each part, ``[part][segment]``.
        once_s: what each rank waits once a step.
        rank_of: of each part.
        splits: whether backwards are in two actions.
    """

    units: Mapping[Op, tuple[tuple[Seconds, ...], ...]]
    once_s: tuple[float, ...]
    rank_of: tuple[int, ...]
    splits: bool = False

    def busy(self, rank: int) -> Seconds:
        """Of one micro-batch on one rank."""
        backward = (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT) if self.splits else (Op.BACKWARD,)
        parts = [part for part, owner in enumerate(self.rank_of) if owner == rank]
        units = [each for op in (Op.FORWARD, *backward) for part in parts for each in self.units[op][part]]
        return sum(units, Seconds())

    @property
    def busiest(self) -> int:
        """The rank that takes longest."""
        return max(range(len(self.once_s)), key=lambda rank: self.busy(rank).total)


class StepCost:
    """The time of one step.

    Args:
        model: what is trained.
        layout: on what ranks.
        cluster: on what machines.
        length: S, tokens of a sequence.
        software: whose step it is.
        known: times of layers, shared by the costs of many layouts of one model, cluster, length and software.
    """

    def __init__(
        self,
        model: ModelDescription,
        layout: Layout,
        cluster: Cluster,
        length: int,
        software: Software = CUBOID,
        *,
        known: dict[Any, tuple[dict[Op, Seconds], float]] | None = None,
    ) -> None:
        self.model, self.layout, self.cluster, self.length = model, layout, cluster, length
        self.software = software
        self._known = {} if known is None else known
        self.units = UnitTimes(model, layout, cluster, length, software)

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each part, as ``"stage_balance": "flops"`` cuts them unless the layout has them."""
        return self.layout.stage_layers or _balance(self.model, self.layout.parts)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the segments, as ``"partition": "flops"`` cuts them."""
        mesh, segments = self.layout.mesh, self.layout.segments
        if self.layout.lengths:
            return self.layout.lengths
        if segments == 1:
            return (self.length,)
        return _cut(self.model, self.length, segments, math.lcm(mesh.sequence, mesh.hidden))

    def _layer(self, kind: int, start: int, stop: int) -> tuple[dict[Op, Seconds], float]:
        """Operations of a layer of one of the model's kinds, and seconds that it waits once a step.

        They are the same wherever stages and replicas are.
        """
        layout = self.layout
        adds = layout.micro_batches * layout.segments > 1
        rest = layout.micro_batch, layout.checkpointing, layout.context, layout.expert_ranks
        weights = layout.weight_gather, layout.gathers_once, layout.gradient_sync, layout.may_split
        key = kind, start, stop, layout.mesh, rest, weights, adds, self.software.gradient_bytes
        if key not in self._known:
            layer, units = self.model.kinds[kind], self.units
            found = {
                Op.FORWARD: units.layer_forward(layer, start, stop),
                Op.BACKWARD: units.layer_backward(layer, start, stop),
            }
            if layout.may_split:
                halves = units.layer_split_backward(layer, start, stop)
                found |= zip((Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT), halves, strict=True)
            self._known[key] = found, units.once_s(layer, stop) if start == 0 else 0.0
        return self._known[key]

    def stage_times(self) -> StageTimes:
        """Of each part and segment."""
        layout, rank_of = self.layout, self.layout.rank_of
        waits_s = [0.0] * layout.stages
        by_op: dict[Op, list[tuple[Seconds, ...]]] = {}
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        for rank, (first, stop) in zip(rank_of, pairwise(accumulate(self.stage_layers, initial=0)), strict=True):
            kinds = Counter(self.model.kind_of_layers[first:stop])
            segments = []
            waits_s[rank] += ((first == 0) + (stop == len(self.model.layers))) * self.units.once_of_ends_s()
            for begin, end in ends:
                own: dict[Op, Seconds] = {}
                for kind, count in kinds.items():
                    one, once_s = self._layer(kind, begin, end)
                    own = {op: own.get(op, Seconds()) + each * count for op, each in one.items()}
                    waits_s[rank] += once_s * count
                if first == 0:
                    embedding = self.units.embedding(begin, end)
                    own |= {op: own[op] + embedding for op in (Op.BACKWARD, Op.INPUT_GRADIENT) if op in own}
                if stop == len(self.model.layers):
                    own[Op.FORWARD] += self.units.head_forward(begin, end)
                segments.append(own)
            for op in segments[0]:
                by_op.setdefault(op, []).append(tuple(each[op] for each in segments))
        units = {op: tuple(table) for op, table in by_op.items()}
        return StageTimes(units, tuple(waits_s), rank_of, self.splits)

    def simulated(self) -> Timeline:
        """The pipeline's step, with no more micro-batches than a picture can show."""
        order = self.order(min(self.layout.micro_batches, 2 * self.layout.stages))
        duration, transfer = self._durations(self.stage_times())
        return simulate(order.schedule, order.shape, duration, transfer_s=transfer)

    def simulated_s(self, times: StageTimes, micro_batches: int) -> float:
        """The pipeline's step with so many micro-batches, from the first forward to the last backward."""
        return max(end_s for *_, end_s in self.order(micro_batches).times(*self._durations(times)))

    def order(self, micro_batches: int) -> ActionGraph:
        """Of a step of so many micro-batches, as training runs it."""
        layout = self.layout
        if not layout.may_split:
            return _fixed_order(layout.schedule, layout.stages, layout.parts, micro_batches, len(self.lengths))
        pipeline = ModelPipeline(
            layout.schedule, layout.stages, layout.chunks, self.stage_layers, self.lengths, layout.memory_limit,
            layout.checkpointing == "full",
        )  # fmt: skip
        # As many rules as training tries for all micro-batches, as far as there is time.
        tried = min(_TRIED_ACTIONS, TRIED_ACTIONS * micro_batches // layout.micro_batches)
        return _generated_order(self.model, pipeline, micro_batches, tried)

    @cached_property
    def splits(self) -> bool:
        """Whether the schedule that is generated has backwards in two actions."""
        if not self.layout.may_split:
            return False
        return any(action.op is Op.WEIGHT_GRADIENT for action in self.order(self.enough).schedule[0])

    @property
    def _group(self) -> int:
        """Micro-batches whose units keep all ranks busy."""
        return -(-self.layout.stages // len(self.lengths))

    @property
    def enough(self) -> int:
        """Micro-batches of a step in which every unit that is ever in flight is."""
        layout = self.layout
        if layout.schedule == "gpipe":
            return layout.micro_batches
        if layout.may_split:
            # What is generated isn't regular, so that as much of it as there is time for is.
            most = _TRIED_ACTIONS // (3 * layout.parts * len(self.lengths))
            return min(layout.micro_batches, max(most, 3 * self._group + 4))
        if layout.schedule in CHUNKED:
            return min(layout.micro_batches, 2 * self._group + 2)
        return min(layout.micro_batches, (layout.stages - 1 + len(self.lengths)) // len(self.lengths) + 2)

    def _durations(self, times: StageTimes) -> tuple[Callable[[Action], float], Callable[[Action], float]]:
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        messages = [self.units.message_s(*each) for each in ends]
        blocking = not self.software.overlaps_messages

        def duration(action: Action) -> float:
            own_s = times.units[action.op][action.stage][action.segment].total
            # Where messages block, each unit waits for its own to be taken.
            return own_s + (messages[action.segment] if blocking else 0.0)

        return duration, lambda action: 0.0 if blocking else messages[action.segment]

    def pipeline_s(self, times: StageTimes) -> float:
        """From the first forward to the last backward."""
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
        each = (step - self.simulated_s(times, exact - fewer)) / fewer
        return step + (layout.micro_batches - exact) * max(each, times.busy(times.busiest).total)

    def _whole_sequences_s(self, times: StageTimes) -> float:
        """A closed form for 1F1B, interleaved or not: all micro-batches on the busiest stage, and one on the others.

        With v chunks or k segments the other stages' time is divided by them (Narayanan et al. 2021). It stands in
        where there is no schedule to simulate, and a test compares it where there is.
        """
        layout = self.layout
        busy = [times.busy(stage).total for stage in range(layout.stages)]
        longest = times.busiest
        messages = sum(self.units.message_s(*each) for each in pairwise(accumulate(self.lengths, initial=0)))
        if not self.software.overlaps_messages:
            busy = [each + 2 * layout.chunks * messages for each in busy]
            messages = 0.0
        others = sum(busy) - busy[longest]
        parts = layout.chunks * layout.segments
        return (
            layout.micro_batches * busy[longest] + others / parts + 2 * (layout.stages - 1) * messages / layout.segments
        )

    def least_s(self) -> float:
        """A bound of the step's time that takes microseconds: stages of equal work, equal segments, nothing else.

        Of a schedule that is generated none of the bubble is part of it.
        """
        return self._whole_stage_s * self.layout.micro_batches + (0.0 if self.layout.may_split else self.least_bubble_s)

    @property
    def least_bubble_s(self) -> float:
        """That of a schedule that isn't generated, in the same way."""
        layout = self.layout
        return self._whole_stage_s * (layout.stages - 1) / (layout.segments * layout.chunks)

    @cached_property
    def _whole_stage_s(self) -> float:
        """Of one micro-batch on one stage, as if all had equal parts."""
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
        """Of the whole step."""
        times = self.stage_times()
        busy = times.busy(times.busiest) * self.layout.micro_batches
        pipeline_s = self.pipeline_s(times)
        return StepTime(
            compute_s=busy.compute,
            exposed_s=busy.exposed + times.once_s[times.busiest],
            bubble_s=pipeline_s - busy.total,
            reduce_s=self._reduce_s(times),
            optimizer_s=self._optimizer_s(),
            constant_s=self.cluster.gpu.step_s,
        )

    def own_parameters(self) -> list[tuple[float, float]]:
        """For each stage the elements that a rank of the mesh owns: all but experts, and experts."""
        model, layout = self.model, self.layout
        found = [(0.0, 0.0)] * layout.stages
        for rank, (first, stop) in zip(layout.rank_of, pairwise(accumulate(self.stage_layers, initial=0)), strict=True):
            own = model.layers[first:stop]
            dense = float(sum(layer.dense_parameters for layer in own))
            if first == 0:
                dense += model.embedding_parameters
            if stop == len(model.layers):
                dense += model.extra_parameters
                # If another rank has the embeddings, the head has a copy of tied ones.
                dense += model.vocabulary * model.hidden if layout.rank_of[0] != rank else model.head_parameters
            experts = sum(layer.experts.padded(layout.mesh.batch) for layer in own if layer.experts is not None)
            before = found[rank]
            dense, whole = dense / layout.mesh.size, experts / (layout.mesh.size * layout.expert_ranks)
            found[rank] = before[0] + dense, before[1] + whole
        return found

    def _reduce_s(self, times: StageTimes) -> float:
        """Gradients between replicas, and with ZeRO the gather of new weights."""
        layout, links, software = self.layout, self.units.links, self.software
        dense = max(self.own_parameters(), key=sum)[0]
        if links.replicas.size == 1:
            return 0.0
        reduced = links.replicas.gather_s(dense * software.reduce_bytes)
        gathered = links.replicas.gather_s(dense * (_GATHERED if layout.zero_stage else software.reduce_bytes))
        if software.overlaps_reduction:
            hidden = 0.5 * times.busy(0).total
            return max(reduced * 0.1, reduced - hidden) + max(gathered * 0.1, gathered - hidden)
        return reduced + gathered

    def _optimizer_s(self) -> float:
        dense, experts = max(self.own_parameters(), key=sum)
        ranks = self.units.links.replicas.size if self.layout.zero_stage else 1
        expert_ranks = max(1, ranks // self.layout.expert_ranks)
        owned = dense / ranks + experts / expert_ranks
        # Zeroing and the norm read what every rank has.
        moved = owned * _OPTIMIZER_BYTES + (dense + experts) * 2 * self.software.gradient_bytes
        return self.units.kernels.elementwise_s(moved, 20)


#: Bytes of a weight as replicas gather it.
_GATHERED = 2
#: Actions that are scheduled for trying rules, a part of what training takes the time for.
_TRIED_ACTIONS = 100_000
#: As cuboid.models.stages.stages, which doesn't know the sequences' length when it cuts.
_ASSUMED_LENGTH = 4096


@lru_cache(maxsize=1024)
def _balance(model: ModelDescription, stages: int) -> tuple[int, ...]:
    return balance_by_flops(model.sizes, stages, _ASSUMED_LENGTH)


@lru_cache(maxsize=1024)
def _cut(model: ModelDescription, length: int, segments: int, multiple: int) -> tuple[int, ...]:
    # Finer than a thousandth of the sequence it isn't worth the search.
    grain = multiple * max(1, length // multiple // 1024)
    if length % grain:
        grain = multiple
    return cut_sequence(length, segments, multiple=grain, cost=segment_flops(model.sizes))


@lru_cache(maxsize=256)
def _fixed_order(name: str, ranks: int, parts: int, micro_batches: int, segments: int) -> ActionGraph:
    shape = PipelineShape(parts, micro_batches, segments)
    return ActionGraph(fixed_schedule(name, shape, ranks), shape)


@lru_cache(maxsize=256)
def _generated_order(model: ModelDescription, pipeline: ModelPipeline, micro_batches: int, tried: int) -> ActionGraph:
    schedule = pipeline.order(model.sizes, micro_batches, tried_actions=tried)
    return ActionGraph(schedule, PipelineShape(len(pipeline.counts), micro_batches, len(pipeline.lengths)))
