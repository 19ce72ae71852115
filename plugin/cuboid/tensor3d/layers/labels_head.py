"""A head of few outputs, such as a classifier's or a reward model's: all ranks get its logits whole.

Its weight ``[L, H]`` is cut over `hidden` as the hidden states are. Each rank multiplies what it has; the partial sums,
which are small, are added up over `hidden` and gathered over `sequence` and `batch`. What the model's own code then
makes of them (pooling by the last token, a loss) runs on every rank alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, all_reduce, gather_dim, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class _WholeSum(torch.autograd.Function):
    """Partial sums ``[B/b, S/s, L]`` to ``[B, S, L]``, the same on all ranks, of which all compute the same."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        total = all_reduce(part.clone(), mesh.along("hidden"))
        return gather_dim(gather_dim(total, SEQUENCE_DIM, mesh.along("sequence")), 0, mesh.along("batch"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Each of the sum's parts has the sum's own gradient.
        rows = own_slice(gradient, 0, ctx.mesh.along("batch"))
        return own_slice(rows, SEQUENCE_DIM, ctx.mesh.along("sequence")).contiguous(), None


class LabelsHead(ShardedModule, nn.Linear):
    """``[B/b, S/s, H/h]`` to ``[B, S, L]``; B and S as they were filled up for the mesh.

    Still an ``nn.Linear`` for whoever looks for one; ``in_features`` and ``out_features`` are the unsplit sizes.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, mesh: Mesh, layouts: dict[str, ShardingSpec]
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layouts["weight"].shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self.init_sharding(mesh, layouts)

    @uncompiled
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all positions, whole on every rank."""
        logits: torch.Tensor = nn.functional.linear(hidden, self.unsharded("weight"))
        if self.mesh.shape.size > 1:
            logits = _WholeSum.apply(logits, self.mesh)
        bias = whole_parameter(self, "bias")
        return logits if bias is None else logits + bias.to(logits.dtype)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, mesh={self.mesh.shape}"
