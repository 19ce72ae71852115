"""A head with few outputs, such as a classifier's or a reward model's: every rank gets the whole logits.

Its weight ``[L, H]`` is cut over `hidden` as the hidden states are. Each rank multiplies its own features; the partial
sums, which are small, are all-reduced over `hidden` and all-gathered over `sequence` and `batch`. The model's own code
that follows (pooling by the last token, a loss) computes the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM, all_reduce, gather_dim, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class _WholeSum(torch.autograd.Function):
    """Partial sums ``[B/b, S/s, L]`` to the whole ``[B, S, L]``, from which all ranks then compute the same."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        total = all_reduce(part.clone(), mesh.along("hidden"))
        return gather_dim(gather_dim(total, SEQUENCE_DIM, mesh.along("sequence")), 0, mesh.along("batch"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A partial sum has the gradient of the sum, which every rank has for all positions: nothing to reduce.
        rows = own_slice(gradient, 0, ctx.mesh.along("batch"))
        return own_slice(rows, SEQUENCE_DIM, ctx.mesh.along("sequence")).contiguous(), None


class LabelsHead(ShardedModule, nn.Linear):
    """``[B/b, S/s, H/h]`` to ``[B, S, L]``; B and S include the padding for the mesh.

    Still an ``nn.Linear`` for code that checks its class; ``in_features`` and ``out_features`` are the unsplit sizes.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, mesh: Mesh, specs: dict[str, ShardingSpec]
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = specs["weight"].shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self.init_sharding(mesh, specs)

    @uncompiled
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B/b, S/s, H/h]`` to the logits of all positions, ``[B, S, L]``, on every rank."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        logits: torch.Tensor = nn.functional.linear(hidden, self.unsharded("weight"))
        if self.mesh.shape.size > 1:
            logits = _WholeSum.apply(logits, self.mesh)
        bias = whole_parameter(self, "bias")
        return logits if bias is None else logits + bias.to(logits.dtype)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, mesh={self.mesh.shape}"
