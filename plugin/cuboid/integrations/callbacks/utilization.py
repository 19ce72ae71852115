"""What model FLOPs utilization is computed of: a step's operations, and the devices' peak."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cuboid.distributed.mesh import current_world_size
from cuboid.errors import CuboidError
from cuboid.models.stages.model_costs import sizes_of

#: Dense bfloat16 FLOP/s by a part of the device's name, from NVIDIA's data sheets. The first match counts, so a name
#: comes before its own prefix.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """A device's peak FLOP/s with weights of a dtype; None if it isn't known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def peak_of_all_ranks(device: torch.device, dtype: torch.dtype) -> float | None:
    """:func:`peak_flops` of all ranks' devices together, which are alike."""
    peak = peak_flops(device, dtype)
    return None if peak is None else peak * current_world_size()


def step_flops(full_model: PreTrainedModel, length: int, rows: int) -> float | None:
    """FLOPs of forward and backward of ``rows`` sequences, backward as twice the forward; None without a formula."""
    try:
        sizes = sizes_of(full_model)
    except CuboidError:
        return None
    return 3.0 * rows * (sum(sizes.layer_flops(length)) + sizes.head_flops(length))
