"""What a model's checkpoint holds: each parameter once, by the name and in the form in which Hugging Face stores it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.checkpoint.shards import Bundle, Family, Run, SplitTensor
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def sharded_layouts(model: nn.Module) -> dict[str, ShardingSpec]:
    """Layouts of a model's sharded parameters by name, tied ones by each of their names."""
    return {
        f"{prefix}.{name}": param.layout
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, param in module.sharded_params.items()
    }


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by the names under which checkpoints know them, each once.

    Of tied ones that is the name which ties them, alike on all stages that have one of them.
    """
    inner: Any = unwrap(model)
    named = dict(inner.named_parameters(remove_duplicate=False))
    # Names that are tied to another one give way to it.
    first = [name for name in named if name not in inner.all_tied_weights_keys]
    seen: dict[int, str] = {}
    for name in [*first, *named]:
        seen.setdefault(id(named[name]), name)
    return {name: parameter for name, parameter in named.items() if seen[id(parameter)] == name}


def stored_names(model: nn.Module) -> dict[int, str]:
    """The names of :func:`stored_parameters`, by the parameters' ids."""
    return {id(parameter): name for name, parameter in stored_parameters(model).items()}


def counted_here(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of :func:`stored_parameters` that this stage stores: another one has the rest."""
    inner: Any = unwrap(model)
    counted = {id(parameter) for parameter in inner.counted_parameters()}
    return {name: parameter for name, parameter in stored_parameters(inner).items() if id(parameter) in counted}


def split_tensor(name: str, value: torch.Tensor, layout: ShardingSpec | None, run: Run | None) -> SplitTensor:
    """Describe what this rank has of a tensor.

    Args:
        name: of the tensor.
        value: this rank's shard, or with its dtype and, without a layout, its shape.
        layout: how the mesh cuts it, if it does.
        run: what of the shard is here.
    """
    shape = tuple(value.shape) if layout is None else layout.shape
    return SplitTensor(name, TensorSpec(value.dtype, shape), layout, run)


def model_family(model: nn.Module) -> Family:
    """The weights and persistent buffers of a model, or of a stage, as a checkpoint of its own."""
    inner: Any = unwrap(model)
    parameters = counted_here(inner)
    buffers = {
        name: value
        for name, value in local_state(inner).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }
    ignored = set(inner._keys_to_ignore_on_save or ())
    layouts = sharded_layouts(inner)
    tensors = [
        split_tensor(name, value, layouts.get(name), Run.whole(value.detach().contiguous()))
        for name, value in {**parameters, **buffers}.items()
        if name not in ignored
    ]
    return Family("", tuple(_bundles(inner, tensors)))


def _bundles(model: Any, tensors: list[SplitTensor]) -> Iterable[Bundle]:
    by_name = {tensor.name: tensor for tensor in tensors}
    convert = functools.partial(revert_weight_conversion, model)
    for names, _ in stored_together(model, by_name):
        specs = {name: by_name[name].spec for name in names}
        blank = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        outputs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in convert(blank).items()}
        yield Bundle(tuple(by_name[name] for name in names), outputs, convert)


def stored_together(model: Any, names: Iterable[str]) -> list[tuple[list[str], bool]]:
    """Groups of tensors that transformers makes something of together when it stores them.

    Args:
        model: whose they are.
        names: in memory.

    Returns:
        The names of each group, and whether more than the names change.
    """
    converters = _converters(model)
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        # Those that go together are called by one name here.
        renamed = (converter.rename_source_key(name) for converter in converters)
        joint = next((joint for joint, pattern in renamed if pattern is not None), None)
        groups.setdefault((joint or name, joint is not None), []).append(name)
    return [(own, converted) for (_, converted), own in groups.items()]


def _converters(model: Any) -> list[WeightConverter]:
    """What changes tensors, and not only their names, when transformers stores them."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # As transformers does with a model that wasn't loaded.
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    reverted = [conversion.reverse_transform() for conversion in conversions[::-1]]
    return [conversion for conversion in reverted if isinstance(conversion, WeightConverter)]
