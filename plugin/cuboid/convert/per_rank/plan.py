"""Plan per-rank files: which tensors each stage of the pipeline has, and how its mesh cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.config.schema import CuboidConfig
from cuboid.convert.formats.parameter_names import Role, blank_model, is_expected, roles_of, state_specs
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.models.pipeline.staging_plan import plan_staging
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.stages.stages import cut_at, cut_stage
from cuboid.planner.mesh_search import choose_mesh
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec
from cuboid.weights.rank_folder import RankTensor, StoredLayout, layout_in_words


@dataclass(frozen=True)
class RankPlan:
    """What each rank's file is to hold.

    Attributes:
        mesh: of each stage.
        layers: of each stage; empty without a pipeline.
        tensors: by the name in the whole checkpoint.
        unused: tensors of the checkpoint that the model has no use for, as it knows itself.
    """

    mesh: MeshShape
    layers: tuple[int, ...]
    tensors: dict[str, RankTensor]
    unused: tuple[str, ...]

    def describe(self) -> str:
        """The layout in words."""
        return layout_in_words(self.mesh, self.layers)


def plan_ranks(
    model_config: Path, specs: Mapping[str, TensorSpec], config: CuboidConfig, world_size: int | None
) -> RankPlan:
    """Plan the files of the ranks that hold one copy of a model.

    Args:
        model_config: folder with a ``config.json``, or the file.
        specs: of the whole checkpoint's tensors.
        config: which mesh and which pipeline.
        world_size: ranks of the job to come, replicas included; by default one copy's.

    Raises:
        CheckpointError: the checkpoint lacks a parameter, or has a tensor that the model doesn't know.
        MeshError, UnsupportedModelError, ConfigError: the config doesn't fit the model or the world.
    """
    model = blank_model(model_config)
    shape = choose_mesh(model, config)
    mesh = Mesh(shape, pipe=config.stages, rank=0, world_size=world_size or shape.size * config.stages)
    layouts = _layouts(model, config, shape)
    layers, stages = _stages(model_config, model, config, mesh)
    roles = roles_of(model, specs)
    unused = tuple(name for name in specs if name not in roles)
    for name in unused:
        if not is_expected(model, name):
            raise CheckpointError(f"the checkpoint has a tensor {name}, which {type(model).__name__} doesn't know")
    _check(model, specs, roles, is_cut=shape.size > 1)
    tensors = {name: _tensor(specs[name], roles[name], layouts, stages) for name in specs if name in roles}
    return RankPlan(shape, layers, tensors, unused)


def _layouts(model: PreTrainedModel, config: CuboidConfig, shape: MeshShape) -> dict[str, ShardingSpec]:
    """Of every parameter by name; nothing where stages alone hold whole tensors."""
    if config.pipeline is not None and shape.size == 1:
        return {}
    return make_parallel_plan(model, shape).by_parameter


def _stages(
    model_config: Path, model: PreTrainedModel, config: CuboidConfig, mesh: Mesh
) -> tuple[tuple[int, ...], list[frozenset[str]]]:
    """Layers of each stage, and what each has of the model's parameters and buffers."""
    if config.pipeline is None:
        return (), [frozenset(state_specs(model))]
    staging = plan_staging(type(model), model.config, config, mesh)
    stages = []
    for stage in range(config.stages):
        own = blank_model(model_config)
        cut_stage(own, staging.outline, cut_at(staging.counts, stage))
        stages.append(frozenset(state_specs(own)))
    return staging.counts, stages


def _check(model: PreTrainedModel, specs: Mapping[str, TensorSpec], roles: Mapping[str, Role], *, is_cut: bool) -> None:
    """Refuse a checkpoint that the ranks couldn't load from their files."""
    state = state_specs(model)
    for name, role in roles.items():
        if role.converted and is_cut:
            raise UnsupportedModelError(
                f"{type(model).__name__} stores {name} in another form than it has in memory, where the mesh cuts it; "
                "files for stages alone, of one rank each, are possible: leave tensor_parallel out of the config"
            )
        shape = state[role.parameter].shape
        if not role.converted and specs[name].shape != shape:
            raise CheckpointError(
                f"{name} is of shape {list(specs[name].shape)}, but {type(model).__name__} with this config.json has "
                f"{list(shape)}"
            )
    if any(role.converted for role in roles.values()):
        # Which parameters come out of a conversion only transformers' loader knows; it misses what is missing.
        return
    ties: Mapping[str, str] = model.all_tied_weights_keys
    present = {role.parameter for role in roles.values()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in present and ties.get(name) not in present:
            raise CheckpointError(f"the checkpoint has no tensor for {name} of {type(model).__name__}")


def _tensor(
    spec: TensorSpec, role: Role, layouts: Mapping[str, ShardingSpec], stages: list[frozenset[str]]
) -> RankTensor:
    layout = layouts.get(role.parameter)
    return RankTensor(
        dtype=str(spec.dtype).removeprefix("torch."),
        shape=spec.shape,
        parameter=role.parameter,
        layout=None if layout is None else StoredLayout.of(layout),
        stages=tuple(stage for stage, names in enumerate(stages) if role.parameter in names),
    )
