"""How many parameters a model with adapters has, and trains: PEFT's numbers, of the whole model on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

from cuboid.models.plain_construction import plain_construction
from cuboid.models.sharded.sharded_model import plain_class, unwrap
from cuboid.models.stages.stage_model import StageModel


def trained_and_all(peft_model: PeftModel, count: Callable[[Any], tuple[int, int]]) -> tuple[int, int]:
    """The numbers of parameters that are trained, and of all of them.

    No rank waits for another, since scripts print them on one. So a stage counts what others have in a whole model on
    the meta device with the same adapters; there it supposes that they train what PEFT lets them.

    Args:
        peft_model: around a sharded model.
        count: PEFT's own, of a model that isn't sharded.
    """
    inner: Any = unwrap(peft_model)
    is_stage = isinstance(inner, StageModel)
    if not is_stage:
        return inner.num_parameters(only_trainable=True), inner.num_parameters()
    tuner: Any = peft_model.base_model
    has_layers = isinstance(tuner, BaseTuner)
    asked = asked_targets(tuner) if has_layers else {}
    with plain_construction(), torch.device("meta"):
        counted: Any = plain_class(type(inner))(inner.config)
        for number, (name, config) in enumerate(peft_model.peft_config.items()):
            config = copy.deepcopy(config)
            if name in asked:
                config.target_modules = asked[name]  # type: ignore[attr-defined]
            if isinstance(config, PromptTuningConfig):
                # A text's tokens would be looked up in the embedding.
                config.prompt_tuning_init = "RANDOM"  # type: ignore[assignment]
            if number == 0:
                counted = get_peft_model(counted, config, name, low_cpu_mem_usage=True)
            else:
                counted.add_adapter(name, config, low_cpu_mem_usage=True)
    if has_layers:
        counted.base_model.set_adapter(peft_model.active_adapters)
        if any(isinstance(layer, BaseTunerLayer) and layer.disable_adapters for layer in inner.modules()):
            counted.base_model.disable_adapter_layers()
    trains = {f"{_prefix(counted)}{name}": p.requires_grad for name, p in inner.named_parameters()}
    for name, parameter in counted.named_parameters():
        parameter.requires_grad_(trains.get(name, parameter.requires_grad))
    return count(counted)


def asked_targets(tuner: Any) -> dict[str, Any]:
    """``target_modules`` of adapters that are a text, as they were asked for, by the adapters' names.

    Of "all-linear", PEFT makes the names of a stage's layers.
    """
    targets: dict[str, Any] = vars(tuner).setdefault("cuboid_asked_targets", {})
    return targets


def _prefix(counted: Any) -> str:
    base = counted.get_base_model()
    return next(f"{name}." for name, module in counted.named_modules() if module is base)
