"""The config's activation checkpointing on a sharded model, together with what its script enables itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cuboid.config.schema import ActivationCheckpointingConfig
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.transformers_names import checkpoint_activations, recomputes
from cuboid.models.attention.kept_attention import keep_attention_in_graph, keeping_attention
from cuboid.models.attention.segments import uses_interface
from cuboid.models.kinds.sharding import ModelState
from cuboid.seq1f1b.attention.chunked_attention import Kept
from cuboid.seq1f1b.runtime.host_store import HostStore

_KEY = "activation_checkpointing.mode"
_HOST_KEY = "activation_checkpointing.cpu_checkpointing"


def check_checkpointing(
    model: PreTrainedModel, cls: type[PreTrainedModel], config: ActivationCheckpointingConfig
) -> None:
    """Make sure that a model can be checkpointed as a config says.

    Args:
        model: the whole model, on any device, meta included.
        cls: the architecture's class.
        config: the section.

    Raises:
        UnsupportedModelError: it can't be.
    """
    mode = config.mode
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


def enable_checkpointing(model: PreTrainedModel, config: ActivationCheckpointingConfig) -> None:
    """Checkpoint a sharded model's layers as its config says.

    What the script has enabled before stays enabled, with its own options.
    """
    state: ModelState = model.cuboid.state
    state.checkpointing = config
    if config.mode == "none":
        return
    if config.cpu_checkpointing:
        state.host_store = HostStore()
    check_graphs_keep(model)
    if not recomputes(model):
        checkpoint_activations(model, {"use_reentrant": False})
        return
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None:
            module._gradient_checkpointing_func = keeping(function, config, state.host_store)


def check_graphs_keep(model: PreTrainedModel) -> None:
    """Leave layers uncompiled whose graphs couldn't keep what the config says, where it says."""
    state: ModelState = model.cuboid.state
    config, compiled = state.checkpointing, state.compiled
    if config is None or compiled is None:
        return
    if config.cpu_checkpointing:
        compiled.give_up(f'"{_HOST_KEY}" is true, and what a graph keeps stays on the device')
    elif config.mode == "attention" and model.config._attn_implementation != "sdpa":
        compiled.give_up(f'{_KEY} is "attention", for which graphs need attn_implementation "sdpa"')


def keeping(function: Any, config: ActivationCheckpointingConfig, store: HostStore | None) -> Any:
    """A checkpointing function of transformers that keeps what the config says, where it says.

    Args:
        function: ``torch.utils.checkpoint.checkpoint``, with the options that the script gave.
        config: the section.
        store: of the model; None if everything stays on the device.

    Raises:
        CuboidError: the options don't allow it.
    """
    if config.mode != "attention" and store is None:
        return function
    options = function.keywords if isinstance(function, functools.partial) else {}
    if options.get("use_reentrant") is not False:
        what = f'{_KEY} is "attention"' if store is None else f'"{_HOST_KEY}" is true'
        raise CuboidError(
            f'the config\'s {what}, and the script enables checkpointing with "use_reentrant": true, '
            'which can keep nothing but inputs; give gradient_checkpointing_enable "use_reentrant": false or nothing, '
            + ('or write "layers"' if store is None else "or leave the key out")
        )
    if config.mode == "attention":
        in_graph = functools.partial(function, context_fn=keep_attention_in_graph)
        uncompiled = functools.partial(function, context_fn=keeping_attention(options.get("context_fn"), store))
        function = functools.partial(_checkpoint_by, uncompiled, in_graph)
    return function if store is None else functools.partial(_checkpoint_on_host, store, function)


def _checkpoint_by(uncompiled: Any, in_graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a layer by one function, or in a compiled graph by another one."""
    return (in_graph if torch.compiler.is_compiling() else uncompiled)(*args, **kwargs)


def _checkpoint_on_host(store: HostStore, function: Any, run: Any, *inputs: Any) -> Any:
    """Checkpoint a layer, and keep its inputs on the host."""
    # Compiled code keeps what its compiler decides; without gradients nothing is kept.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not store.is_open:
        return function(run, *inputs)
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs):
        name = getattr(run, "args", [run])[0].__class__.__name__
        raise UnsupportedModelError(
            f'"{_HOST_KEY}" is true, but the model\'s code gives {name} its hidden state by keyword, so that '
            "checkpointing doesn't see it; leave the key out"
        )
    with store.frame() as frame:

        def begin_and_run(*tensors: Any) -> Any:
            # The inputs are kept by now. (Recomputations come here too.)
            frame.begin()
            return run(*tensors)

        # Around torch's own hooks, which keep nothing else that is saved in the layer.
        with torch.autograd.graph.saved_tensors_hooks(frame.keep_input, _read):
            return function(begin_and_run, *inputs)


def _read(kept: Kept) -> torch.Tensor:
    return kept.read()
