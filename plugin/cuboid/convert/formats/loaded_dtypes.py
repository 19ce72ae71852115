"""The dtypes that a checkpoint's tensors have once transformers has loaded them in another dtype.

Not all are cast: models name modules that stay in float32 (the correction bias of routers, whose differences bfloat16
would round away), and have parameters with a dtype of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, core_model_loading

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.convert.formats.parameter_names import load_targets
from cuboid.errors import CheckpointError
from cuboid.weights.model_folder import as_damage_of, model_config


def dtypes_when_loaded(config: Path, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each floating-point tensor after ``from_pretrained(…, dtype=dtype)``, by the checkpoint's names.

    Args:
        config: the model's ``config.json``, or a folder with one.
        specs: dtypes and shapes of the checkpoint's tensors.
        dtype: the one to load in.

    Raises:
        CheckpointError: transformers has no class for the model, so that it isn't known which tensors would be rounded
            and shouldn't be.
    """
    floating = {name: spec for name, spec in specs.items() if spec.dtype.is_floating_point}
    try:
        model = _blank_model(config, dtype)
    except CheckpointError as error:
        if all(torch.promote_types(spec.dtype, dtype) is dtype for spec in floating.values()):
            # Rounds nothing, whatever the model is.
            return dict.fromkeys(floating, dtype)
        text = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{error}; so it isn't known which of its tensors stay in float32 when others are rounded to {text}: leave "
            "--dtype out, or convert to float32"
        ) from error
    blank_state: dict[str, Any] = model.state_dict()
    dtype_plan = model._get_dtype_plan(dtype)
    pattern = core_model_loading.build_glob_alternation(list(dtype_plan))[0] if dtype_plan else None
    targets = load_targets(model, specs)

    def loaded(name: str) -> torch.dtype:
        if name not in targets:
            return dtype
        parameter = targets[name].parameter
        match = None if pattern is None else pattern.search(parameter)
        if match is None:
            declared: torch.dtype = blank_state[parameter].dtype
            return declared
        # The pattern's groups are g0, g1, … in the order of the plan.
        assert match.lastgroup is not None
        of_module: torch.dtype = list(dtype_plan.values())[int(match.lastgroup[1:])]
        return of_module

    return {name: loaded(name) for name in floating}


def _blank_model(config: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config on the meta device, made as for loading in a dtype; an error if transformers can't."""
    # A conversion must not run code that comes with a checkpoint.
    settings = model_config(config, trust_remote_code=False)
    cls = _class_of(settings)
    if cls is None:
        raise CheckpointError(f"{config}: transformers has no class for models of type {settings.model_type}")
    with as_damage_of(config), torch.device("meta"):
        model: PreTrainedModel = cls._from_config(settings, dtype=dtype)
    return model


def _class_of(settings: PretrainedConfig) -> Any:
    """The class that a config names, else the one for language modelling, else the one without a head."""
    named = getattr(transformers, next(iter(settings.architectures or ()), ""), None)
    if isinstance(named, type) and issubclass(named, PreTrainedModel):
        return named
    known = (AutoModelForCausalLM._model_mapping, AutoModel._model_mapping)
    model_class = next((mapping[type(settings)] for mapping in known if type(settings) in mapping), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class
