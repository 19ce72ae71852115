"""Check a folder of PEFT before PEFT reads it: its config's options and their types, and the names of its tensors."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, TaskType
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

from cuboid.checkpoint.format.bounded_files import read_object, reject_outward_links
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.integrations.peft.adapter_files import PREFIX
from cuboid.integrations.peft.adapters import check_adapter


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _is_names(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list) and all(isinstance(item, str) for item in x))


def _is_layers(x: Any) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in (x if isinstance(x, list) else [x]))


def _is_tokens(x: Any) -> bool:
    if isinstance(x, dict):
        return all(isinstance(tokens, list) and _is_tokens(tokens) for tokens in x.values())
    return isinstance(x, list) and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in x)


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _by_pattern(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(map(is_value, x.values()))


#: What an option may be, besides null, in words and as a test.
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a positive integer", _is_count),
    "lora_alpha": ("a number", _is_number),
    "lora_dropout": ("a number from 0 to below 1", lambda x: _is_number(x) and 0 <= x < 1),
    "bias": ('"none", "all" or "lora_only"', lambda x: x in ("none", "all", "lora_only")),
    "target_modules": ("a name, or a list of names", _is_names),
    "target_parameters": ("a list of names", lambda x: isinstance(x, list) and _is_names(x)),
    "exclude_modules": ("a name, or a list of names", _is_names),
    "modules_to_save": ("a list of names", lambda x: isinstance(x, list) and _is_names(x)),
    "trainable_token_indices": ("a list of tokens, or such lists by layer", _is_tokens),
    "layers_pattern": ("a name, or a list of names", _is_names),
    "layers_to_transform": ("a layer's number, or a list of them", _is_layers),
    "rank_pattern": ("positive integers by name", _by_pattern(_is_count)),
    "alpha_pattern": ("numbers by name", _by_pattern(_is_number)),
    "use_rslora": ("true or false", _is_flag),
    "use_dora": ("true or false", _is_flag),
    "lora_bias": ("true or false", _is_flag),
    "fan_in_fan_out": ("true or false", _is_flag),
    "init_lora_weights": ("true, false or a name", lambda x: isinstance(x, bool | str)),
    "task_type": ("one of " + ", ".join(TaskType), lambda x: x in list(TaskType)),
}
#: Options that must not be null.
_NEEDED = ("r", "lora_alpha", "target_modules")
#: Where the adapter comes from and whether it was trained on; nothing of it is computed with.
_ORIGIN = frozenset(
    {
        *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        "runtime_config",
    }
)


def check_adapter_folder(folder: Path) -> None:
    """Check that a folder has a LoRA adapter with options that have rules, and tensors in a form that runs no code.

    Raises:
        CheckpointError: names the file that is missing, damaged or malformed.
        UnsupportedModelError: the adapter has an option that has no rule; names the file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is no folder; an adapter's folder, as PEFT saves it, has {CONFIG_NAME}")
    reject_outward_links(folder)
    path, tensors = folder / CONFIG_NAME, folder / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: is not the folder of an adapter of PEFT: no {CONFIG_NAME} in it")
    options = _checked_options(path)
    if not os.path.lexists(tensors):
        pickled = f"; {WEIGHTS_NAME} is a pickle, which may run code, and isn't read" * (folder / WEIGHTS_NAME).exists()
        raise CheckpointError(f"{folder}: has no {SAFETENSORS_WEIGHTS_NAME}{pickled}; save the adapter as safetensors")
    with TensorFile(tensors) as file:
        _check_tensors(path, options, tensors, file.specs)


def _checked_options(path: Path) -> dict[str, Any]:
    options = read_object(path)
    kind = options.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {kind!r}; of PEFT's adapters, LoRA has rules")
    known = {field.name: getattr(LoraConfig(), field.name) for field in dataclasses.fields(LoraConfig)}
    for name, value in options.items():
        if name in _ORIGIN:
            continue
        if name not in _FORMS:
            # Of a later version of PEFT perhaps, whose meaning isn't known here.
            if value not in (None, False, {}, [], known.get(name)):
                raise UnsupportedModelError(f"{path}: {name} is {value!r}, for which there is no rule")
        elif value is not None or name in _NEEDED:
            words, is_valid = _FORMS[name]
            if not is_valid(value):
                raise CheckpointError(f"{path}: {name} is {value!r}; it must be {words}")
    missing = next((name for name in _NEEDED if name not in options), None)
    if missing is not None:
        raise CheckpointError(f"{path}: has no {missing}")
    chosen = {name: options[name] for name in _FORMS if options.get(name) is not None}
    _check_patterns(path, chosen)
    try:
        check_adapter(LoraConfig(**chosen))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: PEFT doesn't take these options: {error}") from error
    return chosen


def _check_patterns(path: Path, options: Mapping[str, Any]) -> None:
    """Check what PEFT takes for regular expressions."""
    patterns = [*options.get("rank_pattern", ()), *options.get("alpha_pattern", ())]
    patterns += [value for name, value in options.items() if name.endswith("_modules") and isinstance(value, str)]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{path}: {pattern!r} is no regular expression: {error}") from None


def _check_tensors(path: Path, options: Mapping[str, Any], tensors: Path, specs: Mapping[str, TensorSpec]) -> None:
    table = next((name for name in specs if ".lora_embedding_" in name), None)
    if table is not None:
        raise UnsupportedModelError(
            f"{tensors}: {table!r} adapts an embedding, which this command doesn't compare, as it does adapters of "
            "linear layers, the head and trainable_token_indices; leave the embedding out of target_modules"
        )
    ranks = [spec.shape[0] for name, spec in specs.items() if ".lora_A." in name and len(spec.shape) == 2]
    if not ranks:
        raise CheckpointError(f"{tensors}: has no factors of LoRA (base_model.model….lora_A.weight)")
    foreign = next((name for name in specs if not name.startswith(PREFIX)), None)
    if foreign is not None:
        raise CheckpointError(f"{tensors}: {foreign!r} is no tensor of an adapter, whose names begin with {PREFIX}")
    integer = next((name for name, spec in specs.items() if not spec.dtype.is_floating_point), None)
    if integer is not None:
        raise CheckpointError(f"{tensors}: {integer!r} is in {specs[integer].dtype}, which isn't trained")
    # PEFT makes factors of this size before it compares them with the file's.
    largest = max([options["r"], *options.get("rank_pattern", {}).values()])
    if largest > max(ranks):
        raise CheckpointError(
            f"{path}: says r = {largest}, but the factors in {tensors.name} have {max(ranks)} or less"
        )
