"""Time of an optimizer step: units, put together by the pipeline's simulator, and what comes once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from cuboid.planner.cost.layout import CUBOID, Layout, Software
from cuboid.planner.cost.units import Seconds, UnitTimes
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.model import ModelDescription
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.partition import balance_by_flops, cut_sequence
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import segment_flops

#: Bytes that Adam reads and writes for each parameter: gradient, master copy and both moments, and the new weight.
_OPTIMIZER_BYTES = 34


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind; they add up to :attr:`total_s`.

    Args:
        compute_s: of the busiest stage.
        exposed_s: of its communication inside of layers that nothing hides.
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
    """Forward and backward of each segment on each stage, ``[stage][segment]``, and what each waits once a step."""

    forward: tuple[tuple[Seconds, ...], ...]
    backward: tuple[tuple[Seconds, ...], ...]
    once_s: tuple[float, ...]

    def busy(self, stage: int) -> Seconds:
        """Of one micro-batch on one stage."""
        return sum((*self.forward[stage], *self.backward[stage]), Seconds())

    @property
    def busiest(self) -> int:
        """The stage that takes longest."""
        return max(range(len(self.forward)), key=lambda stage: self.busy(stage).total)


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
        known: dict[Any, tuple[Seconds, Seconds, float]] | None = None,
    ) -> None:
        self.model, self.layout, self.cluster, self.length = model, layout, cluster, length
        self.software = software
        self._known = {} if known is None else known
        self.units = UnitTimes(model, layout, cluster, length, software)

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, as ``"stage_balance": "flops"`` cuts them unless the layout has them."""
        return self.layout.stage_layers or _balance(self.model, self.layout.stages)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the segments, as ``"partition": "flops"`` cuts them."""
        mesh, segments = self.layout.mesh, self.layout.segments
        if self.layout.lengths:
            return self.layout.lengths
        if segments == 1:
            return (self.length,)
        return _cut(self.model, self.length, segments, math.lcm(mesh.sequence, mesh.hidden))

    def _layer(self, kind: int, start: int, stop: int) -> tuple[Seconds, Seconds, float]:
        """Forward and backward of a layer of one of the model's kinds, and seconds that it waits once a step.

        They are the same wherever stages and replicas are.
        """
        layout = self.layout
        adds = layout.micro_batches * layout.segments > 1
        rest = layout.micro_batch, layout.checkpointing, layout.context, layout.expert_ranks
        weights = layout.weight_gather, layout.gathers_once, layout.gradient_sync
        key = kind, start, stop, layout.mesh, rest, weights, adds, self.software.gradient_bytes
        if key not in self._known:
            layer = self.model.kinds[kind]
            self._known[key] = (
                self.units.layer_forward(layer, start, stop),
                self.units.layer_backward(layer, start, stop),
                self.units.once_s(layer, stop) if start == 0 else 0.0,
            )
        return self._known[key]

    def stage_times(self) -> StageTimes:
        """Of each stage and segment."""
        forwards: list[tuple[Seconds, ...]] = []
        backwards: list[tuple[Seconds, ...]] = []
        waits_s: list[float] = []
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        for first, stop in pairwise(accumulate(self.stage_layers, initial=0)):
            kinds = Counter(self.model.kind_of_layers[first:stop])
            forward, backward = [], []
            once_s = ((first == 0) + (stop == len(self.model.layers))) * self.units.once_of_ends_s()
            for begin, end in ends:
                own_forward = own_backward = Seconds()
                for kind, count in kinds.items():
                    one = self._layer(kind, begin, end)
                    own_forward, own_backward = own_forward + one[0] * count, own_backward + one[1] * count
                    once_s += one[2] * count
                if first == 0:
                    own_backward += self.units.embedding(begin, end)
                if stop == len(self.model.layers):
                    own_forward += self.units.head_forward(begin, end)
                forward.append(own_forward)
                backward.append(own_backward)
            forwards.append(tuple(forward))
            backwards.append(tuple(backward))
            waits_s.append(once_s)
        return StageTimes(tuple(forwards), tuple(backwards), tuple(waits_s))

    def simulated(self) -> Timeline:
        """The pipeline's step, with no more micro-batches than a picture can show."""
        return self.timeline(self.stage_times(), min(self.layout.micro_batches, 2 * self.layout.stages))

    def timeline(self, times: StageTimes, micro_batches: int) -> Timeline:
        """The pipeline's step with so many micro-batches, simulated."""
        layout = self.layout
        shape = PipelineShape(layout.stages, micro_batches, len(self.lengths))
        duration, transfer = self._durations(times)
        schedule = SCHEDULES[layout.schedule](shape)
        return simulate(schedule, shape, duration, transfer_s=transfer)

    def _durations(self, times: StageTimes) -> tuple[Callable[[Action], float], Callable[[Action], float]]:
        ends = list(pairwise(accumulate(self.lengths, initial=0)))
        messages = [self.units.message_s(*each) for each in ends]
        blocking = not self.software.overlaps_messages

        def duration(action: Action) -> float:
            table = times.forward if action.op is Op.FORWARD else times.backward
            # Where messages block, each unit waits for its own to be taken.
            return table[action.stage][action.segment].total + (messages[action.segment] if blocking else 0.0)

        return duration, lambda action: 0.0 if blocking else messages[action.segment]

    def pipeline_s(self, times: StageTimes) -> float:
        """From the first forward to the last backward."""
        layout = self.layout
        if layout.stages == 1:
            return times.busy(0).total * layout.micro_batches
        if layout.chunks > 1 or not self.software.overlaps_messages:
            return self._whole_sequences_s(times)
        # Once every stage has a micro-batch, each further one takes as long as the one before.
        exact = min(layout.micro_batches, layout.stages + 1)
        step = self.timeline(times, exact).makespan_s
        if exact == layout.micro_batches:
            return step
        return step + (layout.micro_batches - exact) * (step - self.timeline(times, exact - 1).makespan_s)

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
        """A bound of the step's time that takes microseconds: stages of equal work, equal segments, nothing else."""
        layout, count = self.layout, self.layout.segments
        ends = list(pairwise(self.length * index // count for index in range(count + 1)))
        layers = Counter(self.model.kind_of_layers)
        work = sum(
            number * sum(each.total for each in self._layer(kind, *span)[:2])
            for kind, number in layers.items()
            for span in ends
        )
        work += self.units.head_forward(0, self.length).total
        return work / layout.stages * (layout.micro_batches + (layout.stages - 1) / count)

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
        """For each stage the elements that a rank of the mesh owns: all but whole experts, and experts."""
        return own_parameters(self.model, self.layout, self.stage_layers)

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


def own_parameters(
    model: ModelDescription, layout: Layout, stage_layers: Sequence[int]
) -> list[tuple[float, float]]:  # fmt: skip
    """For each stage the elements that a rank of the mesh owns: all but experts, and experts.

    Args:
        model, layout: what runs where.
        stage_layers: layers of each stage.
    """
    found = []
    for first, stop in pairwise(accumulate(stage_layers, initial=0)):
        own = model.layers[first:stop]
        dense = float(sum(layer.dense_parameters for layer in own))
        if first == 0:
            dense += model.embedding_parameters
        if stop == len(model.layers):
            dense += model.extra_parameters
            # The last of several stages has a copy of tied embeddings.
            dense += model.vocabulary * model.hidden if layout.stages > 1 else model.head_parameters
        experts = sum(layer.experts.padded(layout.mesh.batch) for layer in own if layer.experts is not None)
        found.append((dense / layout.mesh.size, experts / (layout.mesh.size * layout.expert_ranks)))
    return found
