"""Whole tensors out of a sharded model, and with them an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from cuboid.hf.attention import PREFIX
from cuboid.hf.model import mesh_of, unwrap
from cuboid.mesh import Mesh
from cuboid.tensor3d.layout import Layout, put_shard
from cuboid.tensor3d.parameter import ShardedModule


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Layout]]:
    """Every parameter of a sharded model with its Hugging Face name and layout, tied ones once for each name."""
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, gather in module.gathers.items():
                yield f"{prefix}.{name}", getattr(module, name), gather.layout


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers whole, on the CPU of the first rank of each mesh; ``{}`` on the others.

    All ranks of the mesh must call it.
    """
    inner = unwrap(model)
    state = _whole_tensors(inner, lambda parameter: parameter.detach())
    if state:
        state.update({name: x.cpu() for name, x in inner.state_dict().items() if name not in state})
    return state


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """All gradients whole, like :func:`full_state_dict`; a parameter without one is left out on every rank."""
    return _whole_tensors(unwrap(model), lambda parameter: parameter.grad)


def save_sharded(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
    is_main_process: bool | None = None,
    **kwargs: Any,
) -> None:
    """Write a checkpoint that plain transformers opens.

    All ranks of the mesh call it and rank 0 writes; unless ``state_dict`` holds whole tensors already (or nothing, on
    the ranks that were given nothing), as trainers hand over: the rank that has it writes without asking the others.

    Args:
        model: the sharded model.
        directory: where the checkpoint goes.
        state_dict: whole tensors, or one rank's shards, which are ignored for the model's own.
        is_main_process: whether this rank writes; by default rank 0 does.
        kwargs: handed to ``PreTrainedModel.save_pretrained``.
    """
    mesh = mesh_of(model)
    writes = mesh.rank == 0 if is_main_process is None else is_main_process
    if state_dict is not None and _is_whole(model, state_dict):
        if writes and state_dict:
            _save_as_own_class(model, directory, state_dict, kwargs)
        return
    state = full_state_dict(model)
    if mesh.rank == 0:
        _save_as_own_class(model, directory, state, kwargs)
    if mesh.topology.world_size > 1:
        dist.barrier()


def _save_as_own_class(model: Any, directory: str | Path, state: dict[str, torch.Tensor], kwargs: Any) -> None:
    # The base class writes the file; for that time the config must not name the twin of its attention.
    base = model.cuboid.base
    implementation = model.config._attn_implementation
    model.config._attn_implementation = implementation.removeprefix(PREFIX)
    try:
        base.save_pretrained(model, directory, is_main_process=True, state_dict=state, **kwargs)
    finally:
        model.config._attn_implementation = implementation


def _is_whole(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    shapes = {name: layout.shape for name, _, layout in sharded_parameters(model)}
    return all(tuple(state[name].shape) == shape for name, shape in shapes.items() if name in state)


def _whole_tensors(
    model: nn.Module, value_of: Callable[[nn.Parameter], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    mesh = mesh_of(model)
    mesh.connect()
    state: dict[str, torch.Tensor] = {}
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter, layout in sharded_parameters(model):
        shard = value_of(parameter)
        if shard is None:
            continue
        tied_to = first_names.setdefault(parameter, name)
        whole = _collect(shard, layout, mesh) if tied_to == name else state.get(tied_to)
        if whole is not None:
            state[name] = whole
    return state


def _collect(shard: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor | None:
    """The whole tensor on the first rank of the mesh, one tensor in flight at a time."""
    shard = shard.contiguous()
    peers = _peers(mesh)
    if len(peers) == 1:
        shards: list[torch.Tensor] | None = [shard]
    else:
        shards = [torch.empty_like(shard) for _ in peers] if mesh.rank == peers[0] else None
        dist.gather(shard, shards, dst=peers[0], group=mesh.model_parallel_group)
    if shards is None:
        return None
    whole = torch.empty(layout.shape, dtype=shard.dtype, device="cpu")
    for rank, piece in zip(peers, shards, strict=True):
        put_shard(whole, piece.cpu(), layout, mesh.shape, mesh.topology.coordinate(rank))
    return whole


def _peers(mesh: Mesh) -> list[int]:
    return next(ranks for ranks in mesh.topology.groups(("batch", "sequence", "hidden")) if mesh.rank in ranks)
