"""The linear layers of a transformer block on a mesh; :mod:`.linear_op` has their shapes and equations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import Node

from cuboid.distributed.axis_collectives import positions_are_whole
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.fp8 import rowwise
from cuboid.tensor3d.layers.input_gather import GatherFeatures, GatherSequence, InputGather, NoGather
from cuboid.tensor3d.layers.linear_op import DeferredWeight, LinearOp, Operand, Product
from cuboid.tensor3d.layers.output_reduce import NoReduce, ScatterSequence, SumFeatures
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.fp8_blocks import Fp8Blocks
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class ShardedLinear(ShardedModule, nn.Linear):
    """A linear layer of a block; :mod:`cuboid.models` sets its role by ``product`` and the sharding specs.

    It is still an ``nn.Linear`` for code that checks its class; ``in_features`` and ``out_features`` are unsplit sizes.

    Attributes:
        next_backward: the autograd node of the fused projections, whose backward runs right after this layer's. The
            next forward consumes it.
    """

    bias_rows: torch.Tensor | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        mesh: Mesh,
        specs: dict[str, ShardingSpec],
        in_features: int,
        out_features: int,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = weight
        self.register_parameter("bias", bias)
        self.init_sharding(mesh, specs)

    def configure(
        self, product: Product, bias_rows: torch.Tensor | None = None, *, gathers_sequence: bool = False
    ) -> None:
        """Set the product that the layer computes.

        Args:
            product: the product of the layer's role.
            bias_rows: indices of the bias block's entries to add; by default all.
            gathers_sequence: whether an "up" projection gathers its input itself, because no fused projection does.
        """
        self.product = product
        self.register_buffer("bias_rows", bias_rows, persistent=False)
        # "Up" projections and the head get an input that their fused projections gathered; "down" gathers its own.
        is_down = product.output_reduce == ScatterSequence(self.mesh.along("sequence"))
        input_gather: InputGather = GatherFeatures(self.mesh) if is_down else NoGather()
        if gathers_sequence:
            input_gather = GatherSequence(self.mesh)
        self._linear_op = LinearOp(input_gather, [product])
        param = product.weight
        if product.is_fp8 and product.is_plain and param.ranks > 1:
            # For each piece of the outputs' gradients, the weight's rows that multiply it.
            numbers = torch.arange(param.block_shape[0], device="cpu").unsqueeze(1)
            places = product.output_reduce.rows(numbers, 0).squeeze(-1)
            height = param.spec.shard_shape(self.mesh.shape)[0]
            param.fp8 = Fp8Blocks(places, input_gather.pieces, param.along, height)
        self._is_alone = self.mesh.shape.size == 1 and param.four_bits is None
        self.next_backward: weakref.ref[Node] | None = None

    @property
    def takes_gathered(self) -> bool:
        """Whether the input has been gathered along the sequence by the block's fused projections."""
        return isinstance(self._linear_op.input_gather, NoGather) and not isinstance(
            self.product.output_reduce, NoReduce
        )

    def input_of_updates(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's own part of the layer's input, of which low-rank updates are computed.

        Raises:
            UnsupportedModelError: the model's own code has computed a tensor from the gathered one.
        """
        # The block's fused projections have attached it.
        shard: torch.Tensor | None = getattr(x, "cuboid_shard", None)
        if shard is None and self.takes_gathered and self.mesh.size("sequence") > 1 and not positions_are_whole():
            raise UnsupportedModelError(
                "a layer with an adapter is given another tensor than its neighbours, for which there is no rule where "
                "the mesh cuts the sequence; leave it out of the adapter's target_modules"
            )
        return x if shard is None else shard

    @uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From input to output as in the table in :mod:`.linear_op`.

        For "up" projections and the head, ``x`` is usually already gathered along the sequence.
        """
        if not forward_runs():
            check_called_inside(self, self.mesh)
        next_backward, self.next_backward = self.next_backward, None
        attached: dict[int, torch.Tensor] = getattr(x, "cuboid_results", {})
        if id(self) in attached:
            # The block's fused projections have already computed it.
            return attached.pop(id(self))
        if self._is_alone:
            weight = self.product.out_in(self.weight)
            if self.product.is_fp8:
                return rowwise.linear(x, weight, self.bias)
            return nn.functional.linear(x, weight, self.bias)
        restored = self._linear_op.restored_dtype
        dtype = autocast_dtype(x) if restored is None else checked_dtype(x, restored)
        if self._linear_op.products[0] is not self.product:
            # `tensor3d.unshard` has replaced the product while its weight stays unsharded.
            self._linear_op = LinearOp(self._linear_op.input_gather, [self.product])
        _, (result,) = self._linear_op(x.to(dtype), [self.operand(dtype)], next_backward=next_backward)
        return result if restored is None else result.to(x.dtype)

    def operand(self, dtype: torch.dtype) -> Operand:
        """This layer's weight and bias for a multiplication with an input of ``dtype``."""
        store, deferred_weight = self.weight_gradients, None
        if store is not None and store.defers(self.weight):
            weight, deferred = self.weight.detach(), None
            deferred_weight = DeferredWeight(self.weight, store)
        else:
            weight, deferred = self.prefetched_shards.pop("weight", (self.weight, None))
        param = self.sharded_params["weight"]
        if param.optimizer_steps is not None:
            param.set_parameter(self.weight)
        if param.four_bits is None and weight.dtype != dtype and torch.is_autocast_enabled(weight.device.type):
            # Not the prefetched shard: autograd would cast its gradient while the reduce-scatter is still in flight.
            weight, deferred = (weight if deferred_weight else self.weight).to(dtype), None
        bias = None if self.bias is None else self.output_bias().to(dtype)
        return Operand(weight, deferred, bias, deferred_weight)

    def output_bias(self) -> torch.Tensor:
        """The bias, of the features that the rank's output has. There must be one."""
        bias = self.unsharded("bias")
        return bias if self.bias_rows is None else bias[self.bias_rows]

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, mesh={self.mesh.shape}"


def leave_weight_gradients(
    linear_op: LinearOp, layers: Sequence[ShardedLinear], x: torch.Tensor, dy: Sequence[torch.Tensor]
) -> None:
    """Add the rank's parts of an input and of outputs' gradients to the store of layers that a graph has multiplied.

    Args:
        linear_op: the layers' products.
        layers: one for each product.
        x: the input, before it is gathered.
        dy: one for each product.
    """
    deferred = [DeferredWeight(layer.weight, layer.weight_gradients) for layer in layers if layer.weight_gradients]
    linear_op.defer(deferred, x, dy)


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a product's operands are cast to: autocast's where it is on, else the input's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def checked_dtype(x: torch.Tensor, restored: torch.dtype) -> torch.dtype:
    """The dtype that weights stored in 4 bits are restored and multiplied in.

    Raises:
        UnsupportedModelError: autocast would multiply in another one.
    """
    if torch.is_autocast_enabled(x.device.type) and autocast_dtype(x) != restored:
        raise UnsupportedModelError(
            f"weights of 4 bits are multiplied in {restored} (bnb_4bit_compute_dtype), and torch.autocast asks for "
            f"{autocast_dtype(x)}: give both the same dtype, or leave autocast out"
        )
    return restored


def attach_results(x: torch.Tensor, layers: Sequence[ShardedLinear], results: Sequence[torch.Tensor]) -> None:
    """Attach precomputed results to ``x``; each layer returns its own, once, when it is called with ``x``."""
    x.cuboid_results = dict(zip(map(id, layers), results, strict=True))  # type: ignore[attr-defined]


def take_results(x: torch.Tensor) -> dict[int, torch.Tensor]:
    """Remove the results that are attached to ``x``, and return them by their layers' ids."""
    results: dict[int, torch.Tensor] = x.__dict__.pop("cuboid_results")
    return results


def head_product(weight: ShardedParam) -> Product:
    """Multiplication of the LM head: partial sums over `hidden`, reduce-scattered along the sequence."""
    return Product(weight, ScatterSequence(weight.mesh.along("hidden")))


def latent_product(weight: ShardedParam) -> Product:
    """Multiplication of a projection to latents: partial sums over `hidden`, all-reduced."""
    return Product(weight, SumFeatures(weight.mesh.along("hidden")))
