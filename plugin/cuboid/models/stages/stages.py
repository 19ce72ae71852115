"""One stage of a pipeline out of a Hugging Face model: its layers stay, those of other stages give way to placeholders.

The model keeps its class and all of its code. So the base model's own forward runs on every stage and makes masks,
rotary tables and whatever else its layers are given; only the hidden state comes from the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.stages.module_flow import Flow
from cuboid.models.stages.outline import Outline, outline_on_meta
from cuboid.models.stages.placeholders import PlaceholderLayer, PlaceholderModule, StageInput, StageOutput
from cuboid.seq1f1b.schedule.partition import balance_by_flops
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes

#: For the weight of attention and of the head; nobody knows the sequences' length when weights are loaded.
_ASSUMED_LENGTH = 4096


@dataclass(frozen=True)
class StageCut:
    """Which layers one stage of a pipeline has: [first, stop) of the model's.

    The first stage embeds as well, and the last one has the head.
    """

    stage: int
    stages: int
    first: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether this stage takes token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage ends in the head."""
        return self.stage == self.stages - 1


def cut_at(counts: Sequence[int], stage: int) -> StageCut:
    """The cut of one stage, by the numbers of layers of all."""
    first = sum(counts[:stage])
    return StageCut(stage, len(counts), first, first + counts[stage])


def plan_stages(outline: Outline, sizes: Callable[[], ModelSizes], pipeline: PipelineConfig) -> tuple[int, ...]:
    """Numbers of layers of each stage.

    Args:
        outline: of the model.
        sizes: gives the model's sizes, where the stages are balanced by them.
        pipeline: what was asked for.

    Raises:
        ConfigError: fewer layers than stages, or an explicit list that isn't the model's.
    """
    if outline.count < pipeline.stages:
        raise ConfigError(
            f"pipeline.stages is {pipeline.stages}, but the model has {outline.count} layers, and each stage needs at "
            f"least one; {outline.count} stages or fewer would work"
        )
    balance = pipeline.stage_balance
    if isinstance(balance, tuple):
        return _checked_balance(balance, outline, pipeline)
    if balance == "layers":
        even, rest = divmod(outline.count, pipeline.stages)
        # The odd ones go to the front: the last stage has the head already.
        return tuple(even + (stage < rest) for stage in range(pipeline.stages))
    return balance_by_flops(sizes(), pipeline.stages, _ASSUMED_LENGTH)


def _checked_balance(balance: tuple[int, ...], outline: Outline, pipeline: PipelineConfig) -> tuple[int, ...]:
    if len(balance) != pipeline.stages or min(balance) < 1 or sum(balance) != outline.count:
        raise ConfigError(
            f"pipeline.stage_balance is {list(balance)}: it needs {pipeline.stages} numbers, each at least 1, with the "
            f"sum {outline.count}, the model's number of layers"
        )
    return balance


def cut_stage(model: PreTrainedModel, outline: Outline, cut: StageCut) -> StageInput | None:
    """Leave of a model, on any device, what one stage needs; in place.

    Parameters that the last stage shares with the first (tied embeddings) stay on both under their own names; see
    :func:`shared_parameters`.

    Returns:
        Where the hidden state comes in, on all stages but the first.
    """
    dtype = model.dtype
    kept_layers = range(cut.first, cut.stop)
    for index in range(outline.count):
        if index not in kept_layers:
            kind = StageInput if index == cut.first - 1 else StageOutput if index == cut.stop else PlaceholderLayer
            name = outline.layer(index)
            model.set_submodule(name, kind(model.get_submodule(name), outline))
    kept = _kept_units(outline, cut)
    for name in (*outline.before, *outline.after, *outline.head):
        if name not in kept:
            model.set_submodule(name, PlaceholderModule(dtype))
    _keep_ties(model, outline, kept)
    if cut.is_first:
        return None
    stage_input = model.get_submodule(outline.layer(cut.first - 1))
    assert isinstance(stage_input, StageInput)
    return stage_input


def _kept_units(outline: Outline, cut: StageCut) -> frozenset[str]:
    """Modules outside the layers that a stage has."""
    kept = set(outline.before if cut.is_first else ())
    if cut.is_last:
        kept |= {*outline.after, *outline.head, *_holders(outline)}
    return frozenset(kept)


def _holders(outline: Outline) -> set[str]:
    """Modules that only hold a parameter for the head on the last stage."""
    units = (*outline.before, *outline.after, *outline.head)
    pairs = [(_unit_of(target, units), _unit_of(source, units)) for target, source in outline.tied.items()]
    return {source for target, source in pairs if target not in outline.before and source in outline.before}


def _unit_of(parameter: str, units: Sequence[str]) -> str:
    return next(name for name in units if parameter.startswith(f"{name}."))


def _keep_ties(model: Any, outline: Outline, kept: frozenset[str]) -> None:
    """Let the model know of those ties only that are inside of the stage."""
    units = (*outline.before, *outline.after, *outline.head)
    ties = {
        target: source
        for target, source in outline.tied.items()
        if _unit_of(target, units) in kept and _unit_of(source, units) in kept
    }
    model.all_tied_weights_keys = dict(ties)
    # For whoever lets the model compute them again.
    model._tied_weights_keys = dict(ties)


def draw_outline(cls: type[PreTrainedModel], config: PretrainedConfig) -> Outline:
    """Find the parts of a model, and make sure that a pipeline can cut it.

    Raises:
        UnsupportedModelError: it can't, with the reason.
    """
    model, outline = outline_on_meta(cls, config)
    check_cut(model, outline)
    return outline


def check_cut(model: PreTrainedModel, outline: Outline) -> None:
    """Make sure that a model's own code runs around the placeholders. The model, on the meta device, is cut for it.

    Raises:
        UnsupportedModelError: it reads something of a module that a stage doesn't have.
    """
    positions = torch.empty((1, 8), dtype=torch.int64, device="meta")
    hidden = torch.empty((1, 8, outline.width), dtype=outline.dtype or model.dtype, device="meta")
    final = hidden.new_empty((1, 8, outline.final_width), dtype=model.dtype)
    try:
        with Flow(), torch.no_grad(), torch.device("meta"):
            Head(model, outline).logits(final)
            if outline.count > 1:
                # Nothing of its own, so that everything is missing.
                stage_input = cut_stage(model, outline, StageCut(1, 3, 1, 1))
                run_base(model, outline, stage_input, hidden=hidden, position_ids=positions)
    except Exception as error:
        raise UnsupportedModelError(
            f"a pipeline can't cut {type(model).__name__}: its forward doesn't run without the modules of other "
            f"stages: {type(error).__name__}: {error}"
        ) from error


def shared_parameters(model: PreTrainedModel, outline: Outline, cut: StageCut) -> dict[str, nn.Parameter]:
    """Parameters that the first and the last stage both have, by their Hugging Face name; on others none.

    Each of the two has a part of their gradient.
    """
    if cut.stages == 1 or not (cut.is_first or cut.is_last):
        return {}
    holders = _holders(outline)
    return {
        source: model.get_parameter(source)
        for source in sorted(set(outline.tied.values()))
        if _unit_of(source, outline.before + outline.after + outline.head) in holders
    }


def run_base(
    model: PreTrainedModel,
    outline: Outline,
    stage_input: StageInput | None,
    *,
    ids: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Call the base model on one stage.

    Args:
        model: a stage, as :func:`cut_stage` left it, or a whole model.
        stage_input: what :func:`cut_stage` returned.
        ids: ``[B, L]``, on the first stage. Where a model must be given embeddings, ``inputs_embeds`` among the
            options takes their place.
        hidden: ``[B, L, H]`` from the stage before, on the others.
        options: for the base model's forward; ``position_ids`` and ``attention_mask`` are left out where it has no
            such argument or they are None.

    Returns:
        ``[B, L, H]``: the input of the next stage's first layer, or on the last stage of the head.
    """
    arguments = {name: value for name, value in options.items() if value is not None}
    for name in ("position_ids", "attention_mask"):
        if name not in outline.options:
            arguments.pop(name, None)
    if "use_cache" in outline.options:
        arguments["use_cache"] = False
    base = model.get_submodule(outline.base)
    if stage_input is None:
        if ids is not None:
            arguments["input_ids"] = ids
        return _leaving(model, outline, base(**arguments))
    assert hidden is not None, "a stage behind the first needs the hidden state"
    # It only tells shape, dtype and device; one number stands for all.
    nothing = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
    stage_input.hidden = hidden
    try:
        return _leaving(model, outline, base(inputs_embeds=nothing, **arguments))
    finally:
        stage_input.hidden = None


def _leaving(model: PreTrainedModel, outline: Outline, output: Any) -> torch.Tensor:
    layers = model.get_submodule(outline.layers)
    assert isinstance(layers, nn.ModuleList)
    leaving = next((layer for layer in layers if isinstance(layer, StageOutput)), None)
    if leaving is None:
        final: torch.Tensor = output[0]
        return final
    hidden, leaving.hidden = leaving.hidden, None
    assert hidden is not None
    return hidden
