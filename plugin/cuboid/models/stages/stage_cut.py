"""Cuts a Hugging Face model to one pipeline stage: its own layers stay, placeholders replace those of other stages.

The model keeps its class and all of its code. The base model's own forward runs on every stage and computes masks,
rotary tables and everything else that its layers need; only the hidden state comes from the previous stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.batch.local_batch import TOKEN_TYPES
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.stages.outline import Branch, Halves, Outline, outline_on_meta
from cuboid.models.stages.placeholders import (
    PlaceholderBranch,
    PlaceholderLayer,
    PlaceholderModule,
    StageInput,
    StageOutput,
)
from cuboid.models.tensor_flow import Flow
from cuboid.seq1f1b.schedule.partition import balance_by_flops, balance_halves
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, ends_of

#: Sequence length at which layers and head are weighed against each other, since the real one isn't known at load time.
ASSUMED_LENGTH = 4096


@dataclass(frozen=True)
class StageCut:
    """The layers of one stage: [first, stop) of the model's.

    The first stage also has the embedding, and the last one the head.

    Attributes:
        begins_inside: whether it has only the second half of its first layer.
        ends_inside: whether it has only the first half of its last layer.
    """

    stage: int
    stages: int
    first: int
    stop: int
    begins_inside: bool = False
    ends_inside: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this stage's input is token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.stage == self.stages - 1

    def absent_branches(self, outline: Outline) -> dict[str, Branch]:
        """The branches that another stage has of the layers that this one shares with it, by name."""
        absent: dict[str, Branch] = {}
        if self.begins_inside:
            layer = outline.layer(self.first)
            absent |= {f"{layer}.{name}": branch for name, branch in outline.halves[self.first].first.items()}
        if self.ends_inside:
            layer = outline.layer(self.stop - 1)
            absent |= {f"{layer}.{name}": branch for name, branch in outline.halves[self.stop - 1].second.items()}
        return absent


@dataclass(frozen=True)
class StageLayout:
    """How the layers are cut into stages, and which pipeline rank has each stage.

    ``counts`` are numbers of layers; of a layer that two stages share, each has a half.
    """

    counts: tuple[float, ...]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.counts)

    def cuts(self, pipe: int) -> tuple[StageCut, ...]:
        """The stages of one rank of the pipeline, in the order of the layers."""
        cuts = [
            StageCut(stage, self.stages, floor(start), ceil(stop), start != floor(start), stop != ceil(stop))
            for stage, (start, stop) in enumerate(ends_of(self.counts))
        ]
        return tuple(cut for cut, rank in zip(cuts, self.placement, strict=True) if rank == pipe)


#: For each layer its halves, or why no stage can begin inside it.
LayerHalves = tuple[Halves | str, ...]


def plan_stages(
    count: int,
    sizes: Callable[[], ModelSizes],
    pipeline: PipelineConfig,
    halves: Callable[[], LayerHalves] = tuple,
    placement: Sequence[int] | None = None,
    length: int = ASSUMED_LENGTH,
) -> tuple[float, ...]:
    """The number of layers of each stage.

    Args:
        count: number of the model's layers.
        sizes: returns the model's sizes; called only if stages are balanced by FLOPs. For ``"stage_balance":
            "halves"`` they know the layers' halves.
        pipeline: the config's pipeline section.
        halves: returns the layers' halves; called only if an explicit list has stages that begin inside a layer.
        placement: the pipeline rank of each stage; by default the config's.
        length: tokens of a sequence, for which halves of layers are weighed: attention's share grows with it.

    Raises:
        ConfigError: fewer layers than stages, or an explicit list that doesn't fit the model.
        UnsupportedModelError: an explicit list cuts a layer that can't be cut.
    """
    if count < pipeline.parts:
        asked, fewer = f"pipeline.stages is {pipeline.stages}", f"{count} stages or fewer"
        if pipeline.parts > pipeline.stages:
            asked += f" and pipeline.chunks {pipeline.chunks}"
            fewer = f"stages × chunks of {count} or less"
        raise ConfigError(
            f"{asked}, but the model has {count} layers, and each stage needs at least one; {fewer} would work"
        )
    balance = pipeline.stage_balance
    if isinstance(balance, tuple):
        return _checked_balance(balance, count, pipeline, halves, placement)
    if balance == "layers":
        even, rest = divmod(count, pipeline.parts)
        # The first stages get the layers left over, since the last one also has the head.
        return tuple(even + (stage < rest) for stage in range(pipeline.parts))
    has_head = not pipeline.spreads_head
    if balance == "halves":
        places = pipeline.placement if placement is None else placement
        return balance_halves(sizes(), places, length, has_head=has_head)
    return balance_by_flops(sizes(), pipeline.parts, ASSUMED_LENGTH, has_head=has_head)


def _checked_balance(
    balance: tuple[float, ...],
    count: int,
    pipeline: PipelineConfig,
    halves: Callable[[], LayerHalves],
    placement: Sequence[int] | None,
) -> tuple[float, ...]:
    if len(balance) != pipeline.parts or min(balance) < 1 or sum(balance) != count:
        raise ConfigError(
            f"pipeline.stage_balance is {list(balance)}: it needs {pipeline.parts} numbers, each at least 1, with the "
            f"sum {count}, the model's number of layers"
        )
    inside = {stage: start for stage, (start, _) in enumerate(ends_of(balance)) if start != floor(start)}
    places = pipeline.placement if placement is None and inside else placement or ()
    for stage, start in inside.items():
        setting, layer = f"pipeline.stage_balance {list(balance)}: stage {stage} begins inside layer", floor(start)
        if places[stage - 1] == places[stage]:
            raise ConfigError(
                f"{setting} {layer}, whose other half is in stage {stage - 1} on the same pipeline rank; cut between "
                "layers there"
            )
        reason = halves()[layer]
        if isinstance(reason, str):
            raise UnsupportedModelError(f"{setting} {layer}, which can't be cut: {reason}; give it whole layers there")
    return balance


def halves_inside(counts: Sequence[float], halves: Callable[[], LayerHalves]) -> Mapping[int, Halves]:
    """The halves of the layers inside which stages begin, by the layers' indices."""
    cut = [floor(start) for start, _ in ends_of(counts) if start != floor(start)]
    known = halves() if cut else ()
    return {index: half for index in cut if isinstance(half := known[index], Halves)}


class Chunk:
    """One stage of a rank. The rank's model has the modules of all its stages.

    During a chunk's forward, placeholders replace the modules of other stages. The placeholder right before its first
    layer returns the hidden state that was received; the one right after its last layer keeps the stage's output.
    """

    def __init__(self, model: PreTrainedModel, outline: Outline, cut: StageCut, here: Sequence[StageCut]) -> None:
        self.cut = cut
        self._outline = outline
        stand_ins: dict[str, nn.Module] = {}
        for name in (outline.layer(i) for other in here if other != cut for i in range(other.first, other.stop)):
            stand_ins[name] = PlaceholderLayer(model.get_submodule(name), outline)
        self._input = self._output = None
        if not cut.is_first:
            name = outline.layer(cut.first - 1)
            stand_ins[name] = self._input = StageInput(model.get_submodule(name), outline)
        if not cut.is_last:
            name = outline.layer(cut.stop)
            stand_ins[name] = self._output = StageOutput(model.get_submodule(name), outline)
        kept, kept_here = _kept_units(outline, [cut]), _kept_units(outline, here)
        # The head may stay: it runs after the base model, not inside it.
        for name in (*outline.before, *outline.after):
            if name in kept_here - kept:
                stand_ins[name] = PlaceholderModule(model.dtype)
        #: Parent modules, the child's name, and the placeholder that replaces the child while this stage runs.
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        for name, stand_in in stand_ins.items():
            owner, _, child = name.rpartition(".")
            self._places.append((model.get_submodule(owner), child, stand_in))

    def run(
        self,
        model: PreTrainedModel,
        *,
        ids: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        shape: Sequence[int] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Call the base model on this stage.

        Args:
            model: this rank's model.
            ids: ``[B, L]`` token ids, on the first stage. If the model takes embeddings instead, pass
                ``inputs_embeds`` among the options.
            hidden: ``[B, L, H]`` from the previous stage (on a mesh ``[B/b, L/s, H/h]``), on all other stages.
            shape: of the embeddings from which the model's own code reads lengths, behind the first stage; by default
                that of ``hidden``.
            options: arguments of the base model's forward. None is dropped, and so are ``position_ids``,
                ``attention_mask`` and ``token_type_ids`` if the forward has no such argument.

        Returns:
            The input of the next stage's first layer or, on the last stage, of the head; shaped as ``hidden``.
        """
        return self._leaving(self.call(model, ids=ids, hidden=hidden, shape=shape, **options))

    def call(
        self,
        model: PreTrainedModel,
        *,
        ids: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        shape: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """As :meth:`run`, but returns the base model's whole output, which is only meaningful on the last stage."""
        arguments = {name: value for name, value in options.items() if value is not None}
        for name in ("position_ids", "attention_mask", TOKEN_TYPES):
            if name not in self._outline.options:
                arguments.pop(name, None)
        arguments.update(self._outline.fixed_options)
        if self._input is not None:
            assert hidden is not None, "a stage behind the first needs the hidden state"
            # These embeddings only carry shape, dtype and device. One expanded element takes no memory.
            one = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
            arguments["inputs_embeds"] = one.expand(hidden.shape if shape is None else shape)
            self._input.hidden = hidden
        elif ids is not None:
            arguments["input_ids"] = ids
        base = model.get_submodule(self._outline.base)
        try:
            with self._alone():
                return base(**arguments)
        finally:
            if self._input is not None:
                self._input.hidden = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """In the ``with`` block, the base model has the modules of this stage only."""
        # ``setattr`` is slow on modules, and this runs for every unit.
        before = [owner._modules[name] for owner, name, _ in self._places]
        for owner, name, stand_in in self._places:
            owner._modules[name] = stand_in
        try:
            yield
        finally:
            for (owner, name, _), module in zip(self._places, before, strict=True):
                owner._modules[name] = module

    def _leaving(self, output: Any) -> torch.Tensor:
        if self._output is None:
            # The last stage: ``last_hidden_state`` is the first item of the base model's output.
            final: torch.Tensor = output[0]
            return final
        hidden, self._output.hidden = self._output.hidden, None
        assert hidden is not None
        return hidden


def cut_stages(model: PreTrainedModel, outline: Outline, cuts: Sequence[StageCut]) -> tuple[Chunk, ...]:
    """Remove from a model, in place and on any device, everything that the stages of one rank don't need.

    Parameters that the last stage shares with the first (tied embeddings) stay on both under their own names; see
    :func:`shared_parameters`.

    Returns:
        A chunk for each of the rank's stages.
    """
    chunks = tuple(Chunk(model, outline, cut, cuts) for cut in cuts)
    dtype = model.dtype
    kept_layers = {index for cut in cuts for index in range(cut.first, cut.stop)}
    for index in range(outline.count):
        if index not in kept_layers:
            name = outline.layer(index)
            model.set_submodule(name, PlaceholderLayer(model.get_submodule(name), outline))
    for cut in cuts:
        # No rank has both halves of a cut layer, so nothing changes from one of its chunks to another.
        for name, branch in cut.absent_branches(outline).items():
            model.set_submodule(name, PlaceholderBranch(model.get_submodule(name), branch))
    kept = _kept_units(outline, cuts)
    for name in (*outline.before, *outline.after, *outline.head):
        if name not in kept:
            model.set_submodule(name, PlaceholderModule(dtype))
    if not any(cut.is_first for cut in cuts):
        for name in _holders(outline) & kept:
            _keep_tied(model, name, outline)
    _keep_ties(model, outline, kept)
    return chunks


def _kept_units(outline: Outline, cuts: Sequence[StageCut]) -> frozenset[str]:
    """The modules outside the layers (embedding, final norm, head) that these stages have."""
    kept = set(outline.before if any(cut.is_first for cut in cuts) else ())
    if any(cut.is_last for cut in cuts):
        kept |= {*outline.after, *outline.head, *_holders(outline)}
    return frozenset(kept)


def _holders(outline: Outline) -> set[str]:
    """Modules of the first stage that the last one keeps only because its head is tied to one of their parameters."""
    units = (*outline.before, *outline.after, *outline.head)
    pairs = [(_unit_of(target, units), _unit_of(source, units)) for target, source in outline.tied.items()]
    return {source for target, source in pairs if target not in outline.before and source in outline.before}


def _keep_tied(model: PreTrainedModel, unit: str, outline: Outline) -> None:
    """Reduce a module that the last stage keeps for a tied parameter to the submodule that has the parameter.

    The rest, such as BERT's position embeddings, belongs to the first stage: a second, untrained copy could be saved
    instead of the trained one.
    """
    owners = {name.rpartition(".")[0] for name in outline.tied.values() if name.startswith(f"{unit}.")}
    if unit in owners:
        return
    kept = {name: model.get_submodule(name) for name in owners}
    # The module's own forward must not run: RoCBERT's concatenates outputs of modules that are on other stages.
    for name in sorted({unit, *(parent for owner in owners for parent in _parents(owner, unit))}):
        model.set_submodule(name, PlaceholderModule(model.dtype))
    for name, module in kept.items():
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).add_module(leaf, module)


def _parents(name: str, unit: str) -> Iterator[str]:
    """The names between a module's name and the unit that contains it."""
    parent = name.rpartition(".")[0]
    while parent != unit:
        yield parent
        parent = parent.rpartition(".")[0]


def _unit_of(parameter: str, units: Sequence[str]) -> str:
    return next(name for name in units if parameter.startswith(f"{name}."))


def _keep_ties(model: Any, outline: Outline, kept: frozenset[str]) -> None:
    """Remove ties from the model's own lists unless both sides are on this rank."""
    units = (*outline.before, *outline.after, *outline.head)
    ties = {
        target: source
        for target, source in outline.tied.items()
        if _unit_of(target, units) in kept and _unit_of(source, units) in kept
    }
    model.all_tied_weights_keys = dict(ties)
    # transformers would recompute ``all_tied_weights_keys`` from this class attribute.
    model._tied_weights_keys = dict(ties)


def draw_outline(cls: type[PreTrainedModel], config: PretrainedConfig) -> Outline:
    """Find the parts of a model, and check that a pipeline can cut it.

    Raises:
        UnsupportedModelError: it can't; the message names the reason.
    """
    model, outline = outline_on_meta(cls, config)
    check_cut(model, outline)
    return outline


def check_cut(model: PreTrainedModel, outline: Outline) -> None:
    """Check that a model's own code runs with placeholders. This cuts ``model``, which must be on the meta device.

    Raises:
        UnsupportedModelError: the code reads something from a module that a stage doesn't have.
    """
    positions = torch.empty((1, 8), dtype=torch.int64, device="meta")
    hidden = torch.empty((1, 8, outline.width), dtype=outline.dtype or model.dtype, device="meta")
    final = hidden.new_empty((1, 8, outline.final_width), dtype=model.dtype)
    try:
        with Flow(), torch.no_grad(), torch.device("meta"):
            if not outline.runs_own_head:
                Head(model, outline).logits(final)
            if outline.count > 1:
                # A middle stage without layers: every module is a placeholder.
                (chunk,) = cut_stages(model, outline, [StageCut(1, 3, 1, 1)])
                chunk.run(model, hidden=hidden, position_ids=positions)
    except Exception as error:
        raise UnsupportedModelError(
            f"a pipeline can't cut {type(model).__name__}: its forward doesn't run without the modules of other "
            f"stages: {type(error).__name__}: {error}"
        ) from error


def shared_parameters(model: PreTrainedModel, outline: Outline, cuts: Sequence[StageCut]) -> dict[str, nn.Parameter]:
    """The parameters that the ranks of the first and the last stage both have, by Hugging Face name.

    Each of the two ranks computes a part of their gradient. The result is empty on other ranks, and if one rank has
    both stages.
    """
    if any(cut.is_first for cut in cuts) == any(cut.is_last for cut in cuts):
        return {}
    return {name: model.get_parameter(name) for name in shared_names(outline)}


def shared_names(outline: Outline) -> tuple[str, ...]:
    """The names of the parameters that the first and the last stage both have."""
    units, holders = outline.before + outline.after + outline.head, _holders(outline)
    return tuple(name for name in sorted(set(outline.tied.values())) if _unit_of(name, units) in holders)


def half_frozen(name: str, *, trains_first: bool) -> ConfigError:
    """The error about a parameter that the first and the last stage both have, and that one of them has frozen."""
    return ConfigError(
        f"{name} is tied to a parameter of the last stage, and is {'trained' if trains_first else 'frozen'} on the "
        "first stage only; let both have the same requires_grad, as after "
        f"model.get_input_embeddings().requires_grad_({not trains_first}) on all ranks (the head is on the last stage "
        "only, and model.get_output_embeddings() a placeholder on the others)"
    )
