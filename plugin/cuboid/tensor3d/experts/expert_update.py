"""A low-rank update of the weights of all experts of a layer, or of its router, from factors that ranks gather whole.

With E experts, A is ``[E·r, I]`` and B ``[O, r·E]``: expert e's update is ``B[:, :, e] A[e]``; a router's is that of a
single expert. A rank computes that of its own shard of the weights, and multiplies with their sum. Its gradients of A
and B are partial sums over the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.low_rank import take_shards
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, unshard_parameter
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, shard_boxes


class ExpertFactor(ShardedModule, nn.Linear):
    """A factor whose rows are cut over all axes."""

    gathered_once = ("weight",)

    def __init__(self, factor: nn.Linear, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = factor.in_features, factor.out_features
        self.register_parameter("bias", None)
        take_shards(self, factor, {"weight": ShardingSpec(tuple(factor.weight.shape), ((), ()))}, mesh)


class UpdatedModule(ShardedModule):
    """A module to whose parameters an update may be added in a forward.

    Attributes:
        updates: by the parameter's name, what is added to this rank's shard of it.
    """

    updates: dict[str, torch.Tensor]

    @contextmanager
    def updated(self, name: str, update: torch.Tensor) -> Iterator[None]:
        """In the ``with`` block, ``update`` is added to this rank's shard of a weight, differentiably.

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
        parameter = self.get_parameter(name)
        return unshard_parameter(parameter + self.updates[name].to(parameter.dtype), self.sharded_params[name])


def shard_of_update(
    a: torch.Tensor, b: torch.Tensor, spec: ShardingSpec, mesh: Mesh, *, in_first: bool
) -> torch.Tensor:
    """The rank's shard of the updates, differentiably.

    Args:
        a: whole, ``[E·r, I]``.
        b: whole, ``[O, r·E]``.
        spec: of the experts' weights, or of a router's ``[O, I]``.
        mesh: this rank's mesh.
        in_first: whether the experts' weights are ``[E, I, O]`` instead of ``[E, O, I]``.
    """
    if len(spec.shape) == 2:
        update = a.new_zeros(spec.shard_shape(mesh.shape))
        for here, (out, into) in shard_boxes(spec, mesh.shape, mesh.coordinate):
            update[here] = b[out] @ a[:, into]
        return update
    count = spec.shape[0]
    by_expert = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1)
    update = a.new_zeros(spec.shard_shape(mesh.shape))
    for here, (experts, *dims) in shard_boxes(spec, mesh.shape, mesh.coordinate):
        into, out = dims if in_first else dims[::-1]
        # [e, r, i] and [e, o, r]
        factor_a, factor_b = by_expert[0][experts, :, into], by_expert[1][experts, out]
        box = factor_b @ factor_a
        update[here] = box.transpose(1, 2) if in_first else box
    return update
