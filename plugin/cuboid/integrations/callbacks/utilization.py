"""What model FLOPs utilization is computed of: a step's operations, and the devices' peak."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.distributed.mesh import current_world_size
from cuboid.errors import CuboidError
from cuboid.failures.rank_agreement import gather_objects
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.model_costs import sizes_of
from cuboid.models.stages.stage_model import StageModel

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


def computed_share(model: nn.Module) -> float:
    """The part that a step computes of 6 operations for each parameter and token: of a frozen one it is 4.

    Collective over the ranks of a pipeline, each of which knows what it trains. Embeddings aren't counted, as in
    ``PreTrainedModel.floating_point_ops``.
    """
    inner: Any = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        return 1.0
    is_stage = isinstance(inner, StageModel)
    count = functools.partial(PreTrainedModel.num_parameters, inner) if is_stage else inner.num_parameters
    counts = tuple(count(exclude_embeddings=True, only_trainable=only_trained) for only_trained in (True, False))
    of_ranks = gather_objects(counts, inner.cuboid.mesh, what="counting parameters") if is_stage else [counts]
    trained, total = (sum(numbers) for numbers in zip(*of_ranks, strict=True))
    return (4 * total + 2 * trained) / (6 * total) if total else 1.0
