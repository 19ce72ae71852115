"""Plans the pipeline stages of a model before its weights are read."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig, PipelineConfig
from cuboid.distributed.mesh import Mesh
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.attention.interface import check_model_options
from cuboid.models.attention.segments import check_segments
from cuboid.models.batch.local_batch import granule
from cuboid.models.certification.certificates import Question, certificate_of, naming_changes
from cuboid.models.certification.layer_halves import layer_halves
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.pipeline.head_share import check_spread_head
from cuboid.models.stages.model_costs import decoder_layers, sizes_of
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import (
    ASSUMED_LENGTH,
    LayerHalves,
    StageLayout,
    draw_outline,
    halves_inside,
    plan_stages,
)
from cuboid.models.stages.stage_model import SegmentChooser, StagePlan
from cuboid.seq1f1b.schedule.choice import is_generated
from cuboid.seq1f1b.schedule.partition import HeadShare

_logger = logging.getLogger(__name__)
#: A warning is logged if the costliest stage exceeds the average by more than this fraction.
_WORTH_A_WARNING = 0.25
#: Fields of a config that an outline doesn't depend on. It is drawn in a dtype of its own.
_NOT_DRAWN = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})


def plan_staging(
    model: PreTrainedModel,
    config: CuboidConfig,
    mesh: Mesh,
    cls: type[PreTrainedModel] | None = None,
    segment_choice: SegmentChooser | None = None,
    *,
    is_frozen: bool = False,
) -> StagePlan:
    """Decide which stages this rank has.

    Args:
        model: the whole model, on any device, meta included.
        config, mesh: this rank's.
        cls: the architecture's class, if the model's own class is derived from it.
        segment_choice: chooses the number of segments; needed to run a pipeline with ``"segments": "auto"``.
        is_frozen: whether only adapters will be trained.

    Raises:
        UnsupportedModelError: the model can't be cut, or its results in a pipeline are known to be wrong.
        ConfigError: the layers can't be divided among so many stages.
    """
    assert config.pipeline is not None
    cls, hf_config = cls or type(model), model.config
    check_model_options(hf_config)
    _check_positions(hf_config, config.pipeline.segments)
    check_segments(hf_config, config.pipeline.segments)
    with naming_changes(cls, hf_config):
        outline = outline_of(cls, hf_config)
    certificate = certificate_of(cls, hf_config)
    # Padding of non-causal models on a mesh is covered by the mesh's own certificate.
    is_filled = granule(mesh) > 1 and outline.is_causal
    modes = certificate.modes(is_cut=config.pipeline.segments != 1, is_filled=is_filled)
    certificate.check_model(cls.__name__, modes, verified=config.pipeline.certification == "verified")
    if config.pipeline.spreads_head:
        check_spread_head(model, outline, mesh.topology.pipe, mesh.size("sequence"))
    pipeline = config.pipeline
    halves_of = functools.cache(lambda: halves_for(pipeline, model, cls))
    # Not every architecture has sizes that are known, nor every config a use for them.
    find_sizes = functools.cache(lambda: dataclasses.replace(sizes_of(model, halves_of()), is_frozen=is_frozen))
    counts = plan_stages(outline.count, find_sizes, pipeline, halves_of, length=assumed_length_of(config))
    mesh.stage_layers = counts
    layout = StageLayout(counts, config.placement)
    outline = dataclasses.replace(outline, halves=halves_inside(counts, halves_of))
    sizes = find_sizes() if _asks_for_costs(config.pipeline) else None
    if config.pipeline.stage_balance in ("flops", "halves") and mesh.rank == 0 and not config.pipeline.spreads_head:
        _warn_of_head(HeadShare.of(find_sizes(), layout.counts, ASSUMED_LENGTH))
    cuts = layout.cuts(mesh.coordinate.pipe)
    return StagePlan(outline, layout, cuts, config, certificate, sizes, segment_choice)


def outline_of(cls: type[PreTrainedModel], config: PretrainedConfig) -> Outline:
    """The parts of a model, drawn once in a process for the same libraries' code and config.

    Raises:
        UnsupportedModelError: a pipeline can't cut it; the message names the reason.
    """
    try:
        is_stock = Question.of(cls, config).code.is_current_stock
    except CannotProbe:
        is_stock = False
    if not is_stock:
        return draw_outline(cls, config)
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_DRAWN}
    said = config._attn_implementation, json.dumps(fields, sort_keys=True, default=str)
    drawn = _drawn((cls, type(config), said))
    drawn.outline = drawn.outline or draw_outline(cls, config)
    return drawn.outline


@dataclass
class _Drawn:
    """The outline that was drawn for a class and a config as text."""

    key: tuple[Any, ...]
    outline: Outline | None = None


_drawn = functools.lru_cache(maxsize=32)(_Drawn)


def assumed_length_of(config: CuboidConfig) -> int:
    """Tokens of a sequence for which halves of layers are weighed: as many as the config says, if it does."""
    assert config.pipeline is not None
    partition = config.pipeline.partition
    stated = sum(partition) if isinstance(partition, tuple) else config.sequence_length
    return stated or ASSUMED_LENGTH


def halves_for(
    pipeline: PipelineConfig, model: PreTrainedModel, cls: type[PreTrainedModel] | None = None
) -> LayerHalves:
    """The halves of a model's layers; () if a config has no use for them. Raises as :func:`known_halves`."""
    if not pipeline.may_cut_layers:
        return ()
    return known_halves(model, cls, needs_one=pipeline.stage_balance == "halves")


def known_halves(
    model: PreTrainedModel, cls: type[PreTrainedModel] | None = None, *, needs_one: bool = True
) -> LayerHalves:
    """The halves of a whole model's layers.

    Args:
        model: on any device, meta included.
        cls: the architecture's class, if the model's own class is derived from it.
        needs_one: whether a model without halves is an error.

    Raises:
        UnsupportedModelError: no layer has any.
    """
    halves = layer_halves(cls or type(model), model.config, len(decoder_layers(model)))
    reasons = [half for half in halves if isinstance(half, str)]
    if needs_one and len(reasons) == len(halves):
        raise UnsupportedModelError(
            f'pipeline.stage_balance is "halves", and no layer of {(cls or type(model)).__name__} can be cut: '
            f'{reasons[0]}; write "flops"'
        )
    return halves


def _warn_of_head(share: HeadShare) -> None:
    """Warn if all stages wait for the one with the head, whatever the balance of layers."""
    if share.layers > 1 and share.excess > _WORTH_A_WARNING:
        _logger.warning(
            "pipeline: the head is worth %.1f layers, %.0f %% of its stage; the costliest stage takes %.0f %% longer "
            'than the average, and the others wait for it. "head": "spread" divides it among the stages; '
            "cuboid timeline shows it",
            share.layers,
            100 * share.of_stage,
            100 * share.excess,
        )


def _check_positions(hf_config: Any, segments: int | str) -> None:
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    # XLNet's config says -1, for as many as there are.
    if isinstance(positions, int) and isinstance(segments, int) and segments > positions > 0:
        raise ConfigError(
            f"pipeline.segments is {segments}, but the model has {positions} positions (max_position_embeddings), so "
            "that some segments would always be empty; give fewer"
        )


def _asks_for_costs(pipeline: PipelineConfig) -> bool:
    counted = pipeline.partition in ("flops", "measured") and pipeline.segments != 1
    return counted or is_generated(pipeline.schedule) or pipeline.trace is not False
