"""Rows of a micro-batch with different adapters: ``adapter_names``, as PEFT has it, and in training too.

The names are those of the whole micro-batch's rows, so all ranks know which adapters it has. Each rank multiplies its
rows with all of these, stacked, and masks the features Z of the others: messages and gathers are the same on all ranks,
whichever rows they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper

from cuboid.distributed.axis_collectives import own_slice, padded_length
from cuboid.errors import UnsupportedModelError
from cuboid.integrations.peft.layers.adapted_layer import RowAdapters, rows_with
from cuboid.integrations.peft.layers.lora_layer import ShardedLoraLinear
from cuboid.models.batch.local_batch import with_rows
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.stage_model import StageModel

#: PEFT's name for a row without an adapter.
BASE = "__base__"
_WHY = "; give the rows of each adapter in a micro-batch of their own, after set_adapter"


@contextmanager
def by_rows(peft_model: Any, adapter_names: Any, beams: Any = None) -> Iterator[None]:
    """In the ``with`` block, the model's forwards give each row the adapter of its name.

    Args:
        peft_model: around a sharded model.
        adapter_names: for each row of the whole micro-batch.
        beams: ``num_beams`` of ``generate``, each of which is a row.

    Raises:
        ValueError: there is no such adapter, or it is merged, or DoRA; with PEFT's words.
        UnsupportedModelError: a layer of one of the adapters has no rule for it.
    """
    if not isinstance(adapter_names, list | tuple) or not all(isinstance(name, str) for name in adapter_names):
        raise TypeError(f"Got adapter names of type {type(adapter_names)}, expected a list of str.")
    names = [name for name in adapter_names for _ in range(beams if isinstance(beams, int) and beams > 1 else 1)]
    inner: Any = unwrap(peft_model)
    used = sorted(set(names) - {BASE})
    _check(peft_model, inner, used)

    def check_rows(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and len(ids) != len(names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(names)} and {len(ids)} respectively."
            )

    mesh = inner.cuboid.mesh
    more = padded_length(len(names), mesh.size("batch")) - len(names)
    device = next(inner.parameters()).device
    masks = {}
    for name in used:
        mask = torch.tensor([[[row == name]] for row in names], device=device)
        masks[name] = own_slice(with_rows("adapter_names", mask, more), 0, mesh.along("batch"))
    handle = inner.register_forward_pre_hook(check_rows, with_kwargs=True)
    try:
        with rows_with(RowAdapters(tuple(used), masks)):
            yield
    finally:
        handle.remove()


def _check(peft_model: Any, inner: Any, used: Sequence[str]) -> None:
    if missing := sorted(set(used) - set(peft_model.peft_config)):
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(missing)}")
    if isinstance(inner, StageModel):
        raise UnsupportedModelError(f"adapter_names: a pipeline's rows have the same adapters{_WHY}")
    if inner.cuboid.state.compiled is not None:
        raise UnsupportedModelError(f"adapter_names: compiled layers give all rows the same adapters{_WHY}")
    if inner.training and any(getattr(module, "gradient_checkpointing", False) for module in inner.modules()):
        raise UnsupportedModelError(
            "adapter_names: a recomputed layer doesn't know them any more; leave activation checkpointing out, or give "
            "the rows of each adapter in a micro-batch of their own, after set_adapter"
        )
    for name, layer in inner.named_modules():
        if not isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper) or not _has_any(layer, used):
            continue
        if not isinstance(layer, ShardedLoraLinear) or layer.is_head:
            raise UnsupportedModelError(
                f"adapter_names: {name} ({type(layer).__name__}) has no rule for rows with different adapters, which "
                f"LoRA of linear layers that the mesh cuts has{_WHY}"
            )
        if layer.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        if any(layer.use_dora.get(adapter, False) for adapter in used):
            raise ValueError("Cannot pass `adapter_names` when DoRA is enabled.")


def _has_any(layer: Any, used: Sequence[str]) -> bool:
    """Whether a layer of PEFT's has a part of one of some adapters."""
    parts: list[Any] = [getattr(layer, name, None) for name in (*layer.adapter_layer_names, *layer.other_param_names)]
    return any(name in part for part in parts if hasattr(part, "keys") for name in used)
