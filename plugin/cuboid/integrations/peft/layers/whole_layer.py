"""PEFT's LoRA layer around a linear layer of a block that each rank computes whole."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.integrations.peft.layers.lora_layer import LoraOfShards, ShardedDora
from cuboid.tensor3d.layers.whole_block import cut_and_keep_whole
from cuboid.tensor3d.sharding.sharded_param import take_whole


class WholeLoraLinear(LoraOfShards):
    """As PEFT's own class, whose code runs on whole activations, with the factors cut over the mesh as their layer.

    While the block runs, its parameters are whole, and so are the factors, which are gathered with them.
    """

    def resolve_lora_variant(self, *, config: LoraConfig, **_: Any) -> LoraVariant | None:
        """As :meth:`LoraOfShards.resolve_lora_variant`, with PEFT's own forward."""
        return WholeDora() if config.use_dora else None

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter. See PEFT's ``LoraLayer.update_layer``."""
        super().update_layer(adapter_name, *args, **kwargs)
        base: Any = self.get_base_layer()
        for factors in (self.lora_A, self.lora_B, self.lora_magnitude_vector):
            if adapter_name not in factors:
                continue
            _cut(factors[adapter_name], base.mesh)
            factor: Any = factors[adapter_name]
            for param in factor.sharded_params.values():
                param.follow(base.sharded_params["weight"])

    def keep_magnitudes(self, adapter_name: str, norms: torch.Tensor) -> None:
        """Make a new DoRA adapter's magnitudes, whole yet."""
        magnitudes = DoraLinearLayer(fan_in_fan_out=False)
        magnitudes.register_parameter("weight", nn.Parameter(norms))
        self.lora_magnitude_vector[adapter_name] = magnitudes

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As PEFT's, ``[B/b, S, I]`` to ``[B/b, S, O]``.

        Raises:
            UnsupportedModelError: ``adapter_names`` gives rows different adapters.
        """
        if self.is_plain(kwargs):
            y: torch.Tensor = self.base_layer(x, *args, **kwargs)
            return y
        return super().forward(x, *args, **kwargs)


class WholeDora(ShardedDora):
    """As :class:`ShardedDora`, with PEFT's own forward, which computes with the whole weight."""

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        """See PEFT's ``DoraLinearVariant.forward``."""
        return DoraLinearVariant.forward(*args, **kwargs)


def _cut(factor: nn.Module, mesh: Mesh) -> None:
    cut_and_keep_whole(factor, mesh)
    # A state dict of whole factors, as PEFT's files have them, is loaded into the shards.
    factor.register_load_state_dict_pre_hook(take_whole)
