"""The two linear layers of a transformer block on a batch × sequence × hidden mesh.

Bian et al., arXiv 2105.14450 (section 3), generalised to axes of any sizes and to the order in which Hugging Face
blocks multiply. Per rank, with O and I the weight's out and in features as Hugging Face counts them:

========  ==================  ====================  ================================
tensor    up (q k v gate up)  down (o, down)        LM head
========  ==================  ====================  ================================
input     [B/b, S, I/h]       [B/b, S, I/(s·h)]     [B/b, S, I/h]
shard     [O/(s·b), I/h]      [O/(h·b), I/s]        [O/(s·b), I/h]
block     [O/s, I/h]          [O/h, I/s]            [O/s, I/h]
output    [B/b, S, O/(s·h)]   [B/b, S/s, O/h]       [B/b, S/h, O/s]
========  ==================  ====================  ================================

With G the gather before and R the reduction after the product, forward, dgrad and wgrad are

    y = R(G(x) Wᵀ)      dx = Gᵀ(Rᵀ(dy) W)      dW = Rᵀ(dy)ᵀ G(x), reduce-scattered over `batch`.

The transpose of an all-gather is the reduce-scatter along the same axis, and the other way round. The input and
the weight are saved as shards and gathered again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import all_reduce, gather_dim, scatter_dim
from cuboid.tensor3d.layout import Layout
from cuboid.tensor3d.parameter import ParameterGather, ShardedModule
from cuboid.tensor3d.sequence import SEQUENCE_DIM, Regather, saved_input
from cuboid.topology import Axis


class Exchange(Protocol):
    """What happens to partial sums ``[B/b, S, rows]`` behind a product, and its transpose."""

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Partial sums to the rank's own piece of the sum."""
        ...

    def transpose(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the own piece to the gradient of the partial sums."""
        ...


@dataclass(frozen=True)
class ScatterDim:
    """Reduce-scatter over one axis onto one dim (which may consist of several parts, each cut separately)."""

    mesh: Mesh
    axis: Axis
    dim: int
    parts: int = 1

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See :class:`Exchange`."""
        if self.parts == 1:
            return scatter_dim(partial, self.dim, self.mesh, (self.axis,))
        by_part = partial.unflatten(self.dim, (self.parts, -1))
        return scatter_dim(by_part, -1, self.mesh, (self.axis,)).flatten(-2)

    def transpose(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :class:`Exchange`."""
        if self.parts == 1:
            return gather_dim(gradient, self.dim, self.mesh, (self.axis,))
        by_part = gradient.unflatten(self.dim, (self.parts, -1))
        return gather_dim(by_part, -1, self.mesh, (self.axis,)).flatten(-2)


@dataclass(frozen=True)
class SelectHeads:
    """Sum over `hidden` and keep the heads that this rank's queries attend to (GQA with few KV heads).

    Where the KV heads don't divide by sequence × hidden a reduce-scatter can't hand them out: neighbours need the
    same head. All ranks get the sum of ``heads`` heads and keep those in ``keep`` (which may repeat).
    """

    mesh: Mesh
    head_dim: int
    heads: int
    keep: tuple[int, ...]

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See :class:`Exchange`."""
        whole = all_reduce(partial, self.mesh, ("hidden",))
        return whole.unflatten(-1, (self.heads, self.head_dim))[..., list(self.keep), :].flatten(-2)

    def transpose(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :class:`Exchange`."""
        kept = gradient.unflatten(-1, (len(self.keep), self.head_dim))
        whole = gradient.new_zeros((*kept.shape[:-2], self.heads, self.head_dim))
        whole.index_add_(-2, torch.tensor(self.keep, device=gradient.device), kept)
        return all_reduce(whole.flatten(-2), self.mesh, ("hidden",))


@dataclass(frozen=True)
class Product:
    """The constant part of one layer's multiplication."""

    weight: ParameterGather
    exchange: Exchange
    #: Whether the weight is stored ``[in, out]``, as Hugging Face's Conv1D does.
    in_first: bool = False
    #: Whether the input must be gathered along its features over `hidden` ("down").
    gather_features: bool = False
    #: First and last (exclusive) out row of the block that is multiplied; all by default.
    rows: tuple[int, int] | None = None

    def out_in(self, block: torch.Tensor) -> torch.Tensor:
        """View of a block as ``[out, in]``, restricted to ``rows``."""
        whole = block.t() if self.in_first else block
        return whole if self.rows is None else whole[slice(*self.rows)]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        saved: torch.Tensor,
        regather: Regather | None,
        product: Product,
    ) -> torch.Tensor:
        ctx.save_for_backward(saved, weight)
        ctx.product, ctx.regather = product, regather
        if regather is not None and ctx.needs_input_grad[1]:
            regather.join()
        with product.weight.gathered(weight) as block:
            partial = nn.functional.linear(_features(x, product), product.out_in(block))
        return product.exchange.reduce(partial)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, weight = ctx.saved_tensors
        product: Product = ctx.product
        dy = product.exchange.transpose(dy)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            with product.weight.gathered(weight) as block:
                dx = torch.matmul(dy, product.out_in(block))
            if product.gather_features:
                dx = scatter_dim(dx, -1, product.weight.mesh, ("hidden",))
        if ctx.needs_input_grad[1]:
            x = _features(saved, product) if ctx.regather is None else ctx.regather.take(saved)
            dweight = product.weight.reduce(_weight_gradient(dy, x, product))
        return dx, dweight, None, None, None


def _features(x: torch.Tensor, product: Product) -> torch.Tensor:
    return gather_dim(x, -1, product.weight.mesh, ("hidden",)) if product.gather_features else x


def _weight_gradient(dy: torch.Tensor, x: torch.Tensor, product: Product) -> torch.Tensor:
    """dyᵀ x, as ``[out, in]`` or ``[in, out]``, with zeros in the rows that were not multiplied."""
    dy_2d, x_2d = dy.flatten(0, -2), x.flatten(0, -2)
    if product.in_first and product.rows is None:
        return x_2d.t() @ dy_2d
    gradient = dy_2d.t() @ x_2d
    if product.rows is None:
        return gradient
    whole = gradient.new_zeros(product.weight.layout.block_shape(product.weight.mesh.shape))
    product.out_in(whole).copy_(gradient)
    return whole


class ShardedLinear(ShardedModule, nn.Linear):
    """A linear layer of a block; :mod:`cuboid.hf` gives it its role through ``product`` and the layouts.

    Still an ``nn.Linear`` for whoever looks for one; ``in_features`` and ``out_features`` are the unsplit sizes.
    """

    bias_rows: torch.Tensor | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        mesh: Mesh,
        layouts: dict[str, Layout],
        in_features: int,
        out_features: int,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = weight
        self.register_parameter("bias", bias)
        self.init_sharding(mesh, layouts)

    def configure(self, product: Product, bias_rows: torch.Tensor | None = None) -> None:
        """Set the multiplication, and the entries of the bias block to add where they are not all."""
        self.product = product
        self.register_buffer("bias_rows", bias_rows, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B/b, S, …]`` to the output of the table above."""
        weight, saved, regather = self.weight, *saved_input(x)
        if torch.is_autocast_enabled(x.device.type):
            # The gathered input is cast for this call only; the shard is cast again when it is gathered again.
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, saved = x.to(dtype), weight.to(dtype), saved.to(dtype)
        y = _Multiply.apply(x, weight, saved, regather, self.product)
        if self.bias is None:
            return y
        bias = self.gathered("bias")
        return y + (bias if self.bias_rows is None else bias[self.bias_rows]).to(y.dtype)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, mesh={self.mesh.shape}"


def up_product(weight: ParameterGather, *, in_first: bool = False, parts: int = 1) -> Product:
    """Multiplication of an "up" projection: partial sums over `hidden`, scattered onto the features."""
    return Product(weight, ScatterDim(weight.mesh, "hidden", -1, parts), in_first)


def down_product(weight: ParameterGather, *, in_first: bool = False) -> Product:
    """Multiplication of a "down" projection: partial sums over `sequence`, scattered onto the sequence."""
    return Product(weight, ScatterDim(weight.mesh, "sequence", SEQUENCE_DIM), in_first, gather_features=True)


def head_product(weight: ParameterGather) -> Product:
    """Multiplication of the LM head: partial sums over `hidden`, scattered onto the sequence."""
    return Product(weight, ScatterDim(weight.mesh, "hidden", SEQUENCE_DIM))
