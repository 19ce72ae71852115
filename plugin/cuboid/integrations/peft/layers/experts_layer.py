"""PEFT's LoRA layers around a module of experts, or a router, for one of its parameters (``target_parameters``), and
around a router, or the gate of a shared expert, that is a linear layer (``target_modules``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraConfig, layer
from torch import nn

from cuboid.distributed.axis_collectives import own_slice
from cuboid.integrations.peft.layers.adapted_layer import AdaptedLayer
from cuboid.integrations.peft.layers.lora_layer import LoraOfShards
from cuboid.integrations.peft.seeding import seeded_for
from cuboid.tensor3d.experts.expert_update import ExpertFactor, LowRankUpdate
from cuboid.tensor3d.experts.router import summed_linear
from cuboid.tensor3d.layers.dropout import ShardedDropout
from cuboid.tensor3d.sharding.full_params import whole_parameter


# PEFT goes by the name of the class where a module has adapters of several parameters.
class ParamWrapper(AdaptedLayer, layer.ParamWrapper):
    """As PEFT's own class, around a module that is cut over the mesh."""

    def _get_in_out_features(self, module: nn.Module) -> Any:  # noqa: ARG002
        base: Any = self.get_base_layer()
        shape = base.spec(self.parameter_name).shape
        self._param_ndim = len(shape)
        # PEFT swaps the last two of experts' weights that aren't transposed.
        self.num_experts, in_features, out_features = shape if len(shape) == 3 else (1, *shape[::-1])
        return in_features, out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``ParamWrapper.update_layer``."""
        base: Any = self.get_base_layer()
        # PEFT makes whole factors, the same on every rank and as in one process, of which each keeps its shards.
        with seeded_for(base):
            super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)
        weight = base.sharded_params[self.parameter_name]
        for factors in (self.lora_A, self.lora_B):
            whole_factor: Any = factors[adapter_name]
            factor = ExpertFactor(whole_factor, base.mesh)
            factor.sharded_params["weight"].follow(weight)
            factors[adapter_name] = factor
        # The module multiplies with the sum of weight and update, so neither a gather of the weight that was started
        # before nor a block that was kept is of use.
        base.is_prefetched = False
        weight.optimizer_steps = weight.copies_of_step = None
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's output, with the updates of the active adapters."""
        base: Any = self.get_base_layer()
        if base.mesh.shape.size == 1:
            return super().forward(x, *args, **kwargs)
        names = [] if self.is_plain(kwargs) else [name for name in self.active_adapters if name in self.lora_A]
        if not names:
            return self.base_layer(x, *args, **kwargs)
        factors: list[tuple[Any, Any]] = [(self.lora_A[name], self.lora_B[name]) for name in names]
        unsharded = [(a.unsharded("weight"), b.unsharded("weight")) for a, b in factors]
        with base.updated(self.parameter_name, self._update(unsharded, names)):
            return self.base_layer(x, *args, **kwargs)

    def _update(self, factors: Sequence[tuple[Any, Any]], names: Sequence[str]) -> LowRankUpdate:
        """The sum of some adapters' updates, from their whole factors."""
        base: Any = self.get_base_layer()
        spec = base.spec(self.parameter_name)
        by_expert = [LowRankUpdate.by_expert(a, b, self.num_experts) for a, b in factors]
        all_a = torch.cat([a for a, _ in by_expert], dim=1)
        all_b = torch.cat([b * self.scaling[name] for (_, b), name in zip(by_expert, names, strict=True)], dim=2)
        in_first = len(spec.shape) == 3 and not self._did_swap_in_out_features
        return LowRankUpdate(all_a, all_b, spec, base.mesh, in_first)

    @torch.no_grad()
    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        """This rank's shard of the adapter's update of the weights; collective."""
        base: Any = self.get_base_layer()
        if base.mesh.shape.size == 1:
            return super().get_delta_weight(adapter_name, *args, **kwargs)
        # Adapters may be merged before anything else has connected the ranks.
        base.mesh.connect()
        factors: tuple[Any, Any] = self.lora_A[adapter_name], self.lora_B[adapter_name]
        a, b = (whole_parameter(factor, "weight") for factor in factors)
        return self._update([(a, b)], [adapter_name]).shard().to(base.get_parameter(self.parameter_name).dtype)


class RouterLoraLinear(LoraOfShards):
    """As PEFT's own class, around a linear layer that gives a few numbers for each of the rank's tokens.

    As its layer's, the product with A sums the ranks' parts of the features, and the factors are gathered whole.
    """

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        super().update_layer(adapter_name, *args, **kwargs)
        base: Any = self.get_base_layer()
        for factors in (self.lora_A, self.lora_B):
            whole_factor: Any = factors[adapter_name]
            factor = ExpertFactor(whole_factor, base.mesh)
            for param in factor.sharded_params.values():
                param.follow(base.sharded_params["weight"])
            factors[adapter_name] = factor
        dropout = self.lora_dropout[adapter_name]
        if isinstance(dropout, nn.Dropout):
            self.lora_dropout[adapter_name] = ShardedDropout(dropout.p, base.mesh)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The scores with the updates of the active adapters, ``[…, H/h]`` to ``[…, E]``.

        Raises:
            UnsupportedModelError: ``adapter_names`` gives rows different adapters.
        """
        is_plain = self.is_plain(kwargs)
        result: torch.Tensor = self.base_layer(x, *args)
        if is_plain:
            return result
        base: Any = self.get_base_layer()
        hidden, total = base.mesh.along("hidden"), result
        for name in self.active_adapters:
            if name in self.lora_A:
                factors: tuple[Any, Any] = self.lora_A[name], self.lora_B[name]
                a, b = (factor.unsharded("weight") for factor in factors)
                features = self.lora_dropout[name](self._cast_input_dtype(x, a.dtype))
                scores = summed_linear(features, own_slice(a, 1, hidden), hidden)
                total = total + nn.functional.linear(scores, b) * self.scaling[name]
        return total.to(result.dtype)


def lora_of_router(target: nn.Module, adapter_name: str, **options: Any) -> nn.Module:
    """The layer around a router: of one of its parameters if that is named, or else of a linear layer."""
    if options.get("parameter_name") is not None:
        return ParamWrapper(target, adapter_name, **options)
    return RouterLoraLinear(target, adapter_name, **options)
