"""Patches of ColossalAI, if it is installed."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.models.sharded.sharded_model import ShardedModel, unwrap
from cuboid_patches.base import Patch

#: Plugins that leave a model as it is, or wrap it by torch's DistributedDataParallel, which averages over replicas.
_TAKING = ("CuboidPlugin", "NoneType", "TorchDDPPlugin")


def _boost(original: Any) -> Any:
    @functools.wraps(original)
    def boost(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = [base.__name__ for base in type(self.plugin).__mro__]
        inner: Any = unwrap(model) if isinstance(model, nn.Module) else model
        is_cut = isinstance(inner, ShardedModel) and len(inner.cuboid.mesh.copy_ranks) > 1
        if is_cut and not any(name in kinds for name in _TAKING):
            raise UnsupportedModelError(
                f"{kinds[0]} takes all ranks for replicas that have the same parameters, but those of a sharded "
                f"{type(inner).__name__} have different shards: give Booster(plugin=cuboid.CuboidPlugin(config))"
            )
        return original(self, model, *args, **kwargs)

    return boost


PATCHES = [
    Patch(
        target="colossalai.booster.booster:Booster.boost",
        package="colossalai",
        reason="refuse plugins that would average the shards of different ranks",
        parameters=("self", "model"),
        replace=_boost,
    ),
]
