"""DeepSpeed's functions for whole tensors of a parameter, ``safe_get_full_grad`` and its kin, on a mesh.

They assemble what replicas have split, which on a mesh is this rank's shard. Here it becomes the tensor in the shape of
Hugging Face's parameter, and such a tensor becomes the shard again.
"""

from __future__ import annotations

from collections.abc import Callable

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


def changing_whole(
    name: str, update: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> Callable[[torch.Tensor, nn.Parameter], torch.Tensor]:
    """A function of a parameter's gradient that gives ``update`` the whole one, and returns this rank's part again.

    Args:
        name: of the function that it was given to, for errors.
        update: of a gradient and its parameter to the new gradient.
    """

    def of_part(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        whole_gradient = of_whole_parameter(parameter, gradient)
        assert whole_gradient is not None
        return of_shard(name, parameter, update(whole_gradient, parameter))

    return of_part


def check_not_local(name: str, parameter: nn.Parameter) -> None:
    """Check that a function for the partitions of ZeRO 3 isn't called for a parameter of a sharded model.

    Raises:
        CuboidError: it is.
    """
    if _place_of(parameter) is not None:
        raise CuboidError(
            f"{name} is for ZeRO 3, which a mesh goes without: a rank's part of a parameter is the parameter itself, "
            f"and of its gradient .grad. {name.replace('local', 'full')} takes whole tensors"
        )


def _place_of(parameter: nn.Parameter) -> tuple[ShardingSpec, Mesh] | None:
    for model in sharded_models():
        for module in model.modules():
            if isinstance(module, ShardedModule) and module.mesh.shape.size > 1:
                for name, param in module.sharded_params.items():
                    if module._parameters.get(name) is parameter:
                        return param.spec, module.mesh
    return None
