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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import all_gather
from cuboid.tensor3d.exchange import Exchange, ScatterFeatures, ScatterSequence
from cuboid.tensor3d.layout import Layout
from cuboid.tensor3d.parameter import ParameterGather, ShardedModule
from cuboid.tensor3d.products import Pieces, multiply, weight_gradient
from cuboid.tensor3d.sequence import Regather, saved_input


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

    def features(self, x: torch.Tensor) -> Pieces:
        """The input's features, in pieces where they must be gathered."""
        return all_gather(x, self.weight.mesh, ("hidden",)).unbind(0) if self.gather_features else (x,)

    def columns(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """The columns of ``[out, in]`` that belong to each of the pieces."""
        return weight.chunk(self.weight.mesh.size("hidden"), 1) if self.gather_features else (weight,)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        saved: torch.Tensor,
        bias: torch.Tensor | None,
        regather: Regather | None,
        product: Product,
    ) -> torch.Tensor:
        ctx.save_for_backward(saved, weight)
        ctx.product, ctx.regather = product, regather
        if regather is not None and ctx.needs_input_grad[1]:
            regather.join()
        with product.weight.gathered(weight) as block:
            y = product.exchange.multiply(product.features(x), product.columns(product.out_in(block)))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, weight = ctx.saved_tensors
        product: Product = ctx.product
        dx = dweight = None
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        pieces = product.exchange.transpose(dy)
        if ctx.needs_input_grad[0]:
            with product.weight.gathered(weight) as block:
                dx = _input_gradient(pieces, product.out_in(block), product)
        if ctx.needs_input_grad[1]:
            x = product.features(saved) if ctx.regather is None else (ctx.regather.take(saved),)
            dweight = product.weight.reduce(_block_gradient(pieces, x, product))
        return dx, dweight, None, dbias, None, None


def _input_gradient(dy: Pieces, weight: torch.Tensor, product: Product) -> torch.Tensor:
    """dy W; where the input was gathered, reduced to the rank's own features."""
    rows = product.exchange.rows(weight)
    if not product.gather_features:
        return multiply(dy, [own.t() for own in rows])
    scatter = ScatterFeatures(product.weight.mesh, "hidden")
    return scatter.multiply(dy, [own.t() for own in rows])


def _block_gradient(dy: Pieces, x: Pieces, product: Product) -> torch.Tensor:
    """dyᵀ x, as ``[out, in]`` or ``[in, out]``, with zeros in the rows that were not multiplied."""
    shape = product.weight.layout.block_shape(product.weight.mesh.shape)
    whole = dy[0].new_empty(shape) if product.rows is None else dy[0].new_zeros(shape)
    by_column = product.columns(product.out_in(whole))
    for index, piece in enumerate(dy):
        for features, columns in zip(x, by_column, strict=True):
            for part, out in product.exchange.put_rows(columns, index):
                weight_gradient(piece[..., part], features, out)
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
        bias = None if self.bias is None else self.gathered("bias").to(x.dtype)
        if bias is not None and self.bias_rows is not None:
            bias = bias[self.bias_rows]
        return _Multiply.apply(x, weight, saved, bias, regather, self.product)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, mesh={self.mesh.shape}"


def up_product(weight: ParameterGather, *, in_first: bool = False, parts: int = 1) -> Product:
    """Multiplication of an "up" projection: partial sums over `hidden`, scattered onto the features."""
    return Product(weight, ScatterFeatures(weight.mesh, "hidden", parts), in_first)


def down_product(weight: ParameterGather, *, in_first: bool = False) -> Product:
    """Multiplication of a "down" projection: partial sums over `sequence`, scattered onto the sequence."""
    return Product(weight, ScatterSequence(weight.mesh, "sequence"), in_first, gather_features=True)


def head_product(weight: ParameterGather) -> Product:
    """Multiplication of the LM head: partial sums over `hidden`, scattered onto the sequence."""
    return Product(weight, ScatterSequence(weight.mesh, "hidden"))
