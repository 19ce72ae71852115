"""The kinds of a model's layers, and a small model that has one of each.

Which layer is of which kind follows from lists, periods and numbers in configs, by rules that only the model's own code
knows. So a model with all layers and tiny sizes is made on the meta device, and its layers are looked at.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.certification.small_config import DEFAULT_SIZES, Sizes, layer_count, small_config
from cuboid.models.plain_construction import plain_construction

#: More would make a probe too slow.
_MOST_LAYERS = 12
_LEAST_LAYERS = 3
#: What a layer is, as far as it decides which code runs: its modules' classes, and their flags.
LayerKind = frozenset[tuple[str, str, Any]]
#: Flags that torch keeps, or that follow from a layer's number alone.
_NO_FLAGS = frozenset({"training", "_is_full_backward_hook", "call_super_init", "dump_patches", "inplace"})


class NoSmallModel(Exception):
    """Not all kinds of layers are in any small model."""


def small_with_all_kinds(
    cls: type[PreTrainedModel], config: PretrainedConfig, least: int = 0, sizes: Sizes = DEFAULT_SIZES
) -> PretrainedConfig:
    """A small config, of a model that has all kinds of layers that the real one has.

    It is :func:`small_config`'s, if that has them; else one that keeps as many of the first layers as it takes; else
    one that keeps the first layer of each kind.

    Args:
        cls: the architecture's class.
        config: of the real model.
        least: so many layers, if the real model has as many.
        sizes: of the small model.

    Raises:
        NoSmallModel: none of these has all kinds.
        Exception: of any kind, as in :func:`small_config`.
    """
    small = small_config(config, sizes=sizes)
    count = layer_count(config)
    try:
        real = _kinds_of(cls, small_config(config, range(count), sizes))
        small_kinds = _kinds_of(cls, small)
    except Exception:
        # The probe's error says why no model can be made.
        return small
    if _missing(real, small_kinds) is None and layer_count(small) >= min(least, count):
        return small
    least = max(least, _LEAST_LAYERS)
    firsts = sorted({kinds.index(kind) for kinds in real.values() for kind in kinds})
    choices = [range(max(firsts[-1] + 1, least))] if firsts[-1] < _MOST_LAYERS else []
    for kept in (*choices, *([*firsts, *_others(firsts, count, least)] if len(firsts) <= _MOST_LAYERS else [],)):
        try:
            small = small_config(config, sorted(kept), sizes)
            missing = _missing(real, _kinds_of(cls, small))
        except Exception:
            continue
        if missing is None:
            return small
    name, index = _missing(real, small_kinds) or ("", 0)
    raise NoSmallModel(
        f"{name}.{index} is of a kind that no small model of up to {_MOST_LAYERS} layers has with this config"
    )


def _others(firsts: list[int], count: int, least: int) -> list[int]:
    """Layers to keep in addition, so that there are enough for stages."""
    more = [index for index in range(count) if index not in firsts]
    return more[: max(0, least - len(firsts))]


def _missing(
    real: Mapping[str, tuple[LayerKind, ...]], small: Mapping[str, tuple[LayerKind, ...]]
) -> tuple[str, int] | None:
    """The first layer of a kind that a small model doesn't have."""
    for name, kinds in real.items():
        for index, kind in enumerate(kinds):
            if kind not in small.get(name, ()):
                return name, index
    return None


def on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A config's model without values."""
    with plain_construction(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return cls(copy.deepcopy(config))


def _kinds_of(cls: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, tuple[LayerKind, ...]]:
    return layer_kinds(on_meta(cls, config))


def layer_kinds(model: nn.Module) -> dict[str, tuple[LayerKind, ...]]:
    """The kinds of the layers in a model's outermost lists, by the name of the list."""
    by_list: dict[str, tuple[LayerKind, ...]] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in by_list)
        if isinstance(module, nn.ModuleList) and len(module) > 0 and not is_inside:
            by_list[name] = tuple(map(_kind_of, module))
    return by_list


def _kind_of(layer: nn.Module) -> LayerKind:
    facts: set[tuple[str, str, Any]] = set()
    for name, module in layer.named_modules():
        # A list's modules are alike, and their number is a size.
        if any(part.isdigit() and part != "0" for part in name.split(".")):
            continue
        facts.add((name, "", f"{type(module).__module__}.{type(module).__qualname__}"))
        facts |= {(name, key, parameter is None) for key, parameter in module._parameters.items()}
        # Its flags and names, and which of its numbers and tables it hasn't.
        for key, value in vars(module).items():
            if key.startswith("_") or key in _NO_FLAGS:
                continue
            if isinstance(value, bool | str | torch.dtype):
                facts.add((name, key, value))
            elif value is None or isinstance(value, int | float | torch.Tensor):
                facts.add((name, key, value is None))
            elif inspect.isfunction(value):
                facts.add((name, key, value.__qualname__))
    return frozenset(facts)
