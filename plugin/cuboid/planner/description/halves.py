"""Halves of a described model's layers. They take a probe, so only layouts with stages that begin inside one ask."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cuboid.errors import ConfigError
from cuboid.models.pipeline.staging_plan import known_halves
from cuboid.models.stages.model_costs import sizes_of
from cuboid.models.stages.stage_cut import LayerHalves
from cuboid.planner.description.meta_model import meta_model
from cuboid.planner.description.model import ModelDescription
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes


@lru_cache(maxsize=16)
def halves_of(model: ModelDescription) -> LayerHalves:
    """For each layer its halves, or why no stage can begin inside it.

    Raises:
        ConfigError: the description isn't of a model whose code is known.
    """
    if model.config is None:
        raise ConfigError(
            f"{model.name} is described by its sizes alone, and halves of layers need its code; give whole layers"
        )
    return known_halves(meta_model(model.config), needs_one=False)


@lru_cache(maxsize=16)
def sizes_with_halves(model: ModelDescription) -> ModelSizes:
    """The model's sizes, with those of its layers' halves; raises as :func:`halves_of`."""
    halves = halves_of(model)
    assert model.config is not None
    return replace(sizes_of(meta_model(model.config), halves), is_frozen=model.is_frozen)
