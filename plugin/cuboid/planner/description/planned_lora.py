"""LoRA by PEFT as plans and estimates count it: on a model without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from cuboid.errors import ConfigError
from cuboid.planner.description.trunk import Factors

_NAME = "default"
#: Further fields of a ``LoraConfig`` that decide which factors there are.
_FURTHER = (*("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "target_parameters"),)


class CountedLora(LoraConfig):
    """A config of adapters that are only counted, on a model without values that isn't a ``ShardedModel``.

    By its mark the patch of PEFT knows that sharded layers in it get Cuboid's adapters, as those of a ``ShardedModel``.
    """

    is_for_counts = True


@dataclass(frozen=True)
class PlannedLora:
    """LoRA of linear layers, as ``LoraConfig(r=…, target_modules=…)`` has it.

    Args:
        r: rank of the updates.
        target_modules: PEFT's: names, ``"all-linear"`` or another regular expression; None for its own choice.
        further: names and values of other fields.
    """

    r: int
    target_modules: str | tuple[str, ...] | None = "all-linear"
    further: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, config: LoraConfig) -> PlannedLora:
        """The adapter that PEFT makes of a config."""
        targets: str | Sequence[str] | None = config.target_modules
        values = ((name, getattr(config, name)) for name in _FURTHER)
        return cls(
            config.r,
            targets if targets is None or isinstance(targets, str) else tuple(sorted(targets)),
            tuple((name, value) for name, value in values if value),
        )

    def __str__(self) -> str:
        targets = self.target_modules or "PEFT's own choice of layers"
        text = f"LoRA of rank {self.r} on {targets if isinstance(targets, str) else ', '.join(sorted(targets))}"
        return text + "".join(f", {name}={value!r}" for name, value in self.further)

    def factors_of(self, model: PreTrainedModel) -> Mapping[str, Factors]:
        """See :class:`~cuboid.planner.description.trunk.PlannedAdapters`.

        Raises:
            ConfigError: no module has one of the names, or one isn't a linear layer.
        """
        adapted = self._in(copy.deepcopy(model), LoraConfig(**self._fields), low_cpu_mem_usage=True)
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
        self._in(model, CountedLora(**self._fields))

    @property
    def _fields(self) -> dict[str, Any]:
        targets = self.target_modules
        names = list(targets) if isinstance(targets, tuple) else targets
        return {"r": self.r, "target_modules": names, **dict(self.further)}

    def _in(self, model: PreTrainedModel, config: LoraConfig, **options: Any) -> nn.Module:
        try:
            return inject_adapter_in_model(config, model, _NAME, **options)
        except ValueError as error:
            # PEFT's own: no module has these names, or a layer of another kind has.
            raise ConfigError(f"{self}: {' '.join(str(error).split())[:300]}") from error
