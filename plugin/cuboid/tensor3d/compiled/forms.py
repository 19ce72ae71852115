"""What the modules of a compiled layer run in place of their own forwards: the same equations, in traceable operations.

The eager forwards start collectives early, keep what is in flight in Python objects, and write products into buffers.
Nothing of that can be in a graph, and none of it needs to be: a compiler orders a graph's operations by itself. So each
class has a subclass here, which has the same parameters and specs, and which a module becomes while its layer is
compiled (:mod:`.layers`). Blocks over ``fsdp_axes`` are given from outside (:mod:`.blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.compiled.collectives import gather, scatter, sum_over
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.layers.dropout import MeshDropout, ShardedDropout
from cuboid.tensor3d.layers.fused_projections import FusedProjections
from cuboid.tensor3d.layers.input_gather import GatherFeatures, GatherSequence, InputGather
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype
from cuboid.tensor3d.layers.norm import HeadsRMSNorm, ShardedLayerNorm, ShardedRMSNorm, statistics_dtype
from cuboid.tensor3d.layers.output_reduce import (
    OutputReduce,
    ScatterFeatures,
    ScatterSequence,
    SelectHeads,
    SumFeatures,
)
from cuboid.tensor3d.layers.unsharded_module import UnshardedModule
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


def block_of(module: ShardedModule, name: str) -> torch.Tensor:
    """A parameter's block, which is there before the layer runs."""
    parameter: torch.Tensor = module._parameters[name]  # type: ignore[assignment]
    return parameter if module.sharded_params[name].ranks == 1 else module.prefetched_params[name]


class CompiledLinear(ShardedLinear):
    """:class:`ShardedLinear` in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the table in :mod:`cuboid.tensor3d.layers.linear_op`."""
        dtype = autocast_dtype(x)
        weight = self.product.out_in(block_of(self, "weight"))
        multiply = rowwise.linear if self.product.is_fp8 else nn.functional.linear
        y = multiply(_gathered(x.to(dtype), self._linear_op.input_gather), weight)
        y = _reduced(y, self.product.output_reduce)
        if self.bias is None:
            return y
        bias = block_of(self, "bias").to(dtype)
        return y + (bias if self.bias_rows is None else bias[self.bias_rows])


def _gathered(x: torch.Tensor, input_gather: InputGather) -> torch.Tensor:
    if isinstance(input_gather, GatherFeatures):
        return gather(x, -1, input_gather.along)
    return gather(x, SEQUENCE_DIM, input_gather.along) if isinstance(input_gather, GatherSequence) else x


def _reduced(y: torch.Tensor, output_reduce: OutputReduce) -> torch.Tensor:
    """Partial sums to the rank's own piece of the sums."""
    if isinstance(output_reduce, ScatterSequence):
        return scatter(y, SEQUENCE_DIM, output_reduce.along)
    if isinstance(output_reduce, ScatterFeatures):
        (parts,), along = output_reduce.parts, output_reduce.along
        if parts > 1 and along.size > 1:
            # Each rank has a piece of every part: [..., parts, ranks, n] -> [..., ranks, parts, n]
            y = y.unflatten(-1, (parts, along.size, -1)).transpose(-3, -2).flatten(-3)
        return scatter(y, -1, along)
    if isinstance(output_reduce, SelectHeads):
        heads = sum_over(y, output_reduce.along).unflatten(-1, (output_reduce.heads, output_reduce.head_dim))
        return torch.cat([heads[..., head, :] for head in output_reduce.keep], -1)
    return sum_over(y, output_reduce.along) if isinstance(output_reduce, SumFeatures) else y


class CompiledRMSNorm(ShardedRMSNorm):
    """:class:`ShardedRMSNorm` in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H/h]`` to ``[..., H/h]``."""
        weight = None if self.weight is None else block_of(self, "weight")
        y = _rms_norm(x, weight, self.eps, self.offset, self._along, x.shape[-1] * self._along.size, None)
        return y if self.bias is None else y + block_of(self, "bias")


class CompiledHeadsRMSNorm(HeadsRMSNorm):
    """:class:`HeadsRMSNorm` in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., own heads · head dim]`` to the same shape."""
        weight = block_of(self, "weight")
        weight = weight if self.rows is None else weight[self.rows]
        return _rms_norm(x, weight, self.eps, self.offset, self._along, self._features, self.copies)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    along: AxisGroup,
    features: int,
    copies: torch.Tensor | None,
) -> torch.Tensor:
    wide = x.to(statistics_dtype(x.dtype))
    # A feature that several ranks have counts once in the sum.
    terms = wide.pow(2) if copies is None else wide.pow(2) / copies
    normed = wide * torch.rsqrt(sum_over(terms.sum(-1, keepdim=True), along) / features + eps)
    if weight is None:
        return normed.to(x.dtype)
    # Llama casts before it scales, Gemma (offset 1) scales before it casts.
    return ((offset + weight.to(wide.dtype)) * normed).to(x.dtype) if offset else weight * normed.to(x.dtype)


class CompiledLayerNorm(ShardedLayerNorm):
    """:class:`ShardedLayerNorm` in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H/h]`` to ``[..., H/h]``."""
        wide, along = x.to(statistics_dtype(x.dtype)), self._along
        features = x.shape[-1] * along.size
        mean = sum_over(wide.sum(-1, keepdim=True), along) / features
        centred = wide - mean
        # The squares of what is left: E[x²] - E[x]² would suffer from cancellation.
        variance = sum_over(centred.pow(2).sum(-1, keepdim=True), along) / features
        y = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            weight = block_of(self, "weight")
            y = y * (self.offset + weight if self.offset else weight)
        return (y if self.bias is None else y + block_of(self, "bias")).to(x.dtype)


class CompiledUnsharded(UnshardedModule):
    """:class:`UnshardedModule` in a graph."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the template's forward."""
        parameters = {name: block_of(self, name) for name in self.sharded_params}
        return torch.func.functional_call(self._template[0], parameters, args, kwargs)


class CompiledDropout(ShardedDropout):
    """:class:`ShardedDropout` in a graph, where it must have nothing to drop: see :func:`.layers.CompiledLayers`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[...]`` to ``[...]``."""
        return nn.functional.dropout(x, self.p, training=self.training)


class CompiledProjections:
    """A forward pre-hook in a graph, in place of :class:`FusedProjections`: it gathers the block's input."""

    def __init__(self, fused: FusedProjections) -> None:
        self.fused = fused
        self._gather = fused.input_gather

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input ``[B/b, S/s, H/h]`` by the gathered one, ``[B/b, S, H/h]``."""
        shard = args[0] if args else kwargs["hidden_states"]
        full = _gathered(shard.to(autocast_dtype(shard)), self._gather)
        return ((full, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": full})


#: What modules become; those of other sharded classes have no form in a graph.
_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    ShardedLinear: CompiledLinear,
    ShardedRMSNorm: CompiledRMSNorm,
    HeadsRMSNorm: CompiledHeadsRMSNorm,
    ShardedLayerNorm: CompiledLayerNorm,
    UnshardedModule: CompiledUnsharded,
    ShardedDropout: CompiledDropout,
}
#: Attribute of a class that draws with seeds of a mesh: the class whose code it is. Graphs that draw are refused.
UNDRAWN = "cuboid_undrawn"


def form_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that modules of a class become; None if they have no form in a graph."""
    cls = getattr(cls, UNDRAWN, cls)
    if cls in _FORMS:
        return _FORMS[cls]
    return None if issubclass(cls, ShardedModule | MeshDropout) else cls
