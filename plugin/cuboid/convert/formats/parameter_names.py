"""Map between a model's parameters and its checkpoints' tensors.

transformers renames some tensors when it loads them, and for some architectures merges or splits them (the experts of a
mixture become one parameter, for example).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.convert.formats.block_tensors import BlockTensors, row_ranges
from cuboid.errors import UnsupportedModelError
from cuboid.weights.model_folder import as_damage_of, model_config
from cuboid.weights.state_dict_map import stored_together


def blank_model(config: Path) -> PreTrainedModel:
    """Build the causal language model of a ``config.json``, or of a folder that has one, on the meta device.

    Raises:
        CheckpointError: there is no config, or transformers can't read it.
        UnsupportedModelError: the config isn't that of a causal language model.
    """
    # A conversion must not run code that comes with a checkpoint.
    settings = model_config(config, trust_remote_code=False)
    if type(settings) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(f"{config}: isn't of a causal language model, but of a {settings.model_type}")
    with as_damage_of(config), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    return model


def state_specs(model: PreTrainedModel) -> dict[str, TensorSpec]:
    """Dtype and shape of the parameters and persistent buffers, by their names in memory."""
    state: Mapping[str, Any] = model.state_dict()
    return {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in state.items() if isinstance(x, torch.Tensor)}


@dataclass(frozen=True)
class LoadTarget:
    """Where transformers loads a checkpoint's tensor to.

    Attributes:
        parameter: name of the parameter or buffer; of the first one if the tensor is split into several.
        converted: whether it is merged or split, not only renamed.
    """

    parameter: str
    converted: bool


def load_targets(model: PreTrainedModel, names: Iterable[str]) -> dict[str, LoadTarget]:
    """The targets of a checkpoint's tensors, by name. Tensors that the model doesn't use have none."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    # In the loader's order, which some of its renamings depend on.
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = core_model_loading.rename_source_key(name, [], [], prefix, state)
        if new in state:
            targets[name] = LoadTarget(new, pattern is not None)
    return targets


def is_expected(model: Any, name: str) -> bool:
    """Whether the model's class declares a tensor as one that old checkpoints have and that is ignored."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def as_stored(model: PreTrainedModel, tensors: BlockTensors) -> BlockTensors:
    """Convert tensors from their names and forms in memory to those in Hugging Face checkpoints.

    Tensors that the architecture stores in another form are converted in memory, one group at a time; others are
    streamed.
    """
    forms: dict[str, _Form] = {}
    for names, converted in stored_together(model, tensors.specs):
        specs = {name: tensors.specs[name] for name in names}
        # Converted once on the meta device to learn the stored names and shapes.
        blank = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        for stored, value in core_model_loading.revert_weight_conversion(model, blank).items():
            forms[stored] = _Form(tuple(names), converted, TensorSpec(value.dtype, tuple(value.shape)))
    # A group is stored as several tensors, which are requested one by one: only the last group's are cached.
    cache: dict[str, torch.Tensor] = {}

    def blocks(name: str) -> Iterator[torch.Tensor]:
        form = forms[name]
        if not form.converted:
            yield from tensors.blocks(form.origins[0])
            return
        if name not in cache:
            cache.clear()
            full_tensors = {origin: torch.cat(list(tensors.blocks(origin))) for origin in form.origins}
            cache.update(core_model_loading.revert_weight_conversion(model, full_tensors))
        for rows in row_ranges(form.spec):
            yield cache[name][rows]

    return BlockTensors({name: form.spec for name, form in forms.items()}, blocks)


@dataclass(frozen=True)
class _Form:
    """A stored tensor: the tensors in memory that it is computed from, and whether more than the name differs."""

    origins: tuple[str, ...]
    converted: bool
    spec: TensorSpec
