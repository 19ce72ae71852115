"""What torch's own training utilities do with a sharded model, in a loop without DeepSpeed or ColossalAI.

They are written for ranks that all have the same parameters. Here these are the ranks at one place of the mesh, one in
each replica; ranks at other places have other shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, OptimizerError
from cuboid.models.sharded.sharded_model import ShardedModel, sharded_models
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.elementwise import OwnedShards, check_optimizer
from cuboid.tensor3d.sharding.refused_draws import draws_refused, draws_whole, has_storage_of, shares_storage

#: By optimizer, the models and parameters that were there when it was last looked at.
_seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = WeakKeyDictionary()


def check_initializer(name: str, tensor: torch.Tensor) -> None:
    """Check that a function of ``torch.nn.init`` isn't given a shard of a model, or its ``.data``.

    Raises:
        UnsupportedModelError: it is; names the parameter.
    """
    # What PEFT draws is whole yet: the factors of another adapter, in a layer that has one.
    if draws_whole():
        return
    # A model that is made calls this for each of its weights, so that names are only asked for where they are needed.
    for model in sharded_models():
        if model.cuboid.state.made.is_cut and has_storage_of(model, tensor):
            for key, parameter in model.named_parameters():
                if shares_storage(tensor, parameter):
                    raise draws_refused(f"torch.nn.init.{name}", f"for {key}")


def replicas_of(module: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks over which ``DistributedDataParallel`` may average a module's gradients.

    Args:
        module: to be wrapped; perhaps a sharded model, or with one inside.
        group: that the script gives; None for all ranks.

    Returns:
        ``group``, or instead of all ranks the sharded model's replicas.

    Raises:
        CuboidError: the module is a stage of a pipeline, or ``group`` has ranks with other shards.
    """
    inner: Any = next((x for x in module.modules() if isinstance(x, ShardedModel)), None)
    if inner is None:
        return group
    mesh: Mesh = inner.cuboid.mesh
    if isinstance(inner, StageModel):
        raise CuboidError(
            "DistributedDataParallel calls a model's forward, which a stage of a pipeline doesn't have: train it with "
            "deepspeed.initialize, cuboid.CuboidTrainer or cuboid.Pipeline"
        )
    if mesh.shape.size == 1:
        return group
    mesh.connect()
    replicas = mesh.data_parallel_group
    if group is not None:
        group_ranks = dist.get_process_group_ranks(group)
        wanted = dist.get_process_group_ranks(replicas) if mesh.topology.data > 1 else [mesh.rank]
        if group_ranks != wanted:
            raise CuboidError(
                f"DistributedDataParallel is given a process_group of ranks {group_ranks}, which have different shards "
                f"of the model: of a mesh of {mesh.shape} it may average those of ranks {wanted}. Leave it out"
            )
    return replicas


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Check, before an optimizer's first step, that it may be given the shards that it has, if it has some.

    Not needed of those that have been checked (:data:`cuboid.optim.elementwise.CHECKED`), as frameworks and
    :func:`cuboid.prepare_optimizer` do when they take theirs.

    Raises:
        OptimizerError: it needs whole tensors, can't be tried, or has parameters from before a model was sharded.
    """
    models = sharded_models()
    if not models:
        return
    groups = [group["params"] for group in optimizer.param_groups]
    seen = (*map(id, models), *map(len, groups))
    if _seen.get(optimizer) == seen:
        return
    parameters = {id(parameter): parameter for group in groups for parameter in group}
    for model in models:
        mesh: Mesh = model.cuboid.mesh
        trained = {id(parameter) for parameter in model.parameters()}
        former = model.cuboid.state.former
        others = [parameter for key, parameter in parameters.items() if key not in trained]
        if former is not None and any(map(former.names_of, others)):
            raise OptimizerError(
                f"{type(optimizer).__name__} has parameters of a model as they were before it was sharded, so that "
                "its steps would have no effect: make it of model.parameters() afterwards, or call "
                "cuboid.prepare_optimizer(model, optimizer)"
            )
        owned = OwnedShards.of(mesh)
        if owned.reason and not trained.isdisjoint(parameters) and check_optimizer(optimizer, owned) is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} needs whole tensors, but would step pieces: {owned.reason}. Call "
                "cuboid.prepare_optimizer(model, optimizer) before its first step, which gives it whole ones"
            )
    _seen[optimizer] = seen


@torch.no_grad()
def found_on_any_rank(optimizer: torch.optim.Optimizer, found_inf: dict[torch.device, torch.Tensor]) -> None:
    """Let all ranks of a replica know that one has found an infinite gradient, so that all skip the step. Collective.

    Args:
        optimizer: of a gradient scaler.
        found_inf: by device, 1 where a gradient of this rank isn't finite, else 0; changed in place.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = set(map(id, parameters))
    for model in sharded_models():
        mesh: Mesh = model.cuboid.mesh
        if len(mesh.copy_ranks) == 1 or ids.isdisjoint(map(id, model.parameters())):
            continue
        device = parameters[0].device
        values: Sequence[torch.Tensor] = list(found_inf.values())
        worst = torch.stack([x.to(device) for x in values]).max() if values else torch.zeros((), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, mesh.model_parallel_group)
        found_inf.setdefault(device, torch.zeros(1, device=device))
        for value in found_inf.values():
            value.fill_(worst)
