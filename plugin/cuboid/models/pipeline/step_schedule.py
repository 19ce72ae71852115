"""The schedule of a step, made for what its units cost."""

from __future__ import annotations

import functools

from cuboid.models.stages.stage_model import Staging
from cuboid.seq1f1b.schedule.actions import Program, Schedule
from cuboid.seq1f1b.schedule.choice import (
    MemoryLimit,
    PlacedCosts,
    Request,
    choose_schedule,
    fixed_schedule,
    is_generated,
    placed_costs,
)
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.unit_costs import BACKWARD_RATIO, kept_bytes, unit_flops

#: Kept for steps with other numbers or lengths of micro-batches.
_REMEMBERED = 64


class StepSchedules:
    """Makes schedules, the same on every rank of a replica, and remembers them.

    Args:
        staging: of this rank, with the config and the sizes of the whole model.
    """

    def __init__(self, staging: Staging) -> None:
        assert staging.config.pipeline is not None
        self._config, self._staging = staging.config.pipeline, staging
        self.of = functools.lru_cache(_REMEMBERED)(self._make)

    def _make(
        self, shape: PipelineShape, lengths: tuple[int, ...], *, recomputes: bool
    ) -> tuple[Schedule, tuple[Program, ...]]:
        """The schedule of a step, and the programs of all ranks.

        Args:
            shape: of the pipeline, with the stages of all ranks.
            lengths: of the segments of the step's longest micro-batch.
            recomputes: whether activation checkpointing is on.
        """
        schedule = self._schedule(shape, lengths, recomputes=recomputes)
        return schedule, lower(schedule, shape)

    def _schedule(self, shape: PipelineShape, lengths: tuple[int, ...], *, recomputes: bool) -> Schedule:
        name, ranks = self._config.schedule, self._config.stages
        if not is_generated(name):
            return fixed_schedule(name, shape, ranks)
        limit = None if self._config.memory_limit is None else MemoryLimit(sequences=self._config.memory_limit)
        costs = functools.partial(self._costs, lengths=lengths, recomputes=recomputes)
        request = Request(ranks, shape.micro_batches, shape.segments, costs, limit, self._config.chunks)
        return choose_schedule(name, request).schedule

    def _costs(self, rank_of: tuple[int, ...], *, lengths: tuple[int, ...], recomputes: bool) -> PlacedCosts:
        """By the count of operations; in units of their own, as only their ratios matter."""
        sizes, counts = self._staging.sizes, self._staging.layout.counts
        assert sizes is not None, "a generated schedule without the model's sizes"
        flops = unit_flops(sizes, counts, lengths, backward_ratio=BACKWARD_RATIO + recomputes)
        return placed_costs(flops, kept_bytes(sizes, counts, lengths), rank_of, len(lengths), recomputes=recomputes)
