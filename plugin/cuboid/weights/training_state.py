"""Collect a model's training state for a checkpoint, and restore it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cuboid.checkpoint.loader import load_masters, load_optimizer
from cuboid.checkpoint.metadata import CheckpointMetadata, ShardedTensor, TensorMetadata
from cuboid.checkpoint.optimizer_state import OptimizerAdapter, OptimizerState
from cuboid.checkpoint.rng_state import capture, restore
from cuboid.checkpoint.save_plan import OPTIMIZER, SavePlan, WriteItem
from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.param_groups import GroupNames
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.weights.auxiliary_files import write_auxiliary_files
from cuboid.weights.load import read_weights
from cuboid.weights.state_dict_map import counted_here, model_items, sharded_tensor, sharding_specs, stored_parameters


def make_save_plan(
    model: nn.Module, adapter: OptimizerAdapter | None, *, step: int, document: Mapping[str, Any], weights: bool = True
) -> SavePlan:
    """This rank's part of a checkpoint; tensors are views of the model's and optimizer's own.

    Args:
        model: a sharded model, or an engine around one.
        adapter: of the optimizer, if it is to be saved.
        step: optimizer steps so far.
        document: for ``state.json``; see :mod:`cuboid.checkpoint.format.state_file`.
        weights: whether to include the weights and the files beside them.

    Raises:
        CheckpointError: the optimizer has state that a checkpoint can't hold.
    """
    inner: Any = unwrap(model)
    state = None if adapter is None else adapter.state()
    adapters = inner.cuboid.state.adapters if weights else None
    items = model_items(inner) if weights and adapters is None else []
    write = functools.partial(write_auxiliary_files, inner)
    if adapters is not None:
        # Small, and gathered at once, so that training may go on while they are written.
        write = functools.partial(adapters.write, inner, adapters.state(inner))
    if state is not None:
        items += _optimizer_items(inner, state)
    return SavePlan(
        step=step,
        items=tuple(items),
        optimizer=state,
        random=capture(_device(inner)),
        document={**document, "layout": describe_layout(inner)},
        auxiliary_files=write if weights else lambda _: None,
    )


def _optimizer_items(model: nn.Module, state: OptimizerState) -> list[WriteItem]:
    shardings, parameters = sharding_specs(model), counted_here(model)
    items = []
    for quantity, ranges in sorted(state.quantities.items()):
        for name, parameter in parameters.items():
            if name in state.whole_specs.get(quantity, ()):
                spec = state.whole_specs[quantity][name]
                # On the rank that has it; the range of the others is empty.
                items.append(WriteItem.plain(f"{OPTIMIZER}/{quantity}", ShardedTensor(name, spec, None, ranges[name])))
            elif name in ranges:
                shard = torch.empty(parameter.shape, dtype=ranges[name].values.dtype, device="meta")
                tensor = sharded_tensor(name, shard, shardings.get(name), ranges[name])
                items.append(WriteItem.plain(f"{OPTIMIZER}/{quantity}", tensor))
    return items


def describe_layout(model: nn.Module) -> dict[str, Any]:
    """Mesh, stages and replicas of a model, for ``cuboid inspect`` and human readers of ``state.json``."""
    inner: Any = unwrap(model)
    mesh = mesh_of(inner)
    layout: dict[str, Any] = {
        "world_size": mesh.topology.world_size,
        "mesh": {"batch": mesh.shape.batch, "sequence": mesh.shape.sequence, "hidden": mesh.shape.hidden},
        "stages": mesh.topology.pipe,
        "data_parallel": mesh.topology.data,
        "dtype": str(inner.dtype).removeprefix("torch."),
    }
    if isinstance(inner, StageModel):
        layout["layers"] = list(inner.staging.plan.layout.counts)
        if len(mesh.placement) > mesh.topology.pipe:
            layout["placement"] = list(mesh.placement)
    return layout


def load_model(model: nn.Module, folder: Path) -> None:
    """Load the weights of a Hugging Face checkpoint into a sharded model. Collective over the world.

    Raises:
        CheckpointError: on every rank, if any of them can't read its part. Other ranks may have loaded theirs by then.
    """
    inner: Any = unwrap(model)
    if inner.cuboid.state.adapters is not None:
        run_on_all_ranks(
            lambda: inner.cuboid.state.adapters.load(inner, folder), mesh_of(inner), what=f"load of {folder.name}"
        )
        return
    shards = {name: x for name, x in local_state(inner).items() if isinstance(x, torch.Tensor)}

    def load() -> None:
        read = read_weights(inner, folder)
        # All shapes are checked before the first weight is changed.
        for name, target in shards.items():
            source = read.get(name)
            if source is None or source.shape != target.shape:
                difference = "nothing" if source is None else f"a tensor of shape {list(source.shape)}"
                raise CheckpointError(
                    f"{folder}: for rank {inner.cuboid.mesh.rank}'s part of {name}, of shape {list(target.shape)}, "
                    f"it has {difference}; is it of another model?"
                )
        with torch.no_grad():
            for name, target in shards.items():
                target.copy_(read[name])

    run_on_all_ranks(load, mesh_of(inner), what=f"load of {folder.name}")


def load_training(
    model: nn.Module, adapter: OptimizerAdapter, checkpoint: CheckpointMetadata, groups: GroupNames
) -> None:
    """Restore an optimizer's state; parameters in float32 get the checkpoint's master weights. Collective.

    Args:
        model: a sharded model, or an engine around one.
        adapter: of its optimizer.
        checkpoint: as opened.
        groups: names of the parameters, on all stages, of each of the optimizer's groups.

    Raises:
        CheckpointError: on every rank; see :func:`cuboid.checkpoint.loader.load_optimizer`.
    """
    inner: Any = unwrap(model)
    mesh, parameters = mesh_of(inner), stored_parameters(inner)
    shardings = sharding_specs(inner)
    tensors = {}
    for name, parameter in parameters.items():
        sharding = shardings.get(name)
        tensors[name] = TensorMetadata(tuple(parameter.shape) if sharding is None else sharding.shape, sharding)

    def load() -> None:
        with torch.no_grad():
            wide = {name: p for name, p in parameters.items() if p.dtype == torch.float32}
            load_masters(checkpoint, wide, tensors, mesh)
            load_optimizer(checkpoint, adapter, tensors, mesh, groups)

    run_on_all_ranks(load, mesh, what="load of the optimizer's state")


def restore_random(model: nn.Module, checkpoint: CheckpointMetadata) -> None:
    """Restore this rank's random states from the rank that had the same place when the checkpoint was written.

    On another layout, places that didn't exist are mapped to existing ones: beyond the last stage to the last, beyond
    the last replica or mesh rank modulo their number. A replica that existed keeps its stream of random numbers.
    """
    inner: Any = unwrap(model)
    mesh = mesh_of(inner)
    saved: list[dict[str, Any]] = checkpoint.document["random"]
    sizes = {axis: max(state[axis] for state in saved) + 1 for axis in ("pipe", "data", "mesh")}
    places = {
        "pipe": min(mesh.coordinate.pipe, sizes["pipe"] - 1),
        "data": mesh.coordinate.data % sizes["data"],
        "mesh": mesh.mesh_ranks.index(mesh.rank) % sizes["mesh"],
    }
    nearest = next(state for state in saved if all(state[axis] == place for axis, place in places.items()))
    restore(nearest["state"], _device(inner))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
