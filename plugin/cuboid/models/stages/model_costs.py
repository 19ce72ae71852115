"""Sizes of a Hugging Face model's matrix products, read off the model itself rather than a table of architectures."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.kinds.registry import auto_class_of
from cuboid.models.plain_construction import plain_construction
from cuboid.models.stages.layer_list import layer_list
from cuboid.models.stages.outline import Halves
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes

#: Config attributes for the number of experts, and for how many of them a token is sent to.
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
#: Attributes of attention modules for the number of features of a head.
_QUERY_DIMS = ("qk_head_dim", "head_dim", "head_size", "attention_head_size")
_VALUE_DIMS = ("v_head_dim", *_QUERY_DIMS)


def model_sizes(config: PretrainedConfig, cls: type[PreTrainedModel] | None = None) -> ModelSizes:
    """Sizes of a model's matrix products. The model is built on the meta device.

    Args:
        config: the model's config.
        cls: the model's class; by default the one that the config names, or the causal one.

    Raises:
        UnsupportedModelError: the model has experts, and the config doesn't say how many a token is sent to; or it has
            no list of layers.
    """
    with plain_construction(), torch.device("meta"):
        if cls is not None:
            return sizes_of(cls(copy.deepcopy(config)))
        return sizes_of(auto_class_of(config.architectures).from_config(copy.deepcopy(config)))


def sizes_of(model: PreTrainedModel, halves: Sequence[Halves | str] = ()) -> ModelSizes:
    """As :func:`model_sizes`, for a whole model on any device, and with its layers' halves if they are given."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    weights = sum(x.numel() for x in _behind_base(model)) if head is None else head.weight.numel()
    layers = decoder_layers(model).values()
    known: Sequence[Halves | str | None] = halves or [None] * len(layers)
    return ModelSizes(
        tuple(
            _layer(layer, index, config, half if isinstance(half, Halves) else None)
            for index, (layer, half) in enumerate(zip(layers, known, strict=True))
        ),
        weights,
    )


def _behind_base(model: PreTrainedModel) -> list[nn.Parameter]:
    """Matrices outside the base model, for heads other than a language model's; none if ``model`` is a base model."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in base and parameter.dim() > 1]


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of a whole model by their names, in order.

    Raises:
        UnsupportedModelError: the model has no list of layers.
    """
    name = layer_list(model)
    if name is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of layers, so their costs aren't known; write "
            '"partition": "even" and "stage_balance": "layers"'
        )
    return {f"{name}.{index}": layer for index, layer in model.get_submodule(name).named_children()}


def _layer(layer: nn.Module, index: int, config: PretrainedConfig, halves: Halves | None) -> LayerSizes:
    weights = kept = second_weights = second_kept = 0
    for name, weight in _weights(layer):
        stacked = weight.dim() == 3 and weight.shape[0] == _number(config, _EXPERTS)
        used, of = expert_counts(config, name) if stacked or "experts" in name.split(".") else (1, 1)
        used_weights = weight.numel() * used // of
        stacks = weight.shape[0] if stacked else 1
        used_features = sum(weight.shape[-2:]) * stacks * used // of
        weights, kept = weights + used_weights, kept + used_features
        if halves is not None and name.split(".")[0] in halves.second:
            second_weights, second_kept = second_weights + used_weights, second_kept + used_features
    kind = _kind(config, index)
    query, value = (0, 0) if kind in _WITHOUT_KEYS else _head_features(layer, config)
    second = (None, 0) if halves is None else (second_weights, second_kept)
    return LayerSizes(weights, query, value, _window(config, kind), kept, *second)


def _weights(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that tokens are multiplied by as matrices: all except biases, norms and lookup tables."""
    tables = {id(module.weight) for module in layer.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in layer.named_parameters():
        if parameter.dim() >= 2 and not name.endswith("bias") and id(parameter) not in tables:
            yield name, parameter


def expert_counts(config: PretrainedConfig, name: str) -> tuple[int, int]:
    """Number of experts that a token is sent to, and number of experts; ``name`` is the parameter that errors name.

    Raises:
        UnsupportedModelError: the config doesn't have the numbers.
    """
    used, of = _number(config, _EXPERTS_OF_TOKEN), _number(config, _EXPERTS)
    if used is None or of is None:
        raise UnsupportedModelError(
            f"{name} of the layers belongs to experts, and the config of {config.model_type!r} doesn't say to how many "
            'a token is sent; write "partition": "even" and "stage_balance": "layers"'
        )
    return used, of


def _number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for owner in (config, *nested):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


#: Kinds of layers whose cost per token doesn't grow with the number of tokens before it.
_WITHOUT_KEYS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})


def _kind(config: PretrainedConfig, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    # A list that isn't of num_hidden_layers modules may be longer.
    return kinds[index] if kinds and index < len(kinds) else None


def _window(config: PretrainedConfig, kind: str | None) -> int | None:
    """The most keys that a token sees. A chunk counts as a window, though a token sees half of it on average."""
    if kind is None or "sliding" in kind:
        return getattr(config, "sliding_window", None)
    return getattr(config, "attention_chunk_size", None) if "chunked" in kind else None


def _head_features(layer: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    """Features of all query heads, and of as many value heads."""
    module = next((module for module in layer.modules() if _attribute(module, _QUERY_DIMS)), None)
    heads = _attribute(module, ("num_heads", "num_attention_heads")) or getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0, 0
    default = config.hidden_size // heads
    query = _attribute(module, _QUERY_DIMS) or default
    value = _attribute(module, _VALUE_DIMS) or default
    return heads * query, heads * value


def _attribute(module: Any, names: tuple[str, ...]) -> int | None:
    """The first of some attributes that is a positive integer."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
