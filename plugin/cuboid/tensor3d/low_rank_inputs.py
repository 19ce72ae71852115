"""Low-rank updates of projections with one input: one product, and one message, for all of their first factors.

Z = X Aᵀ of all adapters of a block's projections is computed where those are, with A stacked. Where the sequence isn't
cut, A is one more weight of the projections. Each rank of `hidden` is to get the whole sum of Z: the reduce-scatter of
the projections' outputs has a copy for each of them, and backward's gather of the gradients brings all terms of dZ. So
A has no message of its own. Where the sequence is cut, Z of the rank's own positions is summed and gathered: as a
product of the gathered input, A would need that again for its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.linear_op import LinearOp, Operand, Product
from cuboid.tensor3d.layers.output_reduce import ScatterFeatures
from cuboid.tensor3d.low_rank import FactorA
from cuboid.tensor3d.sharding.sharded_param import ShardedParam
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class LayerOfFactors(Protocol):
    """A projection with adapters."""

    def factors_of_input(self) -> Iterable[FactorA]:
        """A of those adapters that multiply what the projection does."""
        ...


class StackedFactors:
    """The first factors of all adapters of some projections with one input.

    Args:
        layers: the projections that have any.
        mesh: this rank's mesh.
    """

    def __init__(self, layers: Sequence[LayerOfFactors], mesh: Mesh) -> None:
        self._layers, self._mesh = layers, mesh
        #: The products that A has last been one of, the number of its rows, and all of them together.
        self._joined: tuple[LinearOp, int, LinearOp] | None = None

    def products(
        self, linear_op: LinearOp, operands: Sequence[Operand], x: torch.Tensor, dtype: torch.dtype
    ) -> StackedProducts | None:
        """The products of a forward of ``x``, which is multiplied in ``dtype``; None if no factors multiply it."""
        # PEFT multiplies in the factors' dtype, and fp8 is for the layers' own products.
        if linear_op.has_fp8:
            return None
        factors = [a for layer in self._layers for a in layer.factors_of_input()]
        factors = [a for a in factors if a.weight.dtype == dtype and a.reduce == "sum and gather"]
        if not factors:
            return None
        weight = torch.cat([a.unsharded("weight") for a in factors])
        # In the first layer, nothing else needs the gradients of outputs that follow from frozen weights alone.
        is_first = torch.is_grad_enabled() and not x.requires_grad
        if self._mesh.size("sequence") > 1 or is_first:
            return StackedProducts(linear_op, operands, factors, weight, is_joined=False)
        if self._joined is None or self._joined[:2] != (linear_op, len(weight)):
            # As a weight of which each rank has a block of its own: it is never gathered.
            shape = (len(weight) * self._mesh.size("batch", "sequence"), factors[0].in_features)
            param = ShardedParam(ShardingSpec(shape, (("batch", "sequence"), ("hidden",))), self._mesh)
            product = Product(param, ScatterFeatures(self._mesh.along("hidden"), (0,)))
            self._joined = linear_op, len(weight), LinearOp(linear_op.input_gather, [*linear_op.products, product])
        return StackedProducts(self._joined[2], [*operands, Operand(weight)], factors, weight, is_joined=True)


@dataclass(frozen=True)
class StackedProducts:
    """The products of a forward, and the factors A that multiply their input."""

    linear_op: LinearOp
    operands: Sequence[Operand]
    factors: Sequence[FactorA]
    weight: torch.Tensor
    #: Whether A is the last of the products.
    is_joined: bool

    def attach(
        self, full: torch.Tensor, shard: torch.Tensor, results: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Attach Z of each factor to the projections' gathered input, of which ``shard`` is the rank's own part."""
        if self.is_joined:
            *results, z = results
        else:
            z = self.factors[0].completed(nn.functional.linear(shard, self.weight))
        parts = z.split([a.out_features for a in self.factors], -1)
        full.cuboid_low_rank = dict(zip(map(id, self.factors), parts, strict=True))  # type: ignore[attr-defined]
        return results


def attached_products(x: torch.Tensor) -> dict[int, torch.Tensor]:
    """By their ids, the results of factors that are attached to exactly this tensor; whoever uses one removes it."""
    attached: dict[int, torch.Tensor] = getattr(x, "cuboid_low_rank", {})
    return attached
