"""Small modules that need all of their parameters on every rank, such as the per-head norms of Qwen3.

Each rank keeps its shard; a forward gathers the parameters and runs the module's own code on them.
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


class UnshardedModule(ShardedModule):
    """Runs ``template`` (on the meta device: only its code is used) with gathered parameters."""

    def __init__(
        self,
        template: nn.Module,
        parameters: dict[str, nn.Parameter],
        *,
        mesh: Mesh,
        specs: dict[str, ShardingSpec],
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        # In a tuple, so that the template's parameters don't become this module's.
        self._template = (template,)
        self.init_sharding(mesh, specs)

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the template's forward."""
        if not forward_runs():
            check_called_inside(self, self.mesh)
        parameters = {name: self.unsharded(name) for name in self.sharded_params}
        return torch.func.functional_call(self._template[0], parameters, args, kwargs)

    def extra_repr(self) -> str:
        """The wrapped class and the mesh."""
        return f"{type(self._template[0]).__name__}, mesh={self.mesh.shape}"
