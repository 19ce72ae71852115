"""Makes the schedule of a step from the costs of its units."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

from cuboid.distributed.mesh import current_rank
from cuboid.models.stages.stage_model import StagePlan
from cuboid.seq1f1b.schedule.actions import Program, Schedule
from cuboid.seq1f1b.schedule.choice import ChosenSchedule, ModelPipeline, fixed_schedule, is_generated
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.partition import balance_by_flops
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes

_logger = logging.getLogger(__name__)

#: Schedules to keep for steps that differ in the number or lengths of their micro-batches.
_REMEMBERED = 64
#: Fraction by which a spread head must make the simulated step longer for a warning.
_LONGER_BY = 0.02


class StepSchedules:
    """Makes schedules, the same on every rank of a replica, and caches them.

    Args:
        stages: of this rank, with the config and the whole model's sizes.
    """

    def __init__(self, stages: StagePlan) -> None:
        assert stages.config.pipeline is not None
        self._config, self._stages = stages.config.pipeline, stages
        self._has_compared_heads = False
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
        chosen = pipeline.chosen(sizes, shape.micro_batches)
        if config.spreads_head and not self._has_compared_heads and current_rank() == 0:
            self._has_compared_heads = True
            _warn_if_spread_is_slower(pipeline, sizes, chosen)
        durations = pipeline.durations(sizes) if config.spreads_head else None
        return chosen.schedule, lower(chosen.schedule, shape, durations)


def _warn_if_spread_is_slower(pipeline: ModelPipeline, sizes: ModelSizes, spread: ChosenSchedule) -> None:
    """Warn if a step would be shorter with the head on the last stage.

    The shares of a head wait for all ranks. What a rank may do meanwhile is little, if a micro-batch has few segments
    and the memory limit is low.
    """
    counts = balance_by_flops(sizes, len(pipeline.counts), sum(pipeline.lengths))
    last = replace(pipeline, counts=counts, spreads_head=False).chosen(sizes, spread.shape.micro_batches)
    longer = spread.timeline.makespan_s / last.timeline.makespan_s - 1
    if longer > _LONGER_BY:
        limit = "the default memory_limit" if pipeline.limit is None else f"memory_limit {pipeline.limit:g}"
        _logger.warning(
            'pipeline: "head": "spread" makes the simulated step %.0f %% longer than "last", because of few '
            'segments (%d) and %s. Give more of either, or write "head": "last"; cuboid timeline simulates both',
            *(100 * longer, len(pipeline.lengths), limit),
        )
