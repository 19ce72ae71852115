"""The ways to bring a checkpoint onto ranks: Cuboid's two, and two that everybody can use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import cuboid
from cuboid.distributed.topology import MeshShape

_DTYPE = torch.float32


@dataclass(frozen=True)
class Way:
    """One way to load.

    Args:
        name: of the table's row.
        load: gives the model, given the checkpoint.
        owned: whether every number of the model has one owner among the ranks.
        everywhere: whether every rank holds the whole model at some time.
    """

    name: str
    load: Callable[[Path], PreTrainedModel]
    owned: bool = True
    everywhere: bool = False


def ways(ranks: int) -> dict[str, Way]:
    """All ways on so many ranks, by name; the first one is what others are compared with."""
    cube = {4: "1x2x2", 8: "2x2x2"}[ranks]
    rows = f"{ranks}x1x1"
    found = [
        Way(f"Cuboid {MeshShape.parse(cube)}", lambda path: cuboid.from_pretrained(path, _mode(cube), dtype=_DTYPE)),
        Way(f"Cuboid {MeshShape.parse(rows)}", lambda path: cuboid.from_pretrained(path, _mode(rows), dtype=_DTYPE)),
        Way("whole, then cuboid.shard", lambda path: _whole_then_shard(path, cube), everywhere=True),
        Way('transformers, tp_plan="auto"', _tensor_parallel, owned=False),
        Way("FSDP2, broadcast from rank 0", _fsdp),
    ]
    return {way.name: way for way in found}


def _mode(mesh: str) -> dict[str, Any]:
    shape = MeshShape.parse(mesh)
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    return {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}


def _whole_then_shard(path: Path, mesh: str) -> PreTrainedModel:
    return cuboid.shard(AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE), _mode(mesh))


def _tensor_parallel(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=_DTYPE,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"),
    )


def _fsdp(path: Path) -> PreTrainedModel:
    """The recipe of PyTorch's tutorial: rank 0 has the whole state, and broadcasts it tensor by tensor."""
    state: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        state = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE).state_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=_DTYPE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    _compute_buffers(model)
    return model


def _compute_buffers(model: PreTrainedModel) -> None:
    """Those that no checkpoint has: the frequencies of the rotary embedding."""
    rotary = model.model.rotary_emb
    fresh = type(rotary)(model.config)
    for name, buffer in fresh.named_buffers():
        setattr(rotary, name, buffer)


def touch(model: PreTrainedModel) -> None:
    """Read every weight of this rank once: of a mapped file nothing has been read before that."""
    for parameter in model.parameters():
        weight = parameter.detach()
        (weight.to_local() if isinstance(weight, DTensor) else weight).sum()


def loss_and_norm(model: PreTrainedModel, ids: torch.Tensor, way: Way) -> tuple[float, float]:
    """Loss of a batch that all ranks have, and the norm of its gradient. Collective."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor() if not way.owned else gradient.to_local()
        squares += gradient.double().square().sum()
    if way.owned and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return loss.item(), squares.sqrt().item()
