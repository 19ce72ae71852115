"""Numbers for each attention head: tables such as T5's biases by the distance of two positions, and GPT-OSS's sinks.

A table ``[R, A]``, or one number for each head ``[A]``, is cut over `sequence`, then `hidden`, along its heads, as the
scores are to which its numbers are added. Rows may be looked up by anything that the ranks of a row of the mesh have
alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class HeadBias(ShardedModule, nn.Embedding):
    """``[...]`` rows to ``[..., A/(s·h)]``: numbers of the rank's own heads."""

    # As norms': it is small, and autograd needs no more of it than its rows.
    gathered_once = ("weight",)

    def __init__(
        self, old: nn.Embedding, weight: nn.Parameter, *, mesh: Mesh, layouts: dict[str, ShardingSpec]
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = layouts["weight"].shape
        self.padding_idx = old.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = weight
        self.init_sharding(mesh, layouts)

    @uncompiled
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up ``rows``."""
        return nn.functional.embedding(rows, self.unsharded("weight"), self.padding_idx)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mesh={self.mesh.shape}"


class PerHeadParameters(ShardedModule):
    """Mixed into the class of attention that has a parameter ``[A]`` itself, whose code stays its own."""

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with ``[A/(s·h)]`` in place of ``[A]``."""
        with self.unsharded_in_place():
            return super().forward(*args, **kwargs)
