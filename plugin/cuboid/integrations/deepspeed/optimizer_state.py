"""Find the master weights and moments in DeepSpeed's optimizers, by parameter, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerAdapter, OptimizerTensor, Slot
from cuboid.errors import CheckpointError

#: For each optimizer wrapper, its attribute with the parameter groups in the model's precision.
_GROUPS = {
    DeepSpeedZeroOptimizer: "bit16_groups",
    BF16_Optimizer: "bf16_groups",
    FP16_Optimizer: "fp16_groups",
    FP16_UnfusedOptimizer: "fp16_groups",
}


def adapt_optimizer(optimizer: Any, names: Mapping[int, str]) -> OptimizerAdapter:
    """An adapter that reads and restores the state of an engine's optimizer; ``names`` has its parameters', by ``id``.

    Raises:
        CheckpointError: this kind of optimizer isn't supported.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return OptimizerAdapter.direct(optimizer, names)
    attribute = next((attribute for kind, attribute in _GROUPS.items() if isinstance(optimizer, kind)), None)
    base = getattr(optimizer, "optimizer", None)
    if attribute is None or not isinstance(base, torch.optim.Optimizer):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps its state in a way that isn't known; checkpoints know optimizers of "
            "torch's kind by themselves, under ZeRO 1 and 2, and under bf16"
        )
    # A parameter that isn't the model's is the placeholder of a group in which this stage trains nothing.
    parameters = [[p for p in group if id(p) in names] for group in getattr(optimizer, attribute)]
    groups = [
        _unfused(optimizer.fp32_groups[index], in_group, names)
        if isinstance(optimizer, FP16_UnfusedOptimizer)
        else [_flat(group["params"][0], in_group, names, optimizer)]
        for index, (group, in_group) in enumerate(zip(base.param_groups, parameters, strict=True))
    ]
    has_master = any(
        stepped.tensor.dtype != parameter.dtype
        for tensors, in_group in zip(groups, parameters, strict=True)
        for stepped in tensors
        for parameter in in_group
    )
    return OptimizerAdapter(base, groups, has_master=has_master, refresh=optimizer.refresh_fp32_params)


def _unfused(
    copies: Sequence[torch.Tensor], in_group: Sequence[nn.Parameter], names: Mapping[int, str]
) -> list[OptimizerTensor]:
    return [OptimizerTensor.of(copy, names[id(parameter)]) for copy, parameter in zip(copies, in_group, strict=True)]


def _flat(
    flat: torch.Tensor, in_group: Sequence[nn.Parameter], names: Mapping[int, str], optimizer: Any
) -> OptimizerTensor:
    slots = _all_slots(in_group, names) if isinstance(optimizer, FP16_Optimizer) else _partition_slots(in_group, names)
    return OptimizerTensor(flat, tuple(slots), tuple(names[id(parameter)] for parameter in in_group))


def _all_slots(in_group: Sequence[nn.Parameter], names: Mapping[int, str]) -> list[Slot]:
    """Slots of full parameters, laid end to end."""
    slots, offset = [], 0
    for parameter in in_group:
        slots.append(Slot(names[id(parameter)], 0, offset, parameter.numel()))
        offset += parameter.numel()
    return slots


def _partition_slots(in_group: Sequence[nn.Parameter], names: Mapping[int, str]) -> list[Slot]:
    """Slots of this replica's ZeRO partition of each parameter."""
    slots = []
    for parameter in in_group:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            in_parameter, in_master = mapping.lp_fragment_address, mapping.hp_fragment_address
            slots.append(Slot(names[id(parameter)], in_parameter.start, in_master.start, in_parameter.numel))
    return slots
