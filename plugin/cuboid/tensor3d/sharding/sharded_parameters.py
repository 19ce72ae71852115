"""Sharded parameters that several adapters keep under their names, as an ``nn.ParameterDict`` does."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam, take_whole
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard


class ShardedParameters(ShardedModule, nn.ParameterDict):
    """Small parameters by name, each cut by a spec of its own; :meth:`unsharded` gives the block of one.

    A dict of parameters, not of modules, so that a parameter has the name that it has in one process.
    """

    def __init__(self, mesh: Mesh) -> None:
        nn.ParameterDict.__init__(self)
        self.init_sharding(mesh, {})
        # A state dict of whole parameters, as adapters' files have them, is loaded into the shards.
        self.register_load_state_dict_pre_hook(take_whole)

    @property
    def gathered_once(self) -> Collection[str]:  # type: ignore[override]
        """All of them: they are small."""
        return self.sharded_params

    def take(self, name: str, full: nn.Parameter, spec: ShardingSpec, like: ShardedParam | None) -> None:
        """Keep this rank's shard of a whole parameter, unsharded and reduced as ``like``, another one of the model."""
        self[name] = nn.Parameter(take_shard(full.detach(), spec, self.mesh), requires_grad=full.requires_grad)
        self.sharded_params[name] = ShardedParam(spec, self.mesh)
        if like is not None:
            self.sharded_params[name].follow(like)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.sharded_params[name]
