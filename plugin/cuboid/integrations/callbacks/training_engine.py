"""What a callback is given of a training: the engine around the model, and its mesh."""

from __future__ import annotations

from typing import Any

from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.models.sharded.sharded_model import ShardedModel, unwrap


def engine_of(model: nn.Module | None) -> Any:
    """The engine around a sharded model; None if the model isn't sharded, or has no engine."""
    inner: Any = None if model is None else unwrap(model)
    if not isinstance(inner, ShardedModel) or inner.cuboid.state.engine is None:
        return None
    return inner.cuboid.state.engine()


def mesh_if_sharded(model: nn.Module | None) -> Mesh | None:
    """The mesh of a model, if it is sharded."""
    inner: Any = None if model is None else unwrap(model)
    return inner.cuboid.mesh if isinstance(inner, ShardedModel) else None
