"""A low-rank update of the weights of all experts of a layer, or of its router, from factors that ranks gather whole.

With E experts, A is ``[E·r, I]`` and B ``[O, r·E]``: expert e's update is ``B[:, :, e] A[e]``; a router's is that of a
single expert. A rank adds that of the block that it multiplies with, rather than of its shard: the block's gradient
then gives those of A and B at once, as partial sums over the mesh, and only these are sent. Gradients of updated
shards would be as large as the weights'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.low_rank import take_shards
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, unshard_parameter
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, block_boxes, shard_boxes


class ExpertFactor(ShardedModule, nn.Linear):
    """A factor whose rows are cut over all axes."""

    gathered_once = ("weight",)

    def __init__(self, factor: nn.Linear, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = factor.in_features, factor.out_features
        self.register_parameter("bias", None)
        take_shards(self, factor, {"weight": ShardingSpec(tuple(factor.weight.shape), ((), ()))}, mesh)


@dataclass(frozen=True)
class LowRankUpdate:
    """The updates of all experts, or of a router, from whole factors.

    Args:
        a: ``[E, r, I]``.
        b: ``[E, O, r]``, scaled.
        spec: of the experts' weights, or of a router's ``[O, I]``, whose E is 1.
        mesh: this rank's mesh.
        in_first: whether the experts' weights are ``[E, I, O]`` instead of ``[E, O, I]``.
    """

    a: torch.Tensor
    b: torch.Tensor
    spec: ShardingSpec
    mesh: Mesh
    in_first: bool

    @staticmethod
    def by_expert(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors ``[E·r, I]`` and ``[O, r·E]`` of ``count`` experts, as ``[E, r, I]`` and ``[E, O, r]``."""
        return a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1)

    def shard(self) -> torch.Tensor:
        """That of this rank's shard."""
        update = self.a.new_zeros(self.spec.shard_shape(self.mesh.shape))
        for here, features in shard_boxes(self.spec, self.mesh.shape, self.mesh.coordinate):
            update[here] = self._product(features)
        return update

    def add_to(self, block: torch.Tensor) -> torch.Tensor:
        """The sum of the weights' block and its update; differentiable."""
        updated = block.clone()
        for here, features in block_boxes(self.spec, self.mesh.shape, self.mesh.coordinate):
            updated[here] += self._product(features).to(block.dtype)
        return updated

    def gradients(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of ``a`` and ``b``, partial sums over the mesh, from that of a block of experts."""
        da, db = torch.zeros_like(self.a), torch.zeros_like(self.b)
        for here, features in block_boxes(self.spec, self.mesh.shape, self.mesh.coordinate):
            experts, out, into = self._out_in(features)
            # [E, o, i]
            part = (block[here].transpose(1, 2) if self.in_first else block[here]).to(self.a.dtype)
            da[experts, :, into] += self.b[experts, out].transpose(1, 2) @ part
            db[experts, out] += part @ self.a[experts, :, into].transpose(1, 2)
        return da, db

    def _out_in(self, features: tuple[slice, ...]) -> tuple[slice, slice, slice]:
        """Slices of experts, out and in features, from those of the weights' dims."""
        experts, *dims = features
        out, into = dims[::-1] if self.in_first else dims
        return experts, out, into

    def _product(self, features: tuple[slice, ...]) -> torch.Tensor:
        if len(features) == 2:
            out, into = features
            return self.b[0, out] @ self.a[0, :, into]
        experts, out, into = self._out_in(features)
        box = self.b[experts, out] @ self.a[experts, :, into]
        return box.transpose(1, 2) if self.in_first else box


class UpdatedModule(ShardedModule):
    """A module to whose parameters an update may be added in a forward.

    Attributes:
        updates: by the parameter's name, what is added to it.
    """

    updates: dict[str, LowRankUpdate]

    @contextmanager
    def updated(self, name: str, update: LowRankUpdate) -> Iterator[None]:
        """In the ``with`` block, ``update`` is added to a weight, differentiably.

        The weight must not be prefetched.
        """
        self.updates[name] = update
        try:
            yield
        finally:
            del self.updates[name]

    def unsharded(self, name: str) -> torch.Tensor:
        """The block of a small parameter and its update, differentiably."""
        if name not in self.updates:
            return super().unsharded(name)
        return self.updates[name].add_to(unshard_parameter(getattr(self, name), self.sharded_params[name]))
