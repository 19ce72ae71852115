"""Parameters that stay unsharded over several multiplications, and whose gradient is reduced once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis, MeshShape
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype, head_product
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class _Unsplit(ShardingSpec):
    """The spec of a block that is unsharded already: nothing to gather or to reduce."""

    @cached_property
    def fsdp_axes(self) -> tuple[Axis, ...]:
        """No axes."""
        return ()

    def block_shape(self, mesh: MeshShape) -> tuple[int, ...]:  # noqa: ARG002
        """The whole shape."""
        return self.shape


def unsplit_head(weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh) -> ShardedLinear:
    """A head of some rows of a block ``[V', H/h]``, with nothing to gather or to reduce but activations."""
    parameters = {"weight": weight, "bias": bias}
    specs: dict[str, ShardingSpec] = {
        name: _unsplit(parameter) for name, parameter in parameters.items() if parameter is not None
    }
    rows, width = weight.shape
    head = ShardedLinear(weight, bias, mesh=mesh, specs=specs, in_features=width, out_features=rows)
    head.configure(head_product(head.sharded_params["weight"]), gathers_sequence=True)
    return head


class UnshardedParam:
    """A parameter that an unsharded block replaces in its module, inside :func:`unshard_modules`.

    ``block`` is a leaf of autograd in the dtype of the multiplication. For a parameter that isn't sharded, ``param`` is
    None.
    """

    def __init__(self, parameter: nn.Parameter, block: nn.Parameter, param: ShardedParam | None) -> None:
        self.parameter, self.block = parameter, block
        self._param = param
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, *, alone: bool) -> None:
        """Add the block's gradient of one multiplication; ``alone`` says that there are no others to sum."""
        if self._sum is not None:
            self._sum += gradient
        elif alone:
            self._sum = gradient
        else:
            # In float32 at least: a single product of everything would round only its sum, too.
            self._sum = gradient.to(statistics_dtype(gradient.dtype), copy=True)

    def gradient(self) -> torch.Tensor | None:
        """The parameter's gradient, from all that was added; None if nothing was, or if the step's sum isn't complete.

        Collective; call it once.
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
    """Inside a ``with``, modules have unsharded blocks in place of their own parameters.

    Multiplications inside don't unshard, and their gradients are those of the blocks. Collective where a parameter is
    sharded over several ranks. Enter it inside the autocast that the modules run in.
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
        # It may be a tensor that `torch.func.functional_call` has put in the parameter's place.
        module._parameters[name] = parameter


def _multiplied_in(module: ShardedModule, name: str, parameter: nn.Parameter) -> torch.dtype:
    """The dtype to unshard in: autocast's for a sharded linear layer's weight, else the parameter's own."""
    is_multiplied = isinstance(module, ShardedLinear) and name == "weight"
    return autocast_dtype(parameter) if is_multiplied else parameter.dtype


def _unsplit(block: torch.Tensor) -> _Unsplit:
    return _Unsplit(tuple(block.shape), ((),) * block.dim())


def _set_sharded_param(module: ShardedModule, name: str, param: ShardedParam) -> None:
    module.sharded_params[name] = param
    if isinstance(module, ShardedLinear) and name == "weight":
        module.product = replace(module.product, weight=param)
