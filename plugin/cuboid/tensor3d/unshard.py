"""Parameters that stay unsharded over several multiplications, and whose gradient is reduced once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from cuboid.distributed.topology import Axis, MeshShape
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class _Unsplit(ShardingSpec):
    """Of a tensor that each rank has to itself, so that there is nothing to gather or to reduce."""

    @cached_property
    def fsdp_axes(self) -> tuple[Axis, ...]:
        """None."""
        return ()

    def block_shape(self, mesh: MeshShape) -> tuple[int, ...]:  # noqa: ARG002
        """All of it."""
        return self.shape


class UnshardedParam:
    """A parameter in whose place its module has the unsharded one, for as long as :func:`unshard_modules` says.

    Args:
        parameter: the shard, or a parameter that isn't sharded.
        block: what stands in its place: a leaf of autograd, of the dtype in which it is multiplied.
        param: of the shard; None where it isn't one.
    """

    def __init__(self, parameter: nn.Parameter, block: nn.Parameter, param: ShardedParam | None) -> None:
        self.parameter, self.block = parameter, block
        self._param = param
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, *, alone: bool) -> None:
        """Take in the block's gradient of one multiplication. ``alone``: there is no other one."""
        if self._sum is not None:
            self._sum += gradient
        elif alone:
            self._sum = gradient
        else:
            # In float32 at least, as one product of everything would be added up before it is rounded.
            self._sum = gradient.to(statistics_dtype(gradient.dtype), copy=True)

    def gradient(self) -> torch.Tensor | None:
        """Of the parameter, from all that was added; None if nothing was, or if more is to come.

        Collective, and only once.
        """
        if self._sum is None:
            return None
        total: torch.Tensor | None = self._sum.to(self.block.dtype)
        self._sum = None
        if self._param is not None and total is not None:
            total = self._param.reduce_scatter(total)
        return None if total is None else total.to(self.parameter.dtype)


@contextmanager
def unshard_modules(modules: Iterable[nn.Module]) -> Iterator[list[UnshardedParam]]:
    """Give modules their blocks in place of their own parameters, for the time of a ``with``.

    Multiplications inside don't unshard, and leave gradients with the blocks. Collective where a parameter is sharded
    over several ranks. Enter it inside the autocast that the modules run in.
    """
    with ExitStack() as stack:
        yield [
            stack.enter_context(_unsharded(module, name, parameter))
            for module in modules
            for name, parameter in list(module.named_parameters(recurse=False))
        ]


@contextmanager
def _unsharded(module: nn.Module, name: str, parameter: nn.Parameter) -> Iterator[UnshardedParam]:
    if not isinstance(module, ShardedModule):
        with _in_place_of(module, name, parameter, parameter.detach()) as block:
            yield UnshardedParam(parameter, block, None)
        return
    param = module.sharded_params[name]
    if param.optimizer_steps is not None:
        param.set_parameter(parameter)
    shard = parameter.detach().to(_multiplied_in(module, name, parameter))
    with param.unshard(shard) as gathered, _in_place_of(module, name, parameter, gathered) as block:
        _set_sharded_param(module, name, ShardedParam(_unsplit(block), param.mesh))
        try:
            yield UnshardedParam(parameter, block, param)
        finally:
            _set_sharded_param(module, name, param)


@contextmanager
def _in_place_of(module: nn.Module, name: str, parameter: nn.Parameter, values: torch.Tensor) -> Iterator[nn.Parameter]:
    block = nn.Parameter(values, requires_grad=parameter.requires_grad)
    module.register_parameter(name, block)
    try:
        yield block
    finally:
        module.register_parameter(name, parameter)


def _multiplied_in(module: ShardedModule, name: str, parameter: nn.Parameter) -> torch.dtype:
    """Sharded linear layers unshard their weight in the dtype of autocast."""
    is_multiplied = isinstance(module, ShardedLinear) and name == "weight"
    return autocast_dtype(parameter) if is_multiplied else parameter.dtype


def _unsplit(block: torch.Tensor) -> _Unsplit:
    return _Unsplit(tuple(block.shape), ((),) * block.dim())


def _set_sharded_param(module: ShardedModule, name: str, param: ShardedParam) -> None:
    module.sharded_params[name] = param
    if isinstance(module, ShardedLinear) and name == "weight":
        module.product = replace(module.product, weight=param)
