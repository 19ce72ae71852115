"""How a model's parameters are called in its checkpoints: transformers renames some when it loads them, and for some
architectures merges or splits them."""

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

from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.convert.formats.block_tensors import Tensors, row_ranges
from cuboid.errors import UnsupportedModelError
from cuboid.weights.model_folder import as_damage_of, model_config
from cuboid.weights.state_dict_map import stored_together


def blank_model(config: Path) -> PreTrainedModel:
    """The causal language model of a ``config.json``, or of a folder that has one, on the meta device.

    Raises:
        CheckpointError: there is no config that transformers knows.
        UnsupportedModelError: it is of no causal language model.
    """
    # A model's own code isn't run.
    settings = model_config(config, trust_remote_code=False)
    if type(settings) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(f"{config}: isn't of a causal language model, but of a {settings.model_type}")
    with as_damage_of(config), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    return model


def state_specs(model: PreTrainedModel) -> dict[str, TensorSpec]:
    """Parameters and persistent buffers by their names in memory."""
    state: Mapping[str, Any] = model.state_dict()
    return {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in state.items() if isinstance(x, torch.Tensor)}


@dataclass(frozen=True)
class Role:
    """What becomes of a checkpoint's tensor when transformers loads it.

    Attributes:
        parameter: name of the parameter or buffer, or of the first one, that it goes into.
        converted: whether it is merged or split on the way, and not only renamed.
    """

    parameter: str
    converted: bool


def roles_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Role]:
    """Roles of a checkpoint's tensors, by name. What the model has no use for has none.

    Args:
        model: whole, on any device.
        names: of all tensors of the checkpoint.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    roles = {}
    # In the loader's order, which some renamings go by.
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = core_model_loading.rename_source_key(name, [], [], prefix, state)
        if new in state:
            roles[name] = Role(new, pattern is not None)
    return roles


def is_expected(model: Any, name: str) -> bool:
    """Whether the model's class knows of a tensor that old checkpoints have, and has no use for it."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def as_stored(model: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Tensors that go by their names in memory, as Hugging Face stores them.

    What the architecture stores in another form is in memory whole, one merged tensor at a time; the rest is streamed.
    """
    forms: dict[str, _Form] = {}
    for names, converted in stored_together(model, tensors.specs):
        blank = {name: _blank(tensors.specs[name]) for name in names}
        for stored, value in core_model_loading.revert_weight_conversion(model, blank).items():
            forms[stored] = _Form(tuple(names), converted, TensorSpec(value.dtype, tuple(value.shape)))
    return Tensors({name: form.spec for name, form in forms.items()}, _StoredBlocks(model, tensors, forms))


def _blank(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


@dataclass(frozen=True)
class _Form:
    """A stored tensor: which of memory's it is made of, and whether by more than another name."""

    origins: tuple[str, ...]
    converted: bool
    spec: TensorSpec


class _StoredBlocks:
    """Reads stored tensors, and keeps the ones that were made together last."""

    def __init__(self, model: PreTrainedModel, tensors: Tensors, forms: Mapping[str, _Form]) -> None:
        self._model, self._tensors, self._forms = model, tensors, forms
        self._made: Mapping[str, torch.Tensor] = {}

    def __call__(self, name: str) -> Iterator[torch.Tensor]:
        form = self._forms[name]
        if not form.converted:
            yield from self._tensors.blocks(form.origins[0])
            return
        if name not in self._made:
            self._made = {}
            wholes = {origin: torch.cat(list(self._tensors.blocks(origin))) for origin in form.origins}
            self._made = core_model_loading.revert_weight_conversion(self._model, wholes)
        for rows in row_ranges(form.spec):
            yield self._made[name][rows]
