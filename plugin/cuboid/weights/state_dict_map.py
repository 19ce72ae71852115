"""Map a model's parameters to a checkpoint's tensors: each once, with Hugging Face's name and form."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.checkpoint.metadata import ShardedTensor, ShardRange
from cuboid.checkpoint.save_plan import WriteItem
from cuboid.errors import UnsupportedModelError
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


def sharding_specs(model: nn.Module) -> dict[str, ShardingSpec]:
    """Layouts of a model's sharded parameters by name; tied ones have an entry for each of their names."""
    return {
        f"{prefix}.{name}": param.spec
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, param in module.sharded_params.items()
    }


def check_has_whole_tensors(model: nn.Module) -> None:
    """Check that a model's weights can be put together to whole ones.

    Raises:
        UnsupportedModelError: they are stored in 4 bits.
    """
    if getattr(model, "is_loaded_in_4bit", False):
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are stored in 4 bits (quantization_config), and no whole ones are "
            "made of them: save the adapter, by save_pretrained of PEFT's model, and load it beside the checkpoint "
            "that the model came from"
        )


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by their names in checkpoints, each once.

    Tied parameters have the name that the others are tied to, which is the same on all stages that have one of them.
    """
    inner: Any = unwrap(model)
    named = dict(inner.named_parameters(remove_duplicate=False))
    # Names that aren't tied to another one come first, so that they are chosen.
    first = [name for name in named if name not in inner.all_tied_weights_keys]
    seen: dict[int, str] = {}
    for name in [*first, *named]:
        seen.setdefault(id(named[name]), name)
    return {name: parameter for name, parameter in named.items() if seen[id(parameter)] == name}


def stored_names(model: nn.Module) -> dict[int, str]:
    """The names of :func:`stored_parameters` by the ``id`` of the parameter."""
    return {id(parameter): name for name, parameter in stored_parameters(model).items()}


def counted_here(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of :func:`stored_parameters` that this stage saves; one shared with an earlier stage is saved there."""
    inner: Any = unwrap(model)
    counted = {id(parameter) for parameter in inner.counted_parameters()}
    return {name: parameter for name, parameter in stored_parameters(inner).items() if id(parameter) in counted}


def sharded_tensor(
    name: str, shard: torch.Tensor, sharding: ShardingSpec | None, local: ShardRange | None
) -> ShardedTensor:
    """Describe this rank's part of a tensor.

    Args:
        name: of the tensor.
        shard: this rank's, or a stand-in with its dtype and shape.
        sharding: how the mesh shards the tensor, if it does.
        local: the elements of the shard that this rank has.
    """
    shape = tuple(shard.shape) if sharding is None else sharding.shape
    return ShardedTensor(name, TensorSpec(shard.dtype, shape), sharding, local)


def model_items(model: nn.Module) -> list[WriteItem]:
    """The weights and persistent buffers of a model or a stage, for the files in a checkpoint's own folder."""
    inner: Any = unwrap(model)
    check_has_whole_tensors(inner)
    parameters = counted_here(inner)
    buffers = {
        name: value
        for name, value in local_state(inner).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }
    ignored = set(inner._keys_to_ignore_on_save or ())
    specs = sharding_specs(inner)
    tensors = [
        sharded_tensor(name, value, specs.get(name), ShardRange.of_shard(value.detach().contiguous()))
        for name, value in {**parameters, **buffers}.items()
        if name not in ignored
    ]
    return list(_write_items(inner, tensors))


def _write_items(model: Any, tensors: list[ShardedTensor]) -> Iterable[WriteItem]:
    by_name = {tensor.name: tensor for tensor in tensors}
    convert = functools.partial(revert_weight_conversion, model)
    for names, _ in stored_together(model, by_name):
        specs = {name: by_name[name].spec for name in names}
        blank = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        outputs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in convert(blank).items()}
        yield WriteItem("", tuple(by_name[name] for name in names), outputs, convert)


def stored_together(model: Any, names: Iterable[str]) -> list[tuple[list[str], bool]]:
    """Group tensors that transformers converts together when it saves a model.

    Returns:
        The names of each group, and whether more than the names changes.
    """
    converters = _converters(model)
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        # A converter renames all its inputs to the same name, by which they are grouped.
        renamed = (converter.rename_source_key(name) for converter in converters)
        joint = next((joint for joint, pattern in renamed if pattern is not None), None)
        groups.setdefault((joint or name, joint is not None), []).append(name)
    return [(together, converted) for (_, converted), together in groups.items()]


def _converters(model: Any) -> list[WeightConverter]:
    """The conversions that transformers applies when it saves the model, without those that only rename."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # The model wasn't loaded from a checkpoint; ``save_pretrained`` does the same then.
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
    reverted = [conversion.reverse_transform() for conversion in conversions[::-1]]
    return [conversion for conversion in reverted if isinstance(conversion, WeightConverter)]
