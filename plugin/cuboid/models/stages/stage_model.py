"""The model of a pipeline rank: the user's own class, cut to the rank's stages, and sharded if there is a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import Certificate, MeshVerdict
from cuboid.models.attention.forward_context import UnitSlot, forward_context
from cuboid.models.attention.segment_cache import give_cache
from cuboid.models.attention.segments import hang_record, record_of, use_segment_attention
from cuboid.models.attention.whole_sequence import WholeSequence
from cuboid.models.cross_entropy.loss_function import check_loss_in_pipeline, own_loss_refused
from cuboid.models.kinds.model_kind import counts_positions, takes_token_types
from cuboid.models.kinds.sharding import Sharding, WholeModel
from cuboid.models.sharded.compilation import compile_layers
from cuboid.models.sharded.customizations import AsSharded, guard_hooks
from cuboid.models.sharded.fp8 import use_fp8
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.sharded.parallelize import ShardOf, parallelize_modules, whole_blocks
from cuboid.models.sharded.quantization import QuantizedLayers
from cuboid.models.sharded.random_modules import ModelDraws
from cuboid.models.sharded.sharded_model import (
    ShardedModel,
    derived_class,
    first_position,
    keep_track_of,
)
from cuboid.models.stages.deferred_linear import defer_weight_gradients
from cuboid.models.stages.fused_norms import fuse_norms, rms_norms
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.placeholders import PlaceholderEnd, PlaceholderModule
from cuboid.models.stages.stage_cut import Chunk, StageCut, StageLayout, cut_stages, shared_parameters
from cuboid.models.stages.whole_recorder import WholeSequenceRecorder
from cuboid.seq1f1b.schedule.choice import is_generated
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes
from cuboid.tensor3d.layers.whole_block import LateSplit
from cuboid.tensor3d.sharding.gradient_sync import GradientSync
from cuboid.tensor3d.sharding.sharded_param import UnshardedCopy, defer_gradient_sync, keep_until_step_ends
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore


class SegmentChooser(Protocol):
    """Decides "segments": "auto"; see :class:`cuboid.planner.automatic.SegmentChooser`."""

    @property
    def cluster(self) -> object:
        """The cluster that the choice is for."""

    def __call__(self, length: int, rows: int, micro_batches: int, *, recomputes: bool) -> int:
        """The number of segments for sequences of ``length`` tokens."""


@dataclass(frozen=True)
class StagePlan:
    """The stages of a pipeline rank, decided before its model is cut.

    Attributes:
        outline: the whole model's outline.
        layout: the stages of all ranks.
        cuts: this rank's stages, in the order of the layers.
        config: the job's config.
        certificate: what the probe of the architecture found to be right.
        sizes: the whole model's sizes, for costs; None if nothing needs them.
        segment_choice: chooses the number of segments for ``"segments": "auto"``.
    """

    outline: Outline
    layout: StageLayout
    cuts: tuple[StageCut, ...]
    config: CuboidConfig
    certificate: Certificate
    sizes: ModelSizes | None = None
    segment_choice: SegmentChooser | None = None

    @property
    def shifts_labels(self) -> bool:
        """Whether the model's own loss compares each position with the next one's label."""
        return self.outline.is_causal and self.certificate.shifts_labels


@dataclass
class Staging:
    """Everything that a pipeline rank keeps about its stages.

    Attributes:
        plan: what was decided about them.
        chunks: what runs the stages in ``cuts``; set when the model is cut.
        whole_model: facts about the model before it was cut.
        settings: what its config said then, as :func:`_settings_of` gives it.
        ends: placeholders with the shapes of "embedding" and "head", for ranks without them.
        shared: parameters that the ranks of the first and the last stage both have, by name.
        slot: holds the current unit, for the attention functions.
        recorder: runs the base model on whole sequences without layers, to record what layers are given.
        gradient_sync: sums the rank's gradients over a step; None if each is reduced separately.
        held_weights: unsharded weights that are kept until the step ends.
        weight_gradients: while it is open, the rank's linear layers defer their weight gradients to it.
    """

    plan: StagePlan
    chunks: tuple[Chunk, ...] = ()
    whole_model: WholeModel | None = None
    settings: tuple[int | None, bool] = (None, False)
    ends: dict[str, PlaceholderEnd] = field(default_factory=dict)
    shared: dict[str, nn.Parameter] = field(default_factory=dict)
    slot: UnitSlot = field(default_factory=UnitSlot)
    recorder: WholeSequenceRecorder | None = None
    gradient_sync: GradientSync | None = None
    held_weights: list[UnshardedCopy] = field(default_factory=list)
    weight_gradients: WeightGradientStore = field(default_factory=WeightGradientStore)

    def recorded(self, *arguments: Any) -> WholeSequence:
        """See :meth:`WholeSequenceRecorder.record`."""
        assert self.recorder is not None, "a stage that isn't finished"
        return self.recorder.record(*arguments)

    def repeated_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters that are counted on another rank."""
        if any(cut.is_last for cut in self.plan.cuts):
            yield from self.shared.values()


class StageModel(ShardedModel):
    """Mixed into the model's own class by :func:`finish_stage`. An engine's ``train_batch`` runs it."""

    staging: Staging

    def compile(self, **_: Any) -> None:
        """Not for a stage, whose layers the config compiles.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "a pipeline's stages are compiled when they are made: write \"compile\": true in the config's "
            "tensor_parallel section"
        )

    @property
    def loss_function(self) -> Any:
        """As ``PreTrainedModel.loss_function``."""
        return super().loss_function

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        raise own_loss_refused(function)

    def check_settings(self: Any) -> None:
        """Check that what transformers decides at each forward is still what the stages were made for.

        Raises:
            UnsupportedModelError: the loss isn't, or the number of layers to run.
        """
        outline = self.staging.plan.outline
        layers, _ = _settings_of(self)
        if layers != self.staging.settings[0]:
            raise UnsupportedModelError(
                f"config.num_hidden_layers was set to {layers} after the model was cut into stages, which have "
                f"{outline.count} layers together; set it before the model is loaded or sharded"
            )
        drops = getattr(self.get_submodule(outline.base), "layerdrop", 0)
        if drops:
            raise UnsupportedModelError(
                f"{outline.base}.layerdrop was set to {drops} after the model was cut into stages, each of which would "
                "decide by itself which layers run; leave it 0, or use a mesh without a pipeline section"
            )
        check_loss_in_pipeline(self, outline.kind.ordinary_loss)
        adds_routers = bool(getattr(self.config, "output_router_logits", False)) and outline.is_causal
        if adds_routers != (outline.router_loss is not None):
            raise UnsupportedModelError(
                f"config.output_router_logits was set to {adds_routers} after the model was cut into stages, which "
                f"{'have no loss of routers' if adds_routers else 'add the loss of routers'}; set it before the model "
                "is loaded or sharded"
            )

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, for what is tied since the model was cut.

        Raises:
            UnsupportedModelError: the config says to tie more by now, which may be on different stages.
        """
        _, ties = _settings_of(self)
        if ties and not self.staging.settings[1]:
            raise UnsupportedModelError(
                "tie_weights: config.tie_word_embeddings was set after the model was cut into stages, of which the "
                "first and the last have the two weights; set it before the model is loaded or sharded"
            )
        return super().tie_weights(*args, **kwargs)  # type: ignore[misc]

    def counted_parameters(self: Any) -> list[nn.Parameter]:
        """As on any sharded model, without parameters that are counted on another stage."""
        repeated = {id(parameter) for parameter in self.staging.repeated_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in repeated]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, or its placeholder on other stages: scripts compare its size on every rank."""
        return _present(super().get_input_embeddings, self.staging.ends["embedding"])  # type: ignore[misc]

    def get_output_embeddings(self) -> nn.Module | None:
        """As on any sharded model; on stages without the head, a :class:`PlaceholderEnd`."""
        head = self.staging.ends.get("head")
        # Classifiers have none.
        return None if head is None else _present(super().get_output_embeddings, head)

    def generate(self, *_: Any, **__: Any) -> None:
        """Not supported on a stage.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            "generate: a pipeline stage has no forward of its own; save the model with save_pretrained, and load it "
            "without the config's pipeline section, on a mesh or in plain transformers, to generate"
        )

    def enable_input_require_grads(self) -> None:
        """As in transformers, for activation checkpointing with a frozen embedding; on the first stage only."""
        # Inputs of other stages have a gradient anyway, and transformers would look for the embedding in a placeholder.
        if any(cut.is_first for cut in self.staging.plan.cuts):
            super().enable_input_require_grads()  # type: ignore[misc]


def _present(end: Callable[[], nn.Module | None], absent: PlaceholderEnd) -> nn.Module:
    try:
        module = end()
    except AttributeError:
        # The module that contains it is a placeholder on this stage.
        return absent
    return absent if module is None or isinstance(module, PlaceholderModule) else module


def _settings_of(model: PreTrainedModel) -> tuple[int | None, bool]:
    """The number of layers by a model's config, and whether it ties the head to the embedding."""
    config = model.config.get_text_config()
    ties = getattr(config, "tie_word_embeddings", False) or getattr(model.config, "tie_word_embeddings", False)
    return getattr(config, "num_hidden_layers", None), bool(ties)


def cut_model(model: PreTrainedModel, staging: Staging) -> None:
    """Remove from a model, in place and on any device, everything that this rank's stages don't need.

    Raises:
        UnsupportedModelError: before the model is changed, if its loss isn't its kind's ordinary one.
    """
    check_loss_in_pipeline(model, staging.plan.outline.kind.ordinary_loss)
    staging.whole_model, staging.settings = _whole_of(model, staging), _settings_of(model)
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    staging.ends = {what: PlaceholderEnd(module, what) for what, module in ends.items() if module is not None}
    staging.chunks = cut_stages(model, staging.plan.outline, staging.plan.cuts)


def _whole_of(model: PreTrainedModel, staging: Staging) -> WholeModel:
    outline = staging.plan.outline
    whole_model = WholeModel.of(model, outline.kind, outline.longest)
    # Causal models' micro-batches are cut into segments: ids, mask and positions, but no token types.
    types = model.config.type_vocab_size if takes_token_types(model) and not outline.is_causal else None
    first = 0 if outline.is_causal else first_position(model)
    limits = replace(
        whole_model.limits,
        types=types,
        counts=whole_model.limits.positions is not None and counts_positions(model),
        first_position=first,
        shifts_labels=staging.plan.shifts_labels,
    )
    return replace(whole_model, limits=limits)


def finish_stage(
    model: PreTrainedModel,
    staging: Staging,
    mesh: Mesh,
    parallel_plan: ParallelPlan | None,
    shard_of: ShardOf,
    quantized: QuantizedLayers | None = None,
) -> PreTrainedModel:
    """Turn a cut model into a stage, in place: shard it, and install what runs its units.

    Args:
        model: the result of :func:`cut_model`.
        staging, mesh: this rank's.
        parallel_plan: how to shard the stage over the mesh; None on a mesh of one rank.
        shard_of: returns the shard of a parameter.
        quantized: the layers whose weights are stored in 4 bits.
    """
    plan = staging.plan
    late: LateSplit | None = None
    draws: ModelDraws | None = None
    if parallel_plan is not None:
        stages = [{plan.outline.layer(i) for i in range(cut.first, cut.stop)} for cut in plan.cuts]
        config = plan.config.tensor_parallel
        split, draws = parallelize_modules(model, parallel_plan, mesh, config, shard_of, stages, quantized)
        # Image models are never cut into stages.
        late = split if isinstance(split, LateSplit) else None
        if plan.config.tensor_parallel.gradient_sync == "step":
            staging.gradient_sync = defer_gradient_sync(model)
        if plan.config.tensor_parallel.weight_gather == "step":
            staging.held_weights = keep_until_step_ends(model)
    else:
        fuse_norms(model, rms_norms(model), mesh)
    pipeline, layers = plan.config.pipeline, model.get_submodule(plan.outline.layers)
    assert pipeline is not None
    assert isinstance(layers, nn.ModuleList)
    indices = [index for cut in plan.cuts for index in range(cut.first, cut.stop)]
    local_layers = {plan.outline.layer(index): layers[index] for index in indices}
    # Whole sequences have no earlier segment to continue from.
    gives_cache = plan.certificate.gives_cache and pipeline.segments != 1
    use_segment_attention(model.config, local_layers, staging.slot, mesh, gives_cache=gives_cache)
    for name in () if parallel_plan is None else whole_blocks(parallel_plan):
        # A block that is computed whole has all heads, and sets its own random number generator.
        for module in model.get_submodule(name).modules() if name.startswith(f"{plan.outline.layers}.") else ():
            hang_record(module, replace(record_of(module), mesh=None))
    if parallel_plan is None and plan.config.tensor_parallel.fp8 is not None:
        use_fp8(local_layers.values(), plan.config.tensor_parallel.fp8)
    if is_generated(pipeline.schedule):
        defer_weight_gradients(local_layers.values(), staging.weight_gradients)
    staging.recorder = WholeSequenceRecorder(model, plan.outline, local_layers, staging.slot)
    # Register these hooks after the recorder's, which compare a layer's arguments with the whole sequence's: those
    # contain no cache.
    for layer in local_layers.values() if gives_cache else ():
        give_cache(layer, staging.slot)
    staging.shared = shared_parameters(model, plan.outline, plan.cuts)
    base = type(model)
    assert staging.whole_model is not None
    model.cuboid = Sharding(
        mesh,
        plan.config.tensor_parallel,
        base,
        plan.outline.kind,
        staging.whole_model,
        MeshVerdict() if parallel_plan is None else parallel_plan.verdict,
        late=late,
        draws=draws,
    )
    if plan.config.tensor_parallel.compile:
        compile_layers(model, list(local_layers.values()), staging.slot)
    model.staging = staging
    inner: Any = model.get_submodule(plan.outline.base)
    inner.__class__ = _stage_base_class(type(inner))  # type: ignore[arg-type]
    model.__class__ = _stage_class(base)  # type: ignore[arg-type, assignment]
    keep_track_of(model)
    guard_hooks(model, runs_whole=False)
    model.cuboid.state.made = AsSharded(model, is_cut=True, has_segments=staging.plan.outline.is_causal)
    return model


@functools.cache
def _stage_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    # Trainers read this signature to learn which columns the model takes.
    @functools.wraps(base.forward)
    def forward(*_: Any, **__: Any) -> Any:
        raise _no_forward()

    return derived_class(StageModel, base, forward)


@functools.cache
def _stage_base_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass that runs only inside a unit; called directly, a stage's base model returns nothing meaningful."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_context().unit is None:
            raise _no_forward()
        return base.forward(self, *args, **kwargs)

    return derived_class(None, base, forward)


def _no_forward() -> CuboidError:
    return CuboidError(
        "a pipeline stage has no forward of its own; give micro-batches to the engine's train_batch or eval_batch, or "
        "use cuboid.CuboidTrainer in place of the Hugging Face Trainer"
    )
