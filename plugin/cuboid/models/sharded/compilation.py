"""Compiled layers of a sharded model: by the config's ``tensor_parallel.compile``, or by ``model.compile()``."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.roles import layer_names
from cuboid.models.attention.forward_context import UnitSlot
from cuboid.models.attention.segments_in_graphs import SegmentsInGraphs
from cuboid.models.kinds.causal import Causal
from cuboid.models.sharded.activation_checkpointing import check_graphs_keep
from cuboid.tensor3d.compiled.layers import CompiledLayers
from cuboid.tensor3d.prefetch import ModelPrefetcher

#: The oldest version that layers were compiled with.
_TORCH = "2.11"


def compile_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module] | None = None, slot: UnitSlot | None = None
) -> None:
    """Compile the layers of a model whose modules are sharded, before the model's state is noted.

    Layers that can't be compiled stay as they are, with a warning, now or in the first forward that shows it.

    Args:
        model: sharded, or a pipeline's stages.
        layers: of the stages, in order; by default all of the model's.
        slot: of the stages.

    Raises:
        UnsupportedModelError: this torch is too old.
    """
    if torch.__version__ < torch.torch_version.TorchVersion(_TORCH):
        raise UnsupportedModelError(f"compiled layers need torch {_TORCH}, and this is {torch.__version__}")
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        stay_uncompiled(model, "torch.compile is switched off (TORCH_COMPILE_DISABLE=1 or TORCHDYNAMO_DISABLE=1)")
        return
    kind = model.cuboid.kind
    if type(kind) is not Causal:
        compared = f"graphs were compared with plain transformers for {Causal.words}"
        stay_uncompiled(model, f"{compared}, not for {kind.words}")
        return
    if layers is None:
        layers = [model.get_submodule(name) for name in layer_names(model)]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    prefetcher = next((hook for hook in hooks if isinstance(hook, ModelPrefetcher)), None)
    segments = None if slot is None else SegmentsInGraphs(layers, slot)
    refuse = functools.partial(stay_uncompiled, model)
    model.cuboid.state.compiled = CompiledLayers(layers, prefetcher, refuse, segments)


def compile_later(model: Any, options: dict[str, Any]) -> None:
    """Compile the layers of a model that is sharded already.

    Args:
        model: sharded.
        options: of ``torch.compile``. ``fullgraph`` and ``dynamic`` are decided here.

    Raises:
        UnsupportedModelError: another compiler than Inductor, or a mode of it.
    """
    for name, usual in (("backend", "inductor"), ("mode", "default"), ("options", None)):
        if options.get(name) not in (None, usual):
            raise UnsupportedModelError(
                f"{name}={options[name]!r} has no rule for the layers of a sharded model, which have collectives in "
                f"their graphs; leave it out, or write {usual!r}"
            )
    if model.cuboid.state.compiled is None:
        compile_layers(model)
        model.cuboid.state.made = model.cuboid.state.made.anew(model)
        check_graphs_keep(model)


def stay_uncompiled(model: Any, reason: str) -> None:
    """Say once why a model's layers run uncompiled."""
    if model.cuboid.state.made is not None:
        model.cuboid.state.made.note_classes()
    warnings.warn(
        f"compiling was asked for, but the layers of {type(model).__name__} run uncompiled, as they would without: "
        f"{reason}",
        stacklevel=2,
    )
