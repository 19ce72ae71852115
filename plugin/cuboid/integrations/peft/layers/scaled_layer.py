"""PEFT's IA³ layer around a sharded linear layer."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import ia3
from peft.tuners.ia3 import IA3Config
from peft.tuners.tuners_utils import check_adapters_to_merge

from cuboid.integrations.peft.layers.adapted_layer import AdaptedLayer, check_finite, check_mergeable
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.scaling import input_spec, output_spec
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_parameters import ShardedParameters
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes


class ShardedIA3Linear(AdaptedLayer, ia3.Linear):
    """As PEFT's own class, with the vector of each adapter cut as the layer's features are."""

    base_layer: ShardedLinear

    def update_layer(self, adapter_name: str, config: IA3Config, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``IA3Layer.update_layer``."""
        base: Any = self.get_base_layer()
        vectors: Any = self.ia3_l
        if not isinstance(vectors, ShardedParameters):
            vectors = ShardedParameters(base.mesh)
        # PEFT makes the whole vector, the same on every rank and as in one process, of which each keeps its shard.
        self.ia3_l = torch.nn.ParameterDict()
        super().update_layer(adapter_name, config, **kwargs)
        whole_vector: Any = self.ia3_l[adapter_name]
        self.ia3_l = vectors
        spec = input_spec(base) if self.is_feedforward else output_spec(base)
        assert spec is not None, "checked before layers are put in"
        vectors.take(adapter_name, whole_vector, spec, base.sharded_params["weight"])
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output, with the vectors of the active adapters."""
        is_plain, scaling = self.is_plain(kwargs), self._scaling()
        if is_plain or scaling is None:
            return self.base_layer(x, *args)
        if self.is_feedforward:
            return self.base_layer((x.to(scaling.dtype) * scaling).to(x.dtype), *args)
        result: torch.Tensor = self.base_layer(x, *args)
        return (result * scaling).to(result.dtype)

    def _scaling(self) -> torch.Tensor | None:
        """The product of the active adapters' vectors, for the rank's features; None if there are none."""
        vectors: Any = self.ia3_l
        rows: Any = None if self.is_feedforward else self.get_base_layer().bias_rows
        scaling: torch.Tensor | None = None
        for name in self.active_adapters:
            if name in vectors:
                block = vectors.unsharded(name).flatten()
                block = block if rows is None else block[rows]
                scaling = block if scaling is None else scaling * block
        return scaling

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Multiply the weight's shard, and the bias's, with vectors; collective. See PEFT's ``Linear.merge``."""
        check_mergeable(self)
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.ia3_l:
                vector = self._whole_vector(name)
                if safe_merge:
                    check_finite(vector, name)
                self._multiply(vector)
                self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Divide by the vectors again, about as exactly as PEFT's ``Linear.unmerge``; collective."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.ia3_l:
                self._multiply((self._whole_vector(name) + 1e-8).reciprocal())

    def _whole_vector(self, adapter: str) -> torch.Tensor:
        vectors: Any = self.ia3_l
        # Adapters may be merged before anything else has connected the ranks.
        vectors.mesh.connect()
        vector = whole_parameter(vectors, adapter)
        assert vector is not None
        return vector.flatten()

    def _multiply(self, vector: torch.Tensor) -> None:
        base: Any = self.get_base_layer()
        # Of GPT-2's weights, the first dim is the input's.
        dim = int(self.is_feedforward is not base.product.in_first)
        for name in ("weight",) if self.is_feedforward or base.bias is None else ("weight", "bias"):
            parameter = base.get_parameter(name)
            for here, there in shard_boxes(base.spec(name), base.mesh.shape, base.mesh.coordinate):
                factors = vector[there[dim if name == "weight" else 0]]
                shape = (-1, 1) if name == "weight" and dim == 0 else (-1,)
                parameter[here] = (parameter[here] * factors.view(shape)).to(parameter.dtype)
