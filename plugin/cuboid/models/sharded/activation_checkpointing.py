"""The config's activation checkpointing on a sharded model, together with what its script enables itself."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cuboid.config.schema import ActivationCheckpointingMode
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.transformers_names import checkpoint_activations, recomputes
from cuboid.models.attention.kept_attention import keeping_attention
from cuboid.models.attention.segments import uses_interface

_KEY = "activation_checkpointing.mode"


def check_checkpointing(model: PreTrainedModel, cls: type[PreTrainedModel], mode: ActivationCheckpointingMode) -> None:
    """Make sure that a model can be checkpointed as a config says.

    Args:
        model: the whole model, on any device, meta included.
        cls: the architecture's class.
        mode: of the config.

    Raises:
        UnsupportedModelError: it can't be.
    """
    if mode == "none":
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not cls.supports_gradient_checkpointing or not layers:
        raise UnsupportedModelError(
            f'{_KEY} is "{mode}", but {cls.__name__} has no layers that transformers can checkpoint; write "none"'
        )
    if mode != "attention":
        return
    parts = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    if any(part._attn_implementation == "flex_attention" for part in parts):
        raise UnsupportedModelError(
            f'{_KEY} is "attention", which has no rule for attn_implementation "flex_attention"; use "sdpa", or write '
            '"layers"'
        )
    if not any(uses_interface(layer) for layer in layers):
        raise UnsupportedModelError(
            f'{_KEY} is "attention", but no layer of {cls.__name__} computes attention through Hugging Face\'s '
            'interface, so that there is nothing to keep; write "layers"'
        )


def enable_checkpointing(model: PreTrainedModel, mode: ActivationCheckpointingMode) -> None:
    """Checkpoint a sharded model's layers as its config says.

    What the script has enabled before stays enabled, with its own options.
    """
    model.cuboid.checkpointing = mode
    if mode == "none":
        return
    if not recomputes(model):
        checkpoint_activations(model, {"use_reentrant": False})
    elif mode == "attention":
        for module in model.modules():
            function = getattr(module, "_gradient_checkpointing_func", None)
            if function is not None:
                module._gradient_checkpointing_func = keeping(function)


def keeping(function: Any) -> Any:
    """A checkpointing function of transformers that keeps attention too.

    Args:
        function: ``torch.utils.checkpoint.checkpoint``, with the options that the script gave.

    Raises:
        CuboidError: the options don't allow it.
    """
    options = function.keywords if isinstance(function, functools.partial) else {}
    if options.get("use_reentrant") is not False:
        raise CuboidError(
            f'the config\'s {_KEY} is "attention", and the script enables checkpointing with "use_reentrant": true, '
            'which can keep nothing but inputs; give gradient_checkpointing_enable "use_reentrant": false or nothing, '
            'or write "layers"'
        )
    return functools.partial(function, context_fn=keeping_attention(options.get("context_fn")))
