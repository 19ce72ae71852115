"""DeepSpeed's functions for whole tensors of a parameter, ``safe_get_full_grad`` and its kin, on a mesh.

They assemble what replicas have split, which on a mesh is this rank's shard. Here it becomes the tensor in the shape of
Hugging Face's parameter, and such a tensor becomes the shard again.
"""

from __future__ import annotations

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.sharded.sharded_model import sharded_models
from cuboid.tensor3d.sharding.full_params import full_tensor
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard


def of_whole_parameter(parameter: nn.Parameter, value: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of a parameter's shape on this rank as that of the whole parameter, on all ranks of its mesh.

    Collective over the mesh. Returned as it is: what isn't a shard's, and state of another shape, such as a count.
    """
    place = _place_of(parameter)
    if place is None or value is None or value.numel() != parameter.numel():
        return value
    spec, mesh = place
    mesh.connect()
    return full_tensor(value.detach().view_as(parameter), spec, mesh)


def of_shard(name: str, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the whole parameter; a tensor of the shard's shape is taken for that part.

    Args:
        name: of the function that was called, for errors.
        parameter: a parameter, perhaps a shard.
        value: the tensor.

    Raises:
        CuboidError: it has another shape.
    """
    place = _place_of(parameter)
    if place is None:
        return value
    spec, mesh = place
    if value.shape == torch.Size(spec.shape):
        return take_shard(value, spec, mesh)
    if value.shape == parameter.shape:
        return value
    raise CuboidError(
        f"{name}: the value has the shape {tuple(value.shape)}; the parameter has {tuple(spec.shape)}, of which this "
        f"rank of the mesh has a shard of {tuple(parameter.shape)}"
    )


def _place_of(parameter: nn.Parameter) -> tuple[ShardingSpec, Mesh] | None:
    for model in sharded_models():
        for module in model.modules():
            if isinstance(module, ShardedModule) and module.mesh.shape.size > 1:
                for name, param in module.sharded_params.items():
                    if module._parameters.get(name) is parameter:
                        return param.spec, module.mesh
    return None
