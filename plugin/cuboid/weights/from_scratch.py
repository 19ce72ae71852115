"""Models with new weights, of which each rank makes its own slices: the same ones for a seed on every mesh.

A model is initialized in units: each decoder layer is one, and each module outside of layers. A rank makes the units
of which it has a part, whole and one after the other, as the architecture's own ``_init_weights`` does, and keeps its
slices. So it never holds more than its slices and a unit. The random numbers of a unit follow from one draw of the
common generator and the unit's name, and so don't depend on the mesh, the stages, or the units that other ranks make.

They are therefore others than those of plain transformers with the same seed, which draws all weights in a row.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.rank_agreement import run_on_all_ranks
from cuboid.models.architectures.roles import layer_names
from cuboid.models.architectures.supported_tasks import check_class
from cuboid.models.plain_construction import plain_construction
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.load import loading_class


def make_sharded(
    cls: type[PreTrainedModel], from_config: Any, config: CuboidConfig, model_config: PretrainedConfig, kwargs: dict
) -> PreTrainedModel:
    """``cls._from_config(model_config, **kwargs)``, sharded and split into pipeline stages as ``config`` says.

    All ranks must have the same state of torch's generator on the CPU, which all of them draw one number from.

    Args:
        cls: the architecture's class.
        from_config: transformers' original function (unbound), because the patched one calls this.
        config: Cuboid's config.
        model_config: of the model.
        kwargs: of the function, such as ``dtype``.

    Raises:
        MeshError, UnsupportedModelError, ConfigError: before any weight is made.
    """
    check_class(cls)
    return run_on_all_ranks(
        lambda: _make_sharded(cls, from_config, config, model_config, kwargs), what=f"{cls.__name__}.from_config"
    )


def _make_sharded(
    cls: type[PreTrainedModel], from_config: Any, config: CuboidConfig, model_config: PretrainedConfig, kwargs: dict
) -> PreTrainedModel:
    with plain_construction(), torch.device("meta"):
        whole: PreTrainedModel = from_config(cls, copy.deepcopy(model_config), **kwargs)
        # A copy too: it will name our attention, and the user may make other models of theirs.
        model: Any = from_config(loading_class(cls, config, marks=False), copy.deepcopy(model_config), **kwargs)
    seed = int(torch.randint(2**62, (), device="cpu"))
    # By the name of the parameter that others are tied to; a stage may have one of these without it.
    ties = dict(model.all_tied_weights_keys) | dict(whole.all_tied_weights_keys)
    places: dict[str, list[str]] = {}
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        places.setdefault(ties.get(name, name), []).append(name)
    for name, unit, is_layer in _units(whole):
        owned = dict(_tensors(unit, name, is_layer=is_layer))
        if places.keys() & owned.keys():
            made = dict(_tensors(_initialized(whole, name, unit, seed, is_layer=is_layer), name, is_layer=is_layer))
            for source in places.keys() & owned.keys():
                _put(model, places[source], made[source])
    model.tie_weights()
    model.finish_loading()
    finished: PreTrainedModel = model
    return finished


def _units(whole: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """Layers, and the modules outside of them that own anything."""
    layers = layer_names(whole)
    for name, module in whole.named_modules():
        if name in layers:
            yield name, module, True
        elif not any(name.startswith(f"{layer}.") for layer in layers):
            yield name, module, False


def _tensors(unit: nn.Module, name: str, *, is_layer: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit's parameters and buffers, by their names in the model."""
    prefix = f"{name}." if name else ""
    yield from ((prefix + key, x) for key, x in unit.named_parameters(recurse=is_layer))
    yield from ((prefix + key, x) for key, x in unit.named_buffers(recurse=is_layer))


def _initialized(whole: PreTrainedModel, name: str, unit: nn.Module, seed: int, *, is_layer: bool) -> nn.Module:
    """A copy of a unit, on the CPU, with its own random numbers."""
    own = copy.deepcopy(unit)
    own.to_empty(device="cpu", recurse=is_layer)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), init.guard_torch_init_functions():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 2)
        # As PreTrainedModel.initialize_weights: children first, each by the innermost model that it is in.
        for inner, module in reversed(list(own.named_modules())) if is_layer else [("", own)]:
            _model_around(whole, f"{name}.{inner}" if inner else name)._init_weights(module)
    return own


def _model_around(whole: PreTrainedModel, name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = whole.get_submodule(".".join(parts[:end]))
        if isinstance(module, PreTrainedModel):
            return module
    return whole


def _put(model: Any, names: list[str], value: torch.Tensor) -> None:
    """Give a model what it keeps of a tensor, under all names that it has for it."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
            continue
        layout = model.layout_of(name)
        shard = value.detach() if layout is None else take_shard(value.detach(), layout, model._mesh)
        parameter = nn.Parameter(shard, requires_grad=getattr(module, leaf).requires_grad)
        module.register_parameter(leaf, parameter)
