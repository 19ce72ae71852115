"""Plan per-rank files: which tensors each pipeline stage has, and how its mesh shards them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.config.schema import CuboidConfig
from cuboid.convert.formats.parameter_names import LoadTarget, blank_model, is_expected, load_targets, state_specs
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.models.model_plan import ModelPlan
from cuboid.models.stages.stage_cut import cut_stages
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec
from cuboid.weights.rank_folder import RankTensor, StoredSharding, layout_in_words
from cuboid.weights.resolve import resolve_elsewhere


@dataclass(frozen=True)
class RankPlan:
    """The contents of all ranks' files.

    Attributes:
        mesh: the mesh of each stage.
        layers: number of layers of each stage; empty without a pipeline.
        tensors: all tensors, by their names in the full checkpoint.
        unused: tensors of the checkpoint that the model declares as ignored.
        placement: the pipeline rank of each stage; empty where each rank has one.
    """

    mesh: MeshShape
    layers: tuple[float, ...]
    tensors: dict[str, RankTensor]
    unused: tuple[str, ...]
    placement: tuple[int, ...] = ()

    def describe(self) -> str:
        """The layout as text."""
        return layout_in_words(self.mesh, self.layers, self.placement)


def plan_ranks(
    model_config: Path, specs: Mapping[str, TensorSpec], config: CuboidConfig, world_size: int | None
) -> RankPlan:
    """Plan the files of the ranks that hold one copy of a model.

    Args:
        model_config: folder with a ``config.json``, or the file.
        specs: dtypes and shapes of the full checkpoint's tensors.
        config: Cuboid's config, with the mesh and the pipeline.
        world_size: number of ranks of the job that will load them, all replicas included; by default one replica's.

    Raises:
        CheckpointError: the checkpoint lacks a parameter, or has a tensor that the model doesn't know.
        MeshError, UnsupportedModelError, ConfigError: the config doesn't fit the model or the world size.
    """
    model = blank_model(model_config)
    plan = resolve_elsewhere(model, config, world_size)
    shape, placement = plan.mesh.shape, plan.mesh.placement
    shardings: Mapping[str, ShardingSpec] = {} if plan.parallel is None else plan.parallel.by_parameter
    layers, stages = _stages(model_config, model, plan)
    targets = load_targets(model, specs)
    unused = tuple(name for name in specs if name not in targets)
    for name in unused:
        if not is_expected(model, name):
            raise CheckpointError(f"the checkpoint has a tensor {name}, which {type(model).__name__} doesn't know")
    _check(model, specs, targets, is_sharded=shape.size > 1)
    tensors = {}
    for name in (name for name in specs if name in targets):
        parameter = targets[name].parameter
        sharding = shardings.get(parameter)
        tensors[name] = RankTensor(
            dtype=str(specs[name].dtype).removeprefix("torch."),
            shape=specs[name].shape,
            parameter=parameter,
            layout=None if sharding is None else StoredSharding.of(sharding),
            stages=tuple(stage for stage, names in enumerate(stages) if parameter in names),
        )
    return RankPlan(shape, layers, tensors, unused, placement if len(layers) > plan.config.stages else ())


def _stages(
    model_config: Path, model: PreTrainedModel, plan: ModelPlan
) -> tuple[tuple[float, ...], list[frozenset[str]]]:
    """Number of layers of each stage, and names of the parameters and buffers that each rank of the pipeline has."""
    if plan.stages is None:
        return (), [frozenset(state_specs(model))]
    ranks = []
    for rank in range(plan.config.stages):
        part = blank_model(model_config)
        cut_stages(part, plan.stages.outline, plan.stages.layout.cuts(rank))
        ranks.append(frozenset(state_specs(part)))
    return plan.stages.layout.counts, ranks


def _check(
    model: PreTrainedModel,
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, LoadTarget],
    *,
    is_sharded: bool,
) -> None:
    """Reject a checkpoint that the ranks couldn't load from their files."""
    state = state_specs(model)
    for name, target in targets.items():
        if target.converted and is_sharded:
            raise UnsupportedModelError(
                f"{type(model).__name__} stores {name} in another form than it has in memory, where the mesh cuts it; "
                "files for stages alone, of one rank each, are possible: leave tensor_parallel out of the config"
            )
        shape = state[target.parameter].shape
        if not target.converted and specs[name].shape != shape:
            raise CheckpointError(
                f"{name} is of shape {list(specs[name].shape)}, but {type(model).__name__} with this config.json has "
                f"{list(shape)}"
            )
    if any(target.converted for target in targets.values()):
        # Which parameters a conversion produces is only known in transformers' loader, which raises if one is missing.
        return
    ties: Mapping[str, str] = model.all_tied_weights_keys
    present = {target.parameter for target in targets.values()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in present and ties.get(name) not in present:
            raise CheckpointError(f"the checkpoint has no tensor for {name} of {type(model).__name__}")
