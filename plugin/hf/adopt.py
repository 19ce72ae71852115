"""A model that a framework is handed, whole or sharded already, with the optimizer that knows its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cuboid.config import CuboidConfig
from cuboid.errors import ConfigError, CuboidError
from cuboid.hf.api import shard
from cuboid.hf.model import ShardedModel, mesh_of
from cuboid.hf.stage_model import StageModel


def adopt_model(model: Any, config: CuboidConfig, *, optimizer: Any = None, parameters: Any = None) -> tuple[Any, Any]:
    """Shard a model, unless it is, and let what was made for its whole parameters have the new ones.

    Args:
        model: a causal language model of transformers, perhaps from a :func:`cuboid.scope`.
        config: which it is to be sharded by, or was.
        optimizer: made for the model's parameters; a ``torch.optim.Optimizer`` is changed in place, and parameters of
            other stages leave its groups, which stay though they may be empty. Anything else is left alone.
        parameters: some of the model's parameters or groups of them, for an optimizer to come; perhaps a generator.

    Returns:
        The sharded model, and the parameters with those of other stages left out.

    Raises:
        ConfigError, MeshError, UnsupportedModelError: the model can't be sharded so, or is sharded otherwise.
        CuboidError: the optimizer has a state already.
    """
    if isinstance(model, ShardedModel):
        _check_same(model, config)
        return model, parameters
    has_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    if has_optimizer and optimizer.state:
        raise CuboidError("the optimizer has state for whole parameters; make it after the model is sharded")
    # If nobody names parameters, the whole tensors needn't be kept until all are sharded.
    names_some = isinstance(model, nn.Module) and (has_optimizer or parameters is not None)
    named = dict(model.named_parameters()) if names_some else {}
    model = shard(model, config)
    new = dict(model.named_parameters())
    replaced = {id(parameter): new.get(name) for name, parameter in named.items()}
    if parameters is not None:
        parameters = _remap(parameters, replaced)
    if has_optimizer:
        for group in optimizer.param_groups:
            group["params"] = _remap(group["params"], replaced)
    return model, parameters


def check_trains(model: nn.Module) -> None:
    """Make sure that there is something to train, and what stages share is trained or frozen; collective.

    Raises:
        ConfigError: on every rank, where all parameters of all stages are frozen, or one on one of two stages only.
    """
    mesh = mesh_of(model)
    shared = model.staging.shared if isinstance(model, StageModel) else {}
    tied = {name: parameter.requires_grad for name, parameter in shared.items()}
    own = (any(parameter.requires_grad for parameter in model.parameters()), tied)
    stages = [own] * mesh.topology.pipe
    if len(stages) > 1:
        dist.all_gather_object(stages, own, group=mesh.pipe_group)
    for name, trained in stages[0][1].items():
        if stages[-1][1][name] != trained:
            raise ConfigError(
                f"{name} is tied to a parameter of the last stage, and is {'trained' if trained else 'frozen'} on the "
                "first stage only; let both have the same requires_grad"
            )
    if not any(trains for trains, _ in stages):
        raise ConfigError(
            "every parameter is frozen (requires_grad is False), so that there is nothing to train; leave out the "
            "optimizer to evaluate only, or let some parameters have gradients"
        )


def trained_groups(parameters: list[Any]) -> list[Any]:
    """Parameters, or groups of them, without the groups in which all parameters are frozen."""
    if parameters and isinstance(parameters[0], dict):
        return [group for group in parameters if any(p.requires_grad for p in group["params"])]
    return parameters if any(p.requires_grad for p in parameters) else []


def _check_same(model: Any, config: CuboidConfig) -> None:
    mesh, wanted = mesh_of(model), config.tensor_parallel.mesh
    if wanted != "auto" and mesh.shape != wanted.shape:
        raise ConfigError(f"the model is sharded over {mesh.shape}, but tensor_parallel.mesh is {wanted.shape}")
    if isinstance(model, StageModel) != (config.pipeline is not None) or mesh.topology.pipe != config.stages:
        raise ConfigError(
            f"the model is cut into {mesh.topology.pipe} pipeline stages, but the config has {config.stages}; load "
            "it with the same config"
        )


def _remap(parameters: Any, replaced: dict[int, nn.Parameter | None]) -> Any:
    """The same parameters, or groups of them, after the model was sharded; those of other stages are left out."""
    if isinstance(parameters, GeneratorType):
        # Not run yet, so it may walk through the new modules or the old parameters: either way the map knows.
        parameters = list(parameters)
    if isinstance(parameters, dict):
        return {key: _remap(value, replaced) if key == "params" else value for key, value in parameters.items()}
    if isinstance(parameters, nn.Parameter):
        return replaced.get(id(parameters), parameters)
    if isinstance(parameters, Iterable):
        remapped = [_remap(parameter, replaced) for parameter in parameters]
        return [entry for entry in remapped if entry is not None and not _is_empty_group(entry)]
    raise CuboidError(f"model_parameters holds a {type(parameters).__name__}; give parameters or groups of them")


def _is_empty_group(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("params"), list) and not entry["params"]
