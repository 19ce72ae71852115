"""LoRA by PEFT as plans and estimates count it: on a model without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from cuboid.errors import ConfigError
from cuboid.integrations.peft.adapters import register_layers
from cuboid.planner.description.trunk import Factors

_NAME = "default"


@dataclass(frozen=True)
class PlannedLora:
    """LoRA of linear layers, as ``LoraConfig(r=…, target_modules=…)`` has it.

    Args:
        r: rank of the updates.
        target_modules: PEFT's: names, or ``"all-linear"``.
    """

    r: int
    target_modules: str | tuple[str, ...] = "all-linear"

    def __str__(self) -> str:
        targets = self.target_modules
        return f"LoRA of rank {self.r} on {targets if isinstance(targets, str) else ', '.join(targets)}"

    def factors_of(self, model: PreTrainedModel) -> Mapping[str, Factors]:
        """See :class:`~cuboid.planner.description.trunk.PlannedAdapters`.

        Raises:
            ConfigError: no module has one of the names, or one isn't a linear layer.
        """
        adapted = self._in(copy.deepcopy(model), self._config(), low_cpu_mem_usage=True)
        factors: dict[str, Factors] = {}
        for name, module in adapted.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            plain_name = name.replace(".base_layer", "")
            if _NAME not in module.lora_A:
                raise ConfigError(
                    f"{plain_name} is one of the adapter's target_modules, and plans count adapters of linear layers: "
                    "leave it out"
                )
            a, b = (of_name[_NAME].get_parameter("weight") for of_name in (module.lora_A, module.lora_B))
            one = Factors(a.shape[0], b.shape[0], a.numel(), b.numel())
            # Experts have a layer around another for each of their weights.
            factors[plain_name] = factors[plain_name] + one if plain_name in factors else one
        return factors

    def put_into(self, model: PreTrainedModel) -> None:
        """See :class:`~cuboid.planner.description.trunk.PlannedAdapters`."""
        config = self._config()
        register_layers(config)
        self._in(model, config)

    def _config(self) -> LoraConfig:
        targets = self.target_modules
        return LoraConfig(r=self.r, target_modules=targets if isinstance(targets, str) else list(targets))

    def _in(self, model: PreTrainedModel, config: LoraConfig, **options: Any) -> nn.Module:
        try:
            return inject_adapter_in_model(config, model, _NAME, **options)
        except ValueError as error:
            # PEFT's own: no module has these names, or a layer of another kind has.
            raise ConfigError(f"{self}: {' '.join(str(error).split())[:300]}") from error
