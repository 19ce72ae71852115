"""Per-head parameters: tables such as T5's relative position biases, or one number per head such as GPT-OSS's sinks.

A table ``[R, A]`` or a vector ``[A]`` is cut along its A heads over `sequence`, then `hidden`, as are the scores that
it is added to. Indices of rows must be the same on all ranks along `sequence` and `hidden`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


class HeadBias(ShardedModule, nn.Embedding):
    """``[...]`` indices of rows to ``[..., A/(s·h)]``: biases of the rank's own heads."""

    # As norm weights: it is small, and the lookup's backward doesn't need its values.
    gathered_once = ("weight",)
    # As in `ShardedEmbedding`.
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(self, old: nn.Embedding, weight: nn.Parameter, *, mesh: Mesh, specs: dict[str, ShardingSpec]) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = specs["weight"].shape
        self.padding_idx = old.padding_idx
        self.weight = weight
        self.init_sharding(mesh, specs)

    @uncompiled
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up ``rows``."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        return nn.functional.embedding(rows, self.unsharded("weight"), self.padding_idx)

    def extra_repr(self) -> str:
        """Unsplit sizes and the mesh."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mesh={self.mesh.shape}"


class PerHeadParameters(ShardedModule):
    """Mixin for an attention class that has a parameter ``[A]`` itself; the class's own code runs unchanged."""

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with ``[A/(s·h)]`` in place of ``[A]``."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        with self.unsharded_in_place():
            return super().forward(*args, **kwargs)
