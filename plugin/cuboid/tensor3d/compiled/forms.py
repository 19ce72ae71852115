"""What the modules of a compiled layer run in place of their own forwards: the same equations, in traceable operations.

The eager forwards start collectives early, keep what is in flight in Python objects, and write products into buffers.
Nothing of that can be in a graph, and none of it needs to be: a compiler orders a graph's operations by itself. So each
class has a subclass here or in :mod:`.mixtures`, which has the same parameters and specs, and which a module becomes
while its layer is compiled (:mod:`.layers`). Blocks over ``fsdp_axes`` are given from outside (:mod:`.blocks`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, own_slice
from cuboid.distributed.mesh import AxisGroup, Mesh
from cuboid.tensor3d.compiled.blocks import block_of
from cuboid.tensor3d.compiled.collectives import (
    gather,
    part,
    scatter,
    scatter_parts,
    sum_over,
    whole,
)
from cuboid.tensor3d.compiled.draws import GraphSeeds
from cuboid.tensor3d.compiled.fp8_products import Fp8Call, Rounded, multiply, round_and_gather
from cuboid.tensor3d.compiled.hooks import gathered
from cuboid.tensor3d.compiled.mixtures import CompiledExperts, CompiledRouter, CompiledScaledExperts
from cuboid.tensor3d.compiled.split_backward import ProductsInGraph, leave_gradient
from cuboid.tensor3d.experts.router import ShardedRouter
from cuboid.tensor3d.experts.sharded_experts import ShardedExperts, ShardedScaledExperts
from cuboid.tensor3d.layers.dropout import MeshDropout, ShardedDropout
from cuboid.tensor3d.layers.head_bias import PerHeadParameters
from cuboid.tensor3d.layers.input_gather import GatherSequence
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype, leave_weight_gradients
from cuboid.tensor3d.layers.linear_op import LinearOp
from cuboid.tensor3d.layers.norm import HeadsRMSNorm, ShardedLayerNorm, ShardedRMSNorm, statistics_dtype
from cuboid.tensor3d.layers.output_reduce import (
    OutputReduce,
    ScatterFeatures,
    ScatterSequence,
    SelectHeads,
    SumFeatures,
)
from cuboid.tensor3d.layers.unsharded_module import UnshardedModule
from cuboid.tensor3d.layers.whole_block import WHOLE_OF, ActivationSplit, KeptWhole, on_whole_activations
from cuboid.tensor3d.low_rank import FactorA, FactorB, Magnitudes
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


class CompiledLinear(ShardedLinear):
    """:class:`ShardedLinear` in a graph.

    Attributes:
        in_graph, number: see :class:`~cuboid.tensor3d.compiled.split_backward.LeavesGradient`.
    """

    in_graph: ProductsInGraph | None = None
    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the table in :mod:`cuboid.tensor3d.layers.linear_op`."""
        dtype = autocast_dtype(x)
        weight = self.product.out_in(block_of(self, "weight"))
        store = self.weight_gradients
        is_left = self.in_graph is not None and store is not None and store.defers(self.weight)
        if is_left:
            weight = weight.detach()
        shard = x.to(dtype)
        if self.product.is_fp8:
            y = self._multiply_in_fp8(shard, getattr(x, "cuboid_rounded", None), weight)
        else:
            y = nn.functional.linear(gathered(shard, self._linear_op.input_gather), weight)
            y = _reduced(y, self.product.output_reduce)
        if is_left:
            y = leave_gradient(y, self._shard_of(x, shard), self)  # type: ignore[arg-type]
        return y if self.bias is None else y + self.output_bias().to(dtype)

    def _multiply_in_fp8(self, x: torch.Tensor, rounded: Rounded | None, weight: torch.Tensor) -> torch.Tensor:
        """``rounded`` is set if the block's hook has gathered it."""
        input_gather, output_reduce = self._linear_op.input_gather, self.product.output_reduce
        fp8 = self.sharded_params["weight"].fp8
        # Where the hook hasn't, some product of the input is in bf16.
        sends_fp8 = rounded is not None or not self.takes_gathered
        call = Fp8Call(output_reduce, 0 if fp8 is None else fp8.height, sends_fp8)
        if rounded is None:
            rounded = round_and_gather(x, input_gather)
        y = multiply(gathered(x, input_gather), rounded, weight, self.prefetched_fp8.get("weight", ()), call)
        return y if isinstance(output_reduce, ScatterFeatures | ScatterSequence) else _reduced(y, output_reduce)

    def output_bias(self) -> torch.Tensor:
        """See :meth:`ShardedLinear.output_bias`."""
        bias = block_of(self, "bias")
        return bias if self.bias_rows is None else bias[self.bias_rows]

    def leave(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """See :class:`~cuboid.tensor3d.compiled.split_backward.LeavesGradient`."""
        linear_op = self._linear_op
        if self._has_shard:
            linear_op = LinearOp(GatherSequence(self.mesh), [self.product])
        leave_weight_gradients(linear_op, [self], x, [dy])

    @property
    def _has_shard(self) -> bool:
        """Whether the block's hook gathers the input."""
        return self.takes_gathered and self.mesh.size("sequence") > 1

    def _shard_of(self, x: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        """What the weight's gradient is computed from: the input before it is gathered."""
        if not self._has_shard:
            return cast
        shard: torch.Tensor | None = getattr(x, "cuboid_shard", None)
        # The model's own code may have computed something from the gathered input.
        return own_slice(cast, SEQUENCE_DIM, self.mesh.along("sequence")).contiguous() if shard is None else shard

    def input_of_updates(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's own part of the layer's input, of which low-rank updates are computed."""
        shard: torch.Tensor | None = getattr(x, "cuboid_shard", None)
        if shard is not None:
            return shard
        return own_slice(x, SEQUENCE_DIM, self.mesh.along("sequence")) if self.takes_gathered else x


def _reduced(y: torch.Tensor, output_reduce: OutputReduce) -> torch.Tensor:
    """Partial sums to the rank's own piece of the sums."""
    if isinstance(output_reduce, ScatterSequence):
        return scatter(y, SEQUENCE_DIM, output_reduce.along)
    if isinstance(output_reduce, ScatterFeatures):
        return scatter_parts(y, output_reduce.parts[0], output_reduce.along)
    if isinstance(output_reduce, SelectHeads):
        # The method of the same name isn't traced while a mode stands for dropouts.
        heads = torch.unflatten(sum_over(y, output_reduce.along), -1, (output_reduce.heads, output_reduce.head_dim))
        return torch.cat([heads[..., head, :] for head in output_reduce.keep], -1)
    return sum_over(y, output_reduce.along) if isinstance(output_reduce, SumFeatures) else y


class CompiledLatent(CompiledLinear):
    """A projection to latents, which takes the rank's own positions of its input, and returns all positions."""

    _has_shard = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B/b, S, H/h]`` to ``[B/b, S, R]``."""
        return gather(super().forward(self.input_of_updates(x)), SEQUENCE_DIM, self.mesh.along("sequence"))


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


class CompiledFactorA(FactorA):
    """:class:`FactorA` in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the table in :mod:`cuboid.tensor3d.low_rank`."""
        z = nn.functional.linear(x, block_of(self, "weight"))
        if self.reduce == "sum and gather":
            return gather(sum_over(z, self.hidden), SEQUENCE_DIM, self.sequence)
        return sum_over(scatter(z, SEQUENCE_DIM, self.sequence), self.hidden) if self.reduce == "scatter and sum" else z


class CompiledFactorB(FactorB):
    """:class:`FactorB` in a graph."""

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return block_of(self, "weight"), None if self.bias is None else block_of(self, "bias")


class CompiledMagnitudes(Magnitudes):
    """:class:`Magnitudes` in a graph."""

    def forward(self, norms: torch.Tensor) -> torch.Tensor:
        """See :meth:`Magnitudes.forward`."""
        return self.scale(block_of(self, "weight"), norms)


class CompiledPerHead(PerHeadParameters):
    """:class:`PerHeadParameters` in a graph: blocks are in the place of its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return super(PerHeadParameters, self).forward(*args, **kwargs)


class CompiledWhole(nn.Module):
    """A block that is computed whole, in a graph: its parameters are whole.

    Attributes:
        mesh: of the block's parameters.
        cuboid_seeds: of what the layer's graph draws; None if it draws nothing.
        cuboid_block: the block's number in its layer, from 1.
    """

    mesh: Mesh
    cuboid_seeds: GraphSeeds | None = None
    cuboid_block = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on whole activations."""
        split = ActivationSplit(self.mesh)
        if self.mesh.size("sequence", "hidden") > 1:
            split = ActivationSplit(self.mesh, lambda x: whole(x, self.mesh), lambda x: part(x, self.mesh))
        seeds = self.cuboid_seeds
        if seeds is None:
            return on_whole_activations(type(self).__name__, split, super().forward, args, kwargs)
        seeds.block = self.cuboid_block
        output = on_whole_activations(type(self).__name__, split, super().forward, args, kwargs)
        seeds.block = 0
        return output


#: What modules become; those of other sharded classes have no form in a graph.
_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    ShardedLinear: CompiledLinear,
    ShardedRMSNorm: CompiledRMSNorm,
    HeadsRMSNorm: CompiledHeadsRMSNorm,
    ShardedLayerNorm: CompiledLayerNorm,
    UnshardedModule: CompiledUnsharded,
    ShardedDropout: CompiledDropout,
    FactorA: CompiledFactorA,
    FactorB: CompiledFactorB,
    Magnitudes: CompiledMagnitudes,
}
#: Mixins of modules whose own code runs, and what they become.
_MIXINS: dict[type[nn.Module], type[nn.Module]] = {
    ShardedScaledExperts: CompiledScaledExperts,
    ShardedExperts: CompiledExperts,
    ShardedRouter: CompiledRouter,
    PerHeadParameters: CompiledPerHead,
}
_WHOLE: Any = CompiledWhole
#: Those of them whose code reads the parameters of the module.
TAKE_BLOCKS = (ShardedRouter, PerHeadParameters, KeptWhole)
#: Attribute of a class that draws with seeds of a mesh: the class whose code it is.
UNDRAWN = "cuboid_undrawn"


def form_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that modules of a class become; None if they have no form in a graph."""
    cls: Any = getattr(kind, UNDRAWN, kind)
    if cls in _FORMS:
        return _FORMS[cls]
    if WHOLE_OF in vars(cls):
        whole_of: Any = vars(cls)[WHOLE_OF]
        return _mixed(_WHOLE, whole_of)
    mixin: Any = next((form for base, form in _MIXINS.items() if issubclass(cls, base)), None)
    if mixin is not None:
        return cls if issubclass(cls, mixin) else _mixed(mixin, cls)
    if issubclass(cls, (KeptWhole, CompiledWhole, CompiledLatent, *_FORMS.values())):
        return cls
    return None if issubclass(cls, ShardedModule | MeshDropout) else cls


@cache
def _mixed(form: Any, cls: Any) -> type[nn.Module]:
    return type(cls.__name__, (form, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
