"""Adapters that are combined into a new one, ``add_weighted_adapter``, on a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.lora import LoraModel
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.integrations.peft.layers.experts_layer import ParamWrapper
from cuboid.tensor3d.sharding.full_params import whole_parameter
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import take_shard


def add_weighted(tuner: LoraModel, original: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """As ``LoraModel.add_weighted_adapter``, which would prune and decompose shards as if they were whole; collective.

    Each rank combines whole factors, which are small, and keeps its shards of the result.

    Raises:
        UnsupportedModelError: the combination has no rule.
    """
    model: Any = tuner.model
    model.cuboid.mesh.connect()
    options = {"combination_type": "svd", "svd_clamp": None, "svd_full_matrices": True, "svd_driver": None, **arguments}
    _check(tuner, options)
    checked, original_rule = tuner._check_add_weighted_adapter, tuner._generalized_task_arithmetic_weighted_adapter
    rule, new_rank = "", 0

    def check(adapters: list[str], combination_type: str, svd_rank: int | None) -> tuple[str, int, Any]:
        nonlocal rule, new_rank
        rule, new_rank, targets = checked(adapters, combination_type, svd_rank)
        # Of PEFT's three ways, the one that leaves all computing to the method that is replaced below.
        return "linear", new_rank, targets

    def combined(_: str, adapters: list[str], weights: list[float], target: Any, *rules: Any) -> list[torch.Tensor]:
        whole_layer = _WholeLayer(target, adapters, new_rank)
        if rule == "cat":
            a, b = whole_layer.concatenated(dict(zip(adapters, weights, strict=True)))
        elif rule.endswith("svd"):
            decompose: Callable[..., Any] = tuner._svd_generalized_task_arithmetic_weighted_adapter
            others = {"full_matrices": options["svd_full_matrices"], "driver": options["svd_driver"]}
            others["clamp"] = options["svd_clamp"]
            a, b = decompose(rule, adapters, weights, new_rank, whole_layer, None, None, *rules, **others)
        else:
            a, b = original_rule(rule, adapters, weights, whole_layer, *rules)
        return whole_layer.shards(options["adapter_name"], a, b)

    changed: Any = tuner
    changed._check_add_weighted_adapter, changed._generalized_task_arithmetic_weighted_adapter = check, combined
    try:
        original(tuner, **arguments)
    finally:
        del changed._check_add_weighted_adapter, changed._generalized_task_arithmetic_weighted_adapter


def _check(tuner: LoraModel, options: Mapping[str, Any]) -> None:
    asked, adapters = options["combination_type"], options["adapters"]
    configs: list[Any] = [tuner.peft_config[name] for name in adapters if name in tuner.peft_config]
    obstacle = None
    if asked.startswith("dare"):
        obstacle = "prunes at random, which ranks would do differently, and has no rule"
    elif any(config.use_dora for config in configs):
        obstacle = "has no rule for the magnitudes of DoRA"
    elif any(isinstance(module, ParamWrapper) for module in tuner.model.modules()):
        obstacle = "has no rule for target_parameters"
    if obstacle is not None:
        raise UnsupportedModelError(
            f"add_weighted_adapter(adapters={adapters}, combination_type={asked!r}) {obstacle} on a sharded model; "
            "combine the saved adapters in plain PEFT, and read the result"
        )


class _WholeLayer:
    """A layer with adapters as PEFT combines them: with whole factors.

    Args:
        layer: PEFT's, around a sharded layer or not.
        adapters: those to combine.
        new_rank: r of the new one.
    """

    def __init__(self, layer: Any, adapters: list[str], new_rank: int) -> None:
        self._layer, self._rank_of_new = layer, new_rank
        self.scaling = layer.scaling
        self.fan_in_fan_out = getattr(layer, "fan_in_fan_out", False)
        names = [name for name in adapters if name in layer.lora_A or name in layer.lora_embedding_A]
        #: A ``[r, in]`` and B ``[out, r]`` of each adapter that the layer has.
        self._factors = {name: self._whole(name) for name in names}
        # Where PEFT looks for them: an embedding's are parameters, other layers' are modules.
        as_a, as_b = ({name: factors[place] for name, factors in self._factors.items()} for place in (0, 1))
        self.lora_embedding_A, self.lora_embedding_B = (as_a, as_b) if self._is_embedding else ({}, {})
        self.lora_A, self.lora_B = ({}, {}) if self._is_embedding else (_as_modules(as_a), _as_modules(as_b))

    @property
    def _is_embedding(self) -> bool:
        return len(self._layer.lora_embedding_A) > 0

    @torch.no_grad()
    def _whole(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._is_embedding:
            # A is kept as rows of tokens.
            rows, b = (_full(x, name) for x in (self._layer.lora_embedding_A, self._layer.lora_embedding_B))
            return rows.t(), b
        return _full(self._layer.lora_A[name], "weight"), _full(self._layer.lora_B[name], "weight")

    def get_delta_weight(self, name: str) -> torch.Tensor:
        """As PEFT's."""
        a, b = self._factors[name]
        update = b @ a * self.scaling[name]
        return update.t() if self.fan_in_fan_out or self._is_embedding else update

    def concatenated(self, weights: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of all adapters as those of one, with zeros where the layer lacks an adapter."""
        a = torch.cat([factors[0] * weights[name] * self.scaling[name] for name, factors in self._factors.items()], 0)
        b = torch.cat([factors[1] for factors in self._factors.values()], 1)
        more = self._rank_of_new - len(a)
        return nn.functional.pad(a, (0, 0, 0, more)), nn.functional.pad(b, (0, more))

    def shards(self, name: str, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        """The rank's shards of a new adapter's whole factors."""
        if self._is_embedding:
            rows, others = self._layer.lora_embedding_A, self._layer.lora_embedding_B
            return [_part(rows, name, a.t()), _part(others, name, b)]
        return [_part(self._layer.lora_A[name], "weight", a), _part(self._layer.lora_B[name], "weight", b)]


def _as_modules(tensors: Mapping[str, torch.Tensor]) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(weight=x) for name, x in tensors.items()}


def _full(owner: nn.Module, name: str) -> torch.Tensor:
    if not isinstance(owner, ShardedModule):
        return owner.get_parameter(name).detach()
    full = whole_parameter(owner, name)
    assert full is not None
    return full


def _part(owner: Any, name: str, full: torch.Tensor) -> torch.Tensor:
    return take_shard(full, owner.spec(name), owner.mesh) if isinstance(owner, ShardedModule) else full
