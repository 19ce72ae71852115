"""Makes the schedule of a step from the costs of its units."""

from __future__ import annotations

import functools

from cuboid.models.stages.stage_model import StagePlan
from cuboid.seq1f1b.schedule.actions import Program, Schedule
from cuboid.seq1f1b.schedule.choice import ModelPipeline, fixed_schedule, is_generated
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import PipelineShape

#: Schedules to keep for steps that differ in the number or lengths of their micro-batches.
_REMEMBERED = 64


class StepSchedules:
    """Makes schedules, the same on every rank of a replica, and caches them.

    Args:
        stages: of this rank, with the config and the whole model's sizes.
    """

    def __init__(self, stages: StagePlan) -> None:
        assert stages.config.pipeline is not None
        self._config, self._stages = stages.config.pipeline, stages
        self.of = functools.lru_cache(_REMEMBERED)(self._make)

    def _make(
        self, shape: PipelineShape, lengths: tuple[int, ...], *, recomputes: bool
    ) -> tuple[Schedule, tuple[Program, ...]]:
        """The schedule of a step, and the programs of all ranks."""
        config, sizes = self._config, self._stages.sizes
        if not is_generated(config.schedule):
            schedule = fixed_schedule(config.schedule, shape, config.stages)
            return schedule, lower(schedule, shape)
        assert sizes is not None, "a generated schedule without the model's sizes"
        counts = self._stages.layout.counts
        chunks = len(counts) // config.stages
        pipeline = ModelPipeline(
            *(config.schedule, config.stages, chunks, counts, lengths, config.memory_limit, recomputes),
            spreads_head=config.spreads_head,
        )
        schedule = pipeline.order(sizes, shape.micro_batches)
        return schedule, lower(schedule, shape, pipeline.durations(sizes) if config.spreads_head else None)
