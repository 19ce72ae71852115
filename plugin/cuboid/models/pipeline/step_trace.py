"""The measured timeline of a step: gathered from all stages, and written together with the simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.models.stages.stage_model import StagePlan
from cuboid.seq1f1b.runtime.profiler import GatheredTimes, UnitProfiler, gather_times
from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.lowering import to_simulate
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import Span, Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import unit_flops


@dataclass(frozen=True)
class StepTrace:
    """When each action of one step ran on all stages, by one clock; measured on the first rank of each mesh.

    Attributes:
        clock_error_s: times of different stages are compared to this precision at worst, on the rank that writes.
    """

    shape: PipelineShape
    schedule: Schedule
    timeline: Timeline
    writes: bool
    clock_error_s: float = 0.0

    @classmethod
    def gather(
        cls, profiler: UnitProfiler, shape: PipelineShape, order: Schedule, mesh: Mesh, device: torch.device
    ) -> StepTrace:
        """Gather the times of all stages; every rank of a replica gets the same. Collective over the replica."""
        actions, own_s = profiler.times_s()
        assert tuple(actions) == order[mesh.coordinate.pipe], "a step did something else than its schedule"
        alone = len(order) == 1
        measured = GatheredTimes([own_s], 0.0) if alone else gather_times(own_s, mesh.pipe_group, device)
        times_s = measured.ranks
        if mesh.shape.size > 1:
            # The other ranks of each mesh measured their own times. Use those of the first ones' pipeline in the whole
            # replica, whose ranks must derive the same cut from them. Other replicas may have run other actions.
            shared = torch.tensor(times_s, dtype=torch.float64, device=device)
            dist.broadcast(shared, mesh.copy_ranks[0], group=mesh.model_parallel_group)
            times_s = shared.tolist()
        begin_s = min(start_s for rank in times_s for start_s, _ in rank)
        spans = tuple(
            tuple(
                Span(action, start_s - begin_s, end_s - begin_s) for action, (start_s, end_s) in zip(*rank, strict=True)
            )
            for rank in zip(order, times_s, strict=True)
        )
        return cls(shape, order, Timeline(spans, (0,) * len(order)), mesh.rank == 0, measured.clock_error_s)

    def segment_times_s(self, micro_batch: int, lengths: tuple[int, ...]) -> tuple[float, ...]:
        """For each segment of a micro-batch, the seconds of its forward and backward, summed over all stages.

        Weight gradients of several segments may be computed as one product. Their time is divided among the segments in
        proportion to length.
        """
        seconds, weights_s = [0.0] * self.shape.segments, 0.0
        for rank in self.timeline.spans:
            for span in rank:
                if span.action.micro_batch != micro_batch:
                    continue
                if span.action.op is Op.WEIGHT_GRADIENT:
                    weights_s += span.end_s - span.start_s
                else:
                    seconds[span.action.segment] += span.end_s - span.start_s
        return tuple(
            time_s + weights_s * length / sum(lengths) for time_s, length in zip(seconds, lengths, strict=True)
        )

    def simulated(self, lengths: list[tuple[int, ...]], stages: StagePlan) -> Timeline:
        """Simulate the same step by FLOPs, at the speed (seconds per FLOP) measured on the busiest rank."""
        assert stages.sizes is not None
        counts, head_ranks = stages.layout.counts, self.shape.head_ranks
        costs = [
            unit_flops(stages.sizes, counts, segment_lengths, head_ranks=head_ranks) for segment_lengths in lengths
        ]
        flops = [sum(costs[action.micro_batch](action) for action in rank) for rank in self.schedule]
        busiest = max(range(len(flops)), key=flops.__getitem__)
        s_per_flop = self.timeline.busy_s[busiest] / flops[busiest]

        def duration_s(action: Action) -> float:
            return costs[action.micro_batch](action) * s_per_flop

        return simulate(to_simulate(self.schedule, self.shape, duration_s), self.shape, duration_s)

    def write(self, folder: Path, step: int, lengths: list[tuple[int, ...]], stages: StagePlan) -> None:
        """Write ``step_N.json`` for Perfetto and ``step_N.png``, on the first rank of the world."""
        if not self.writes:
            return
        # Importing matplotlib takes a second; only the rank that draws pays for it.
        from cuboid.seq1f1b.schedule.timeline_picture import draw_timelines
        from cuboid.seq1f1b.schedule.timeline_trace import write_chrome_trace

        folder.mkdir(parents=True, exist_ok=True)
        simulated = self.simulated(lengths, stages)
        details = {
            "step": step,
            "simulated_bubble": simulated.bubble,
            "clock_error_us": self.clock_error_s * 1e6,
            "layers": list(stages.layout.counts),
            "segment_lengths": [list(segment_lengths) for segment_lengths in lengths],
        }
        write_chrome_trace(self.timeline, folder / f"step_{step}.json", details=details)
        draw_timelines(
            [
                (f"simulated, by operations: bubble {simulated.bubble:.1%}", simulated),
                (f"measured, step {step}: bubble {self.timeline.bubble:.1%}", self.timeline),
            ],
            folder / f"step_{step}.png",
        )
