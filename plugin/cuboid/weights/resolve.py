"""From a user's config to a :class:`~cuboid.models.model_plan.ModelPlan`: every decision, in the order they depend on
each other."""

from __future__ import annotations

from transformers import PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh, current_world_size
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.certification.mesh_certificates import certified_plan
from cuboid.models.cross_entropy.loss_function import check_loss_in_pipeline
from cuboid.models.kinds.registry import kind_of_class
from cuboid.models.model_plan import ModelPlan
from cuboid.models.pipeline.staging_plan import plan_staging
from cuboid.models.sharded.activation_checkpointing import check_checkpointing
from cuboid.models.sharded.fp8 import check_fp8
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.quantization import Quantization, check_settings
from cuboid.models.sharded.sharded_model import sharding_of
from cuboid.models.stages.stage_model import StageModel
from cuboid.planner.automatic import MeshChoice, choose_mesh, segment_choice, settle_stages


def settle(
    model: PreTrainedModel,
    config: CuboidConfig,
    cls: type[PreTrainedModel] | None = None,
    *,
    world_size: int | None = None,
    four_bits: bool = False,
) -> tuple[MeshChoice, CuboidConfig]:
    """Decide what a config leaves open: the shape of the mesh, and the schedule with the placement of the stages.

    Args:
        model: the whole model, on any device, meta included.
        config: Cuboid's config.
        cls: the architecture's class, if the model's own class is derived from it.
        world_size: number of ranks of the job; by default those of one replica, or of the config's ``cluster``.
        four_bits: whether the model's linear layers are stored in 4 bits.

    Raises:
        MeshError, ConfigError, UnsupportedModelError: as :func:`resolve`.
    """
    mesh = config.tensor_parallel.mesh
    if mesh == "auto":
        choice = choose_mesh(model, config, cls, world_size=world_size, four_bits=four_bits)
    else:
        choice = MeshChoice(mesh.shape)
    if config.pipeline is not None and not config.pipeline.is_settled:
        config = settle_stages(model, config, choice.mesh, cls, world_size=world_size, four_bits=four_bits)
    return choice, config


def resolve(
    model: PreTrainedModel,
    config: CuboidConfig,
    cls: type[PreTrainedModel] | None = None,
    quantization: Quantization | None = None,
) -> ModelPlan:
    """Decide what becomes of a model on this rank; nothing is changed, and no weight is read.

    Args:
        model: the whole model, on any device, meta included.
        config: Cuboid's config.
        cls: the architecture's class, if the model's own class is derived from it.
        quantization: how the model's linear layers are stored in 4 bits.

    Raises:
        UnsupportedModelError: the architecture isn't right on such a mesh or in such a pipeline, or can't be probed.
        MeshError: the mesh doesn't divide the model, or the world.
        ConfigError: the config doesn't fit the model.
    """
    cls, world_size = cls or type(model), current_world_size()
    if config.pipeline is not None:
        # Before certification, which would only say that the code is another.
        check_loss_in_pipeline(model, kind_of_class(cls).ordinary_loss)
    if config.lora is not None and config.lora.load_in_4bit and quantization is None:
        raise ConfigError(
            f"lora.load_in_4bit is true, but the weights of {cls.__name__} are in {model.dtype}: give from_pretrained "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True, …), or leave the key out"
        )
    choice, config = settle(model, config, cls, world_size=world_size, four_bits=quantization is not None)
    mesh = Mesh(choice.mesh, pipe=config.stages, placement=config.placement)
    return _certified(model, config, cls, mesh, choice, runs_here=True, quantization=quantization)


def resolve_elsewhere(model: PreTrainedModel, config: CuboidConfig, world_size: int | None) -> ModelPlan:
    """As :func:`resolve`, for rank 0 of a job that doesn't run here, whose machines this process can't ask.

    Args:
        model: the whole model, on any device, meta included.
        config: Cuboid's config.
        world_size: number of ranks of the job; by default one replica's.
    """
    choice, config = settle(model, config, world_size=world_size)
    ranks = world_size or choice.mesh.size * config.stages
    mesh = Mesh(choice.mesh, pipe=config.stages, rank=0, world_size=ranks, placement=config.placement)
    return _certified(model, config, type(model), mesh, choice, runs_here=False)


def _certified(
    model: PreTrainedModel,
    config: CuboidConfig,
    cls: type[PreTrainedModel],
    mesh: Mesh,
    choice: MeshChoice,
    *,
    runs_here: bool,
    quantization: Quantization | None = None,
) -> ModelPlan:
    if config.activation_checkpointing is not None:
        check_checkpointing(model, cls, config.activation_checkpointing)
    parallel = stages = quantized = None
    # Stages of one rank each shard nothing, so architectures without rules for a mesh have them too.
    if config.pipeline is None or mesh.shape.size > 1 or quantization is not None:
        parallel = certified_plan(model, mesh.shape, cls, config.pipeline)
    if config.tensor_parallel.fp8 is not None:
        check_fp8(model, cls, config, parallel)
    if quantization is not None:
        assert parallel is not None, "made for quantised layers on any mesh"
        check_settings(config)
        quantized = quantization.layers_of(model, parallel)
        quantization.connect(mesh)
    if config.pipeline is not None:
        four_bits = quantization is not None
        segments = segment_choice(model, config, mesh, cls, four_bits=four_bits) if runs_here else None
        stages = plan_staging(model, config, mesh, cls, segments, is_frozen=four_bits or config.lora is not None)
        routers = () if stages.outline.router_loss is None else stages.outline.router_loss.routers
        roles = {} if parallel is None else parallel.roles
        # Certification's small models have no jitter, for which the blocks of routers are computed whole.
        blocks = tuple(f"{name}." for name, role in roles.items() if role.kind == "whole")
        if any(name.startswith(blocks) for name in routers):
            raise UnsupportedModelError(
                f"output_router_logits: routers of {cls.__name__} are in blocks that are computed whole, where a rank "
                "doesn't know which tokens their logits are of; set it to false, set the config's jitter to 0, or use "
                "stages of one rank"
            )
    return ModelPlan(cls, config, mesh, parallel, stages, quantized, choice.expected)


def plan_of(sharded: PreTrainedModel, whole_model: PreTrainedModel) -> ModelPlan:
    """The plan that an existing sharded model or stage was made by.

    Args:
        sharded: the model.
        whole_model: the same model before it is cut, on any device.
    """
    sharding = sharding_of(sharded)
    stages = sharded.staging.plan if isinstance(sharded, StageModel) else None
    config = CuboidConfig(tensor_parallel=sharding.config) if stages is None else stages.config
    parallel = None
    if stages is None or sharding.mesh.shape.size > 1:
        parallel = make_parallel_plan(whole_model, sharding.mesh.shape, sharding.verdict)
    return ModelPlan(sharding.base, config, sharding.mesh, parallel, stages)
