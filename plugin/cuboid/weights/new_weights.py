"""Initialize parts of a model with its architecture's own ``_init_weights``, each part with its own seed."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from cuboid.models.architectures.roles import layer_names
from cuboid.models.kinds.registry import kind_of_class
from cuboid.models.plain_construction import plain_construction
from cuboid.tensor3d.sharding.sharding_spec import take_shard

#: Seed of a head that a checkpoint doesn't have. It is fixed: without process groups, ranks can't agree on another.
_HEAD_SEED = 0


def is_of_new_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is of a kind's head, which a checkpoint may lack if it is fine-tuned with a new one.

    The head of a language model isn't such a head: it was trained with the rest.
    """
    kind = kind_of_class(type(model))
    if ".pooler." in f".{name}":
        return not kind.is_language_model
    return kind.has_new_head and not name.startswith(f"{model.base_model_prefix}.")


def make_new_weights(model: Any, cls: type[PreTrainedModel], names: Collection[str]) -> None:
    """Make parameters that a checkpoint lacks: a head's, or those that the class makes by a formula.

    They are the same on every mesh and in every run.
    """
    with plain_construction(), torch.device("meta"):
        whole_model = cls(copy.deepcopy(model.config))
    construct = constructing(lambda: cls(copy.deepcopy(model.config)), _HEAD_SEED)
    for path, unit, recurse in units_of(whole_model):
        missing = [name for name, _ in tensors_of(unit, path, recurse=recurse) if name in names]
        if missing:
            values = initialized(whole_model, path, unit, _HEAD_SEED, recurse=recurse, construct=construct)
            for name in missing:
                put_value(model, [name], values[name])


def units_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """The units that are initialized, as ``(name, module, recurse)``: all that is in a module, or only its own tensors.

    The latter are modules around layers. All others are initialized as a whole, since some architectures' code for a
    module writes into the modules inside it.
    """
    around = {name[:end] for name in layer_names(model) for end in range(len(name)) if name[end] == "."} | {""}
    for name, module in model.named_modules():
        if name in around:
            yield name, module, False
        elif name.rpartition(".")[0] in around:
            yield name, module, True


def tensors_of(unit: nn.Module, name: str, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit's parameters and buffers, by their names in the model."""
    prefix = f"{name}." if name else ""
    yield from ((prefix + key, x) for key, x in unit.named_parameters(recurse=recurse))
    yield from ((prefix + key, x) for key, x in unit.named_buffers(recurse=recurse))


#: Makes a model whose parameters are on the meta device but for those of some classes of modules, by class and name.
Construct = Callable[[frozenset[tuple[type[nn.Module], str]]], nn.Module]


def initialized(
    model: PreTrainedModel, name: str, unit: nn.Module, seed: int, *, recurse: bool, construct: Construct
) -> dict[str, torch.Tensor]:
    """The tensors of a unit by their names, initialized with random numbers that only depend on the seed and its name.

    Values that ``_init_weights`` leaves alone are those that the constructor gives.

    Args:
        model: the model on the meta device. The unit is one of its modules, since some code looks for its name there.
        name, unit, recurse: of :func:`units_of`.
        seed: of the whole model.
        construct: makes another one with the constructor's values.
    """
    unit.to_empty(device="cpu", recurse=recurse)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    unit_seed = int.from_bytes(digest[:8], "little") >> 2

    def initialize() -> dict[str, torch.Tensor]:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), init.guard_torch_init_functions():
            torch.manual_seed(unit_seed)
            # In the order of PreTrainedModel.initialize_weights: children first, each by the innermost model around it.
            for inner, module in reversed(list(unit.named_modules())) if recurse else [("", unit)]:
                _model_around(model, ".".join(part for part in (name, inner) if part))._init_weights(module)
        return dict(tensors_of(unit, name, recurse=recurse))

    _mark(unit, recurse=recurse)
    values = initialize()
    left = [key for key, x in values.items() if _is_marked(x)]
    if left:
        paths = [key.rpartition(".") for key in left]
        kept = construct(frozenset((type(model.get_submodule(path)), leaf) for path, _, leaf in paths))
        made = dict(tensors_of(kept.get_submodule(name), name, recurse=recurse))
        _mark(unit, recurse=recurse)
        with torch.no_grad():
            for key in left:
                values[key].copy_(made[key])
        values = initialize()
    unit.to_empty(device="meta", recurse=recurse)
    return values


def _mark(unit: nn.Module, *, recurse: bool) -> None:
    """Fill a unit's tensors with values by which :func:`_is_marked` tells what is never written."""
    with torch.no_grad():
        for _, x in tensors_of(unit, "", recurse=recurse):
            if x.is_floating_point() or x.is_complex():
                x.fill_(torch.nan)
            elif x.dtype != torch.bool:
                x.fill_(torch.iinfo(x.dtype).min)


def _is_marked(x: torch.Tensor) -> bool:
    if x.is_floating_point() or x.is_complex():
        return bool(x.isnan().any())
    return x.dtype != torch.bool and bool((x == torch.iinfo(x.dtype).min).any())


def constructing(make: Callable[[], nn.Module], seed: int) -> Construct:
    """What makes models by calling ``make``; the same one again for the same parameters, and for the same seed."""

    @functools.cache
    def construct(kept: frozenset[tuple[type[nn.Module], str]]) -> nn.Module:
        with _only_on_cpu(kept), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return construct


@contextmanager
def _only_on_cpu(kept: Collection[tuple[type[nn.Module], str]]) -> Iterator[None]:
    """Inside, models that are constructed hold the parameters of classes and names in ``kept``: all others go to the
    meta device as they are made.
    """
    register, initialize = nn.Module.register_parameter, PreTrainedModel.initialize_weights

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and (type(self), name) not in kept:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    def leave_alone(_: PreTrainedModel) -> None:
        pass

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    PreTrainedModel.initialize_weights = leave_alone  # type: ignore[method-assign]
    try:
        with torch.device("cpu"), plain_construction():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        PreTrainedModel.initialize_weights = initialize  # type: ignore[method-assign]


def _model_around(model: PreTrainedModel, name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, PreTrainedModel):
            return module
    return model


def put_value(model: Any, names: Iterable[str], value: torch.Tensor) -> None:
    """Put this rank's shard of a full tensor into a model, under each of its names there."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
            continue
        spec = model.spec_of(name)
        there = getattr(module, leaf)
        value = value.detach().to(there.dtype)
        parameter: Any = nn.Parameter(
            value if spec is None else take_shard(value, spec, model.cuboid_part.plan.mesh),
            requires_grad=there.requires_grad,
        )
        # Keeps transformers from initializing it again.
        parameter._is_hf_initialized = True
        module.register_parameter(leaf, parameter)
