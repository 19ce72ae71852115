"""The two factors of a low-rank update (LoRA, arXiv 2106.09685) of a linear layer, cut as finely as the layer.

Y = X Wᵀ + Z Bᵀ with Z = X Aᵀ, where A is ``[r, I]``, B is ``[O, r]``, and r is small. So what is sent for the update
are Z's r features, never the layer's own; A and B are cut where X's and Y's features are, and their shards over all
axes that are left. Per rank, with r never cut in Z:

============  ==================  ====================  ====================  ==============  =======================
layer         input of A          block of A            Z before B            block of B      what gives Z
============  ==================  ====================  ====================  ==============  =======================
up            [B/b, S/s, I/h]     [r, I/h]              [B/b, S, r]           [O/(s·h), r]    sum over `hidden`, gather
down          [B/b, S, I/(s·h)]   [r, I/(s·h)]          [B/b, S/s, r]         [O/h, r]        scatter, sum over `hidden`
to latents    [B/b, S/s, I/h]     [r, I/h]              [B/b, S, r]           [O, r]          sum over `hidden`, gather
from latents  [B/b, S, I]         [r, I]                [B/b, S, r]           [O/(s·h), r]    –
head          [B/b, S/s, I/h]     [r, I/h]              [B/b, S/h, r]         [V/s, r]        gather, scatter, sum
============  ==================  ====================  ====================  ==============  =======================

"Gather" and "scatter" are along the sequence, over `sequence`; the head's scatter is over `hidden`, and sums. The input
of A in an "up" layer and in the head is what its block was given, before the sequence is gathered: that shard is saved
for the layer's own backward anyway.

Each rank's gradient of Z is a partial sum, over the ranks with other rows of B. So the backward of a sum over `hidden`
is a sum again. "Up" layers with one input share a product and messages: see :mod:`cuboid.tensor3d.low_rank_inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, all_reduce, gather_dim, scatter_positions
from cuboid.distributed.mesh import AxisGroup, Mesh
from cuboid.distributed.topology import AXES, Axis
from cuboid.tensor3d.layers.late_gather import GatherPositions
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.output_reduce import NoReduce, ScatterFeatures, ScatterSequence, SelectHeads, SumFeatures
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, take_whole
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard

#: How Z becomes what B is multiplied with.
ZReduce = Literal["sum and gather", "scatter and sum", "gather and scatter", "none"]


@dataclass(frozen=True)
class LowRankSplit:
    """How the factors of a layer's update are cut.

    Args:
        in_axes: axes that cut A's in features.
        out_axes: axes that cut B's out features.
        parts: number of parts of the out features that are cut separately, as in GPT-2's fused query, key and value.
        reduce: how Z becomes what B is multiplied with.
        input_axes: axes along which ranks have different elements of A's input.
        ragged: whether the out features are a vocabulary, whose last block is padded.
    """

    in_axes: tuple[Axis, ...]
    out_axes: tuple[Axis, ...]
    parts: int
    reduce: ZReduce
    input_axes: tuple[Axis, ...] = AXES
    ragged: bool = False

    @classmethod
    def of(cls, linear: ShardedLinear) -> LowRankSplit | None:
        """The split for a layer; None for one whose update has no rule."""
        reduce = linear.product.output_reduce
        weight = linear.spec("weight")
        if isinstance(reduce, ScatterFeatures):
            return cls(("hidden",), ("sequence", "hidden"), reduce.parts[0], "sum and gather")
        if isinstance(reduce, SelectHeads):
            # Fewer key/value heads than ranks: the rank takes the rows of its heads out of the block, as of a bias.
            out = weight.tp_axes[1 if linear.product.in_first else 0]
            return cls(("hidden",), out, 1, "sum and gather")
        if isinstance(reduce, SumFeatures):
            return cls(("hidden",), (), 1, "sum and gather")
        if isinstance(reduce, NoReduce):
            return cls((), ("sequence", "hidden"), 1, "none", ("batch",))
        if isinstance(reduce, ScatterSequence):
            if weight.ragged:
                return cls(("hidden",), ("sequence",), 1, "gather and scatter", ragged=True)
            return cls(("sequence", "hidden"), ("hidden",), 1, "scatter and sum")
        return None


class Magnitudes(ShardedModule):
    """DoRA's magnitudes of the rows of an updated weight (arXiv 2402.09353), one for each out feature, cut as B's bias.

    Args:
        magnitudes: a module whose ``weight`` they are, ``[O]``.
        split: how the update is cut.
        mesh: this rank's mesh.
        rows: indices of the block's out features that the rank's output has; None for all of them.
    """

    rows: torch.Tensor | None

    def __init__(self, magnitudes: nn.Module, split: LowRankSplit, mesh: Mesh, rows: torch.Tensor | None) -> None:
        super().__init__()
        shape = tuple(magnitudes.get_parameter("weight").shape)
        take_shards(self, magnitudes, {"weight": ShardingSpec(shape, (split.out_axes,), (split.parts,))}, mesh)
        self.register_buffer("rows", rows, persistent=False)
        self._intervals, *_ = self.spec("weight").block_intervals(mesh.shape, mesh.coordinate)

    def forward(self, norms: torch.Tensor) -> torch.Tensor:
        """What the rank's out features are multiplied with, given the norms ``[O]`` of all rows."""
        return self.scale(self.unsharded("weight"), norms)

    def scale(self, block: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """The same, given the magnitudes' block."""
        scale = block / torch.cat([norms[start:stop] for start, stop in self._intervals])
        return scale if self.rows is None else scale[self.rows]


class FactorA(ShardedModule, nn.Linear):
    """A of a low-rank update: the rank's input ``[B/b, …, I/…]`` to Z, whole in its r features."""

    #: Blocks are small: unsharded together with those of norms, once per forward.
    gathered_once = ("weight",)

    def __init__(self, factor: nn.Linear, split: LowRankSplit, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = factor.in_features, factor.out_features
        self.register_parameter("bias", None)
        spec = ShardingSpec(tuple(factor.weight.shape), ((), split.in_axes))
        take_shards(self, factor, {"weight": spec}, mesh)
        self.reduce = split.reduce
        self.sequence, self.hidden = mesh.along("sequence"), mesh.along("hidden")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the table in :mod:`cuboid.tensor3d.low_rank`."""
        return self.completed(nn.functional.linear(x, self.unsharded("weight")))

    def completed(self, z: torch.Tensor) -> torch.Tensor:
        """What B is multiplied with, from the rank's own product; that may have the features of several adapters."""
        if self.reduce == "sum and gather":
            return GatherPositions.apply(_Sum.apply(z, self.hidden), self.sequence)
        if self.reduce == "scatter and sum":
            return _Sum.apply(ScatterPositions.apply(z, self.sequence), self.hidden)
        if self.reduce == "gather and scatter":
            return ScatterPositions.apply(GatherPositions.apply(z, self.sequence), self.hidden)
        return z


class FactorB(ShardedModule, nn.Linear):
    """B of a low-rank update: Z to the update of the rank's part of the layer's output.

    Args:
        factor: the layer as one process has it, perhaps with a bias.
        split: how it is cut.
        mesh: this rank's mesh.
        rows: indices of the block's out features that the rank's output has; None for all of them.
    """

    gathered_once = ("weight",)
    rows: torch.Tensor | None

    def __init__(self, factor: nn.Linear, split: LowRankSplit, mesh: Mesh, rows: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = factor.in_features, factor.out_features
        shape, parts = tuple(factor.weight.shape), split.parts
        specs = {"weight": ShardingSpec(shape, (split.out_axes, ()), (parts, 1), split.ragged)}
        self.register_parameter("bias", None)
        if factor.bias is not None:
            specs["bias"] = ShardingSpec(shape[:1], (split.out_axes,), (parts,), split.ragged)
        take_shards(self, factor, specs, mesh)
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """See the table in :mod:`cuboid.tensor3d.low_rank`."""
        return nn.functional.linear(z, *self.own_rows())

    def added(self, total: torch.Tensor, z: torch.Tensor, scaling: float) -> torch.Tensor:
        """``total``, the rank's part of the layer's output, with the update of ``z`` times ``scaling``."""
        weight, bias = self.own_rows()
        # With several dtypes, or autocast, which casts here, it is rounded where plain PEFT's is.
        if bias is not None or not z.dtype == weight.dtype == total.dtype:
            return total + nn.functional.linear(z, weight, bias) * scaling
        # The product adds to the output: passes over it take longer than multiplying r features.
        sums = torch.addmm(total.flatten(0, -2), z.flatten(0, -2), weight.t(), alpha=scaling)
        return sums.view(total.shape)

    def own_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of B, and the elements of its bias, of the out features that the rank's output has."""
        weight, bias = self._blocks()
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return weight, bias

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.unsharded("weight"), None if self.bias is None else self.unsharded("bias")


def take_shards(module: ShardedModule, original: nn.Module, specs: dict[str, ShardingSpec], mesh: Mesh) -> None:
    for name, spec in specs.items():
        full = original.get_parameter(name)
        shard = take_shard(full.detach(), spec, mesh)
        module.register_parameter(name, nn.Parameter(shard, requires_grad=full.requires_grad))
    module.init_sharding(mesh, specs)
    # A state dict of whole factors, as PEFT's files have them, is loaded into the shards.
    module.register_load_state_dict_pre_hook(take_whole)


class _Sum(torch.autograd.Function):
    """Sums over the ranks of an axis; so does the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.along = along
        # Not in place: autograd may have the argument for other uses.
        return x if along.size == 1 else all_reduce(x.clone(), along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.along.size == 1 else all_reduce(gradient.clone(), ctx.along), None


class ScatterPositions(torch.autograd.Function):
    """Partial sums ``[B/b, S, r]`` to the rank's positions of the sum, ``[B/b, S/s, r]``; or ``[B/b, S/h, r]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
        ctx.along = along
        return scatter_positions(x, along)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_dim(gradient, SEQUENCE_DIM, ctx.along), None
