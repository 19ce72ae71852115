"""Settles ``"schedule": "auto"`` with chunks, and ``"stage_balance": "schedule"``, before weights are read: they decide
which rank has which layers."""

from __future__ import annotations

from collections.abc import Callable

from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError
from cuboid.models.pipeline.stage_search import StageLayers, StageRanks, StageSearch
from cuboid.models.stages.stage_cut import ASSUMED_LENGTH, LayerHalves, plan_stages
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
from cuboid.seq1f1b.schedule.list_scheduling import TRIED_ACTIONS
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes


def settle_schedule(
    pipeline: PipelineConfig,
    sizes: ModelSizes,
    lengths: tuple[int, ...],
    micro_batches: int,
    *,
    recomputes: bool = False,
    halves: Callable[[], LayerHalves] = tuple,
    assumed_length: int = ASSUMED_LENGTH,
    actions: int = TRIED_ACTIONS,
) -> tuple[PipelineConfig, Comparison]:
    """Choose the schedule and the stages with the shortest simulated step among those within the memory limit.

    The simulation is without activation checkpointing that a script enables, after the model is loaded. The choice
    fixes only the placement of the stages: each step takes the faster schedule with that placement for its own batch.

    Args:
        pipeline: a config with ``"auto"`` and chunks, or the stage balance ``"schedule"``, or both.
        sizes: the model's sizes; with those of halves, if stages may begin inside a layer.
        lengths: tokens of each segment.
        micro_batches: M, number of micro-batches of a step.
        recomputes: whether the config checkpoints activations.
        halves, assumed_length: of :func:`plan_stages`.
        actions: total number of actions to schedule before no more rules are tried for a step, and twice as many before
            no more stages are.

    Returns:
        The config with a schedule and chunks that determine the placement, and the number of layers of each stage if
        they were chosen too; and the comparison.

    Raises:
        ConfigError: no schedule is within the limit, or the layers can't be divided among so many stages.
    """
    searched, pipeline = pipeline.stage_balance == "schedule", pipeline.with_balanced_stages
    counts, balance = pipeline.compared_chunks, pipeline.stage_balance
    if isinstance(balance, tuple):
        counts = len(balance) // pipeline.stages
    elif isinstance(counts, tuple):
        counts = tuple(count for count in counts if count * pipeline.stages <= len(sizes.layers))
    else:
        # An explicit number of chunks that the layers don't allow is an error, rather than a dropped candidate.
        plan_stages(len(sizes.layers), lambda: sizes, pipeline, halves, range(pipeline.parts))

    def costs_of(rank_of: StageRanks, layers: StageLayers) -> PlacedCosts:
        placed = ModelPipeline(
            *(AUTO, pipeline.stages, 1, layers, lengths), recomputes=recomputes, spreads_head=pipeline.spreads_head
        )
        return placed.costs(sizes, rank_of)

    def costs(rank_of: StageRanks) -> PlacedCosts:
        if isinstance(balance, tuple) and len(balance) != len(rank_of):
            raise ConfigError(f"stage_balance has {len(balance)} numbers, and it has {len(rank_of)} parts")
        cut = pipeline.on_ranks(AUTO, len(rank_of) // pipeline.stages)
        return costs_of(rank_of, plan_stages(len(sizes.layers), lambda: sizes, cut, halves, rank_of, assumed_length))

    name = AUTO if not pipeline.is_placed else pipeline.schedule
    limit = None if pipeline.memory_limit is None else MemoryLimit(sequences=pipeline.memory_limit)
    ends = pipeline.stages, micro_batches, len(lengths)
    request = Request(*ends, costs, limit, counts, actions, pipeline.spreads_head)
    if searched:
        search = StageSearch(name, request, sizes, sum(lengths), costs_of, 2 * actions)
        compared, stage_layers = search.compare()
        pipeline = pipeline.model_copy(update={"stage_balance": stage_layers[compared.best.rank_of]})
    else:
        compared = compare_schedules(name, request)
    if not pipeline.is_placed:
        best = compared.best
        pipeline = pipeline.on_ranks(name_of_placement(best.name), best.chunks)
    return pipeline, compared
