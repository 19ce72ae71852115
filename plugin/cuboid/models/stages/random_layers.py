"""Checks that a model runs all of its layers in training: stages, and segments, would each decide by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from cuboid.errors import UnsupportedModelError
from cuboid.models.sharded.random_code import libraries_drawn_from
from cuboid.models.tensor_flow import Flow


def check_all_layers_run(model: PreTrainedModel, layers: str, ids: torch.Tensor) -> None:
    """Run a model, and ids ``[B, S]``, on the meta device in training mode, with random numbers that drop whatever may
    be dropped.

    Raises:
        UnsupportedModelError: a layer doesn't run, or whether it does is drawn from numpy or Python's ``random``.
    """
    owner = layers.rpartition(".")[0]
    drawn_from = libraries_drawn_from(type(model.get_submodule(owner)))
    if not drawn_from:
        return
    ran: set[nn.Module] = set()
    module_list = model.get_submodule(layers)
    assert isinstance(module_list, nn.ModuleList)
    hooks = [layer.register_forward_pre_hook(lambda layer, _: ran.add(layer)) for layer in module_list]
    before = random.getstate(), str(np.random.get_state())
    model.train()
    try:
        with Flow(), _Lowest(), torch.no_grad(), torch.device("meta"):
            model(input_ids=ids)
    finally:
        model.eval()
        for hook in hooks:
            hook.remove()
    cls, owner_cls = type(model).__name__, type(model.get_submodule(owner)).__name__
    if len(ran) < len(module_list) or (random.getstate(), str(np.random.get_state())) != before:
        raise UnsupportedModelError(
            f"a pipeline can't cut {cls}: {owner_cls} drops whole layers at random in training (layerdrop), which "
            "stages and segments would each decide by themselves; set its probability to 0, or use a mesh without a "
            "pipeline section"
        )


class _Lowest(TorchFunctionMode):
    """Single random numbers are 0, which is below any probability."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_number = getattr(func, "__name__", "") in ("rand", "uniform_") and result.dim() < 2 and result.numel() == 1
        # Not a tensor: ``Flow`` would answer comparisons with it.
        return np.float64(0) if is_number else result
