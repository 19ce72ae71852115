"""Initialize parts of a model with its architecture's own ``_init_weights``, each part with its own seed."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from cuboid.models.architectures.roles import layer_names
from cuboid.models.architectures.supported_tasks import task_of
from cuboid.models.plain_construction import plain_construction
from cuboid.tensor3d.sharding.sharding_spec import take_shard

#: Seed of a head that a checkpoint doesn't have. It is fixed: without process groups, ranks can't agree on another.
_HEAD_SEED = 0


def is_of_new_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is of a task's head, which a checkpoint may lack if it is fine-tuned with a new one.

    The head of a language model isn't such a head: it was trained with the rest.
    """
    task = task_of(type(model))
    if ".pooler." in f".{name}":
        return task not in ("causal", "masked", "seq2seq")
    return task not in ("causal", "masked", "seq2seq", "hidden") and not name.startswith(f"{model.base_model_prefix}.")


def make_new_weights(model: Any, cls: type[PreTrainedModel], names: Collection[str]) -> None:
    """Make parameters that a checkpoint lacks: a head's, or those that the class makes by a formula.

    They are the same on every mesh and in every run.
    """
    with plain_construction(), torch.device("meta"):
        whole = cls(copy.deepcopy(model.config))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        made = initialized(whole, path, whole.get_submodule(path), _HEAD_SEED, is_layer=False)
        for name, value in tensors_of(made, path, is_layer=False):
            if name in names:
                put_value(model, [name], value)


def units_of(whole: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """The units that are initialized, as ``(name, module, is_layer)``: layers, and modules outside them."""
    layers = layer_names(whole)
    for name, module in whole.named_modules():
        if name in layers:
            yield name, module, True
        elif not any(name.startswith(f"{layer}.") for layer in layers):
            yield name, module, False


def tensors_of(unit: nn.Module, name: str, *, is_layer: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit's parameters and buffers, by their names in the model."""
    prefix = f"{name}." if name else ""
    yield from ((prefix + key, x) for key, x in unit.named_parameters(recurse=is_layer))
    yield from ((prefix + key, x) for key, x in unit.named_buffers(recurse=is_layer))


def initialized(whole: PreTrainedModel, name: str, unit: nn.Module, seed: int, *, is_layer: bool) -> nn.Module:
    """A copy of a unit on the CPU, initialized with random numbers that only depend on the seed and its name."""
    own = copy.deepcopy(unit)
    own.to_empty(device="cpu", recurse=is_layer)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), init.guard_torch_init_functions():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 2)
        # In the order of PreTrainedModel.initialize_weights: children first, each by the innermost model around it.
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


def put_value(model: Any, names: Iterable[str], value: torch.Tensor) -> None:
    """Put this rank's shard of a full tensor into a model, under each of its names there."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
            continue
        layout = model.layout_of(name)
        there = getattr(module, leaf)
        value = value.detach().to(there.dtype)
        parameter: Any = nn.Parameter(
            value if layout is None else take_shard(value, layout, model._mesh), requires_grad=there.requires_grad
        )
        # Keeps transformers from initializing it again.
        parameter._is_hf_initialized = True
        module.register_parameter(leaf, parameter)
