"""``"schedule": "auto"`` with chunks: it decides where the stages are, and so is decided before weights are read."""

from __future__ import annotations

from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError
from cuboid.models.stages.stages import plan_stages
from cuboid.seq1f1b.schedule.choice import (
    AUTO,
    Comparison,
    MemoryLimit,
    ModelPipeline,
    PlacedCosts,
    Request,
    compare_schedules,
    name_of_placement,
)
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes


def settle_schedule(
    pipeline: PipelineConfig, sizes: ModelSizes, lengths: tuple[int, ...], micro_batches: int
) -> tuple[PipelineConfig, Comparison]:
    """Take the schedule with the shortest simulated step of those that keep to the memory limit.

    It is found as without activation checkpointing, which scripts switch on when the model is there. What stays open is
    which of the schedules with the same places a step has: each step takes the shorter one for its own batch.

    Args:
        pipeline: with ``"auto"`` and chunks.
        sizes: of the model.
        lengths: tokens of each segment.
        micro_batches: M of a step.

    Returns:
        The same with a schedule and chunks that say where the stages are; and what was compared.

    Raises:
        ConfigError: none keeps to the limit, or the layers can't be given to so many stages as asked.
    """
    counts, balance = pipeline.compared_chunks, pipeline.stage_balance
    if isinstance(balance, tuple):
        counts = len(balance) // pipeline.stages
    elif isinstance(counts, tuple):
        counts = tuple(count for count in counts if count * pipeline.stages <= len(sizes.layers))
    else:
        # A number that the model's layers don't allow is an error, not a candidate less.
        plan_stages(len(sizes.layers), lambda: sizes, pipeline)

    def costs(rank_of: tuple[int, ...]) -> PlacedCosts:
        if isinstance(balance, tuple) and len(balance) != len(rank_of):
            raise ConfigError(f"stage_balance has {len(balance)} numbers, and it has {len(rank_of)} parts")
        cut = pipeline.on_ranks(AUTO, len(rank_of) // pipeline.stages)
        layers = plan_stages(len(sizes.layers), lambda: sizes, cut)
        return ModelPipeline(AUTO, pipeline.stages, 1, layers, lengths).costs(sizes, rank_of)

    limit = None if pipeline.memory_limit is None else MemoryLimit(sequences=pipeline.memory_limit)
    request = Request(pipeline.stages, micro_batches, len(lengths), costs, limit, counts)
    compared = compare_schedules(AUTO, request)
    best = compared.best
    return pipeline.on_ranks(name_of_placement(best.name), best.chunks), compared
