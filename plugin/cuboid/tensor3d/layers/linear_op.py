"""The products of one input with the weights of a transformer block, on a batch × sequence × hidden mesh.

Bian et al., arXiv 2105.14450 (section 3), generalised to axes of any sizes and to the order in which Hugging Face
blocks multiply. Per rank, with O and I the weight's out and in features as Hugging Face counts them:

========  ==================  ====================  ================================
tensor    up (q k v gate up)  down (o, down)        LM head
========  ==================  ====================  ================================
input     [B/b, S/s, I/h]     [B/b, S, I/(s·h)]     [B/b, S/s, I/h]
shard     [O/(s·b), I/h]      [O/(h·b), I/s]        [O/(s·b), I/h]
block     [O/s, I/h]          [O/h, I/s]            [O/s, I/h]
output    [B/b, S, O/(s·h)]   [B/b, S/s, O/h]       [B/b, S/h, O/s]
========  ==================  ====================  ================================

With G the gather before (:mod:`.input_gather`) and R the reduction after the product (:mod:`.output_reduce`), forward,
dgrad and wgrad are

    y = R(G(x) Wᵀ)      dx = Gᵀ(Rᵀ(dy) W)      dW = Rᵀ(dy)ᵀ G(x), reduce-scattered over `batch`.

The transpose of an all-gather is the reduce-scatter along the same axis, and the other way round. The input and
the weights are saved as shards and gathered again in backward, where all gathers are under way
before the first of them is needed, dx's reduction runs behind dW's product, and dW's behind whatever comes next.
Where the collectives cross a network, a few rows of the batch are multiplied while others are on their way. This module
describes a multiplication; :mod:`.linear_autograd` and :mod:`.linear_backward` run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from cuboid.tensor3d.layers.input_gather import InputGather
from cuboid.tensor3d.layers.output_reduce import Columns, OutputReduce, share_reduces
from cuboid.tensor3d.sharding.bucketing import start_unshards
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce
from cuboid.tensor3d.sharding.sharded_param import ShardedParam

T = TypeVar("T")

#: Into so many parts the rows of a batch are cut at most, and of how many bytes the parts are at least.
_PARTS, _PART_BYTES = 4, 512 << 10


@dataclass(frozen=True)
class Product:
    """The constant part of one layer's product.

    Args:
        weight: of the layer.
        exchange: of its partial sums.
        in_first: whether the weight is stored ``[in, out]``, as Hugging Face's Conv1D does.
        rows: first and last (exclusive) out row of the block that is multiplied; all by default.
    """

    weight: ShardedParam
    output_reduce: OutputReduce
    in_first: bool = False
    rows: tuple[int, int] | None = None

    def out_in(self, block: torch.Tensor) -> torch.Tensor:
        """View of a block as ``[out, in]``, restricted to ``rows``."""
        whole = block.t() if self.in_first else block
        return whole if self.rows is None else whole[slice(*self.rows)]


class LinearOp:
    """Products of one input, which share its all-gather, the reduction of their results, and their backward."""

    def __init__(self, input_gather: InputGather, products: Sequence[Product]) -> None:
        self.input_gather = input_gather
        self.products = tuple(products)
        #: Each output reduce, and the numbers of the products that it has in common.
        self.groups = share_reduces([product.output_reduce for product in products])

    def parts(self, x: torch.Tensor) -> int:
        """Into how many parts the rows of an input are to be cut, so that one's collectives run behind another's
        products."""
        mesh = self.products[0].weight.mesh
        if not mesh.spans_networks or mesh.size("sequence", "hidden") == 1:
            return 1
        return max(1, min(_PARTS, x.shape[0], x.nbytes // _PART_BYTES))

    def start_unshard(self, weights: Sequence[torch.Tensor]) -> None:
        """Start to unshard the weights that aren't unsharded or about to be."""
        start_unshards([product.weight for product in self.products], weights)

    def columns(self, numbers: Sequence[int]) -> Iterator[Columns]:
        """The columns of some products' weights, each as soon as its block is there."""
        for number in numbers:
            product = self.products[number]
            yield self.input_gather.columns(product.out_in(product.weight.unsharded()))

    def in_order(self, by_group: Sequence[Sequence[T]]) -> list[T]:
        """What the groups have, in the order of the products."""
        found = {
            number: each
            for (_, numbers), members in zip(self.groups, by_group, strict=True)
            for number, each in zip(numbers, members, strict=True)
        }
        return [found[number] for number in range(len(self.products))]


@dataclass(frozen=True)
class Operand:
    """What varies from one call to the next.

    Args:
        weight: the shard.
        deferred: who waits for the shard's gradient; None if it must be complete at once.
        bias: added to the result, ``[O']``; perhaps None.
    """

    weight: torch.Tensor
    deferred: DeferredReduce | None = None
    bias: torch.Tensor | None = None
