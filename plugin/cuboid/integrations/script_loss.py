"""What a script adds to a loss from parameters themselves, such as a penalty, where each rank has shards of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import all_reduce
from cuboid.distributed.mesh import AxisGroup
from cuboid.distributed.topology import AXES
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.autograd_graph import IS_COPY, IS_OUTPUT, graph_of
from cuboid.models.sharded.sharded_model import copy_refused, sharded_models, sharding_of, unwrap
from cuboid.tensor3d.sharding.sharded_param import is_recomputing
from cuboid.weights.state_dict_map import sharding_specs


def check_backward(outputs: Any, inputs: Any = None) -> None:
    """Check what a script gives to ``torch.autograd.backward`` or ``grad``: losses, and what is differentiated by.

    Raises:
        UnsupportedModelError: a loss is computed from shards as if they were parameters, or an input is a copy from
            which the model hasn't gone on.
    """
    if is_recomputing():
        return  # reentrant checkpointing, inside a backward that was looked at
    for loss in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        node = getattr(loss, "grad_fn", None)
        # In most steps the loss is a model's own.
        if node is not None and IS_OUTPUT not in node.metadata:
            _check_loss(loss)
    if inputs is None:
        return
    for x in (inputs,) if isinstance(inputs, torch.Tensor) else inputs.values() if isinstance(inputs, dict) else inputs:
        node = getattr(x, "grad_fn", None)
        if node is not None and IS_COPY in node.metadata:
            raise copy_refused()


def _check_loss(loss: torch.Tensor) -> None:
    cut = [model for model in sharded_models() if model.cuboid.state.made.is_cut]
    nodes = graph_of(loss, of_script=True) if cut else []
    used = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    names = [name for model in cut for name, x in model.named_parameters() if id(x) in used] if used else []
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        raise UnsupportedModelError(
            f"the loss is computed from {names[0]}{others} itself, of which this rank has a shard: its value would be "
            "another on each rank. A sum over elements, such as a penalty, becomes that of whole parameters by "
            "cuboid.sum_over_shards(model, function); weight decay is the optimizer's; other functions of a whole "
            "parameter need a plain model"
        )


def sum_over_shards(model: nn.Module, function: Callable[[str, torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    """A sum over elements of whole parameters, with gradients, of which each rank computes its shards' part.

    ``cuboid.sum_over_shards(model, lambda name, shard: shard.square().sum())`` is the squared norm of all parameters,
    and ``.sqrt()`` of it the norm. Collective: all ranks of a mesh call it.

    Args:
        model: a sharded model, or an engine that wraps one.
        function: called with each parameter's name and this rank's elements of it, which have the parameter's number of
            dims; returns a sum over elements, with ``None`` for a parameter that isn't counted. What isn't such a sum,
            like the norm of a matrix, has no meaning here.

    Raises:
        CuboidError: the model isn't sharded, or is a stage of a pipeline, which has no loss of a script.
    """
    mesh = sharding_of(model).mesh
    if mesh.topology.pipe > 1:
        raise CuboidError(
            "sum_over_shards: a pipeline takes its model's own loss, and a stage has only some of the parameters; use "
            "a mesh without stages, or the optimizer's weight_decay"
        )
    mesh.connect()
    inner = unwrap(model)
    specs = sharding_specs(inner)
    sharded_sum = unsharded_sum = torch.zeros((), device=next(inner.parameters()).device)
    for name, parameter in inner.named_parameters():
        spec = specs.get(name)
        if spec is None:
            value = function(name, parameter)
            unsharded_sum = unsharded_sum if value is None else unsharded_sum + value
        else:
            # Without the rows that make shards equally long.
            rows = sum(stop - start for start, stop in spec.shard_intervals(mesh.shape, mesh.coordinate)[0])
            value = function(name, parameter[:rows])
            sharded_sum = sharded_sum if value is None else sharded_sum + value
    summed: torch.Tensor = _SumOverShards.apply(sharded_sum, mesh.along(*AXES))
    return summed + unsharded_sum


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        return all_reduce(value.clone(), along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # All ranks have the same loss, in which each rank's part of the sum has the sum's own gradient.
        return gradient, None
