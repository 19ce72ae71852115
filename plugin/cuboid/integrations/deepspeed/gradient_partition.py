"""Gradients that ZeRO's step copies once, where it would copy them twice; and those of a step that isn't taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer


class GradientPartition(list[Any]):
    """A rank's gradients of one parameter group, in place of the list that DeepSpeed has.

    The step lays them end to end in 16 bits, and then copies that into float32. Of a list with a ``flat_partition`` it
    takes that instead: here they are copied into float32 at once, and freed.

    Args:
        gradients: laid end to end, with padding, they are the partition.
        size: of the partition.
        dtype: of the master weights.
        forget: drops all other references to the gradients.
    """

    def __init__(
        self, gradients: Iterable[torch.Tensor], size: int, dtype: torch.dtype, forget: Callable[[], object]
    ) -> None:
        super().__init__(gradients)
        self._size, self._dtype, self._forget = size, dtype, forget

    @property
    def flat_partition(self) -> torch.Tensor:
        """``[size]``; the list is empty afterwards."""
        self._forget()
        flat = torch.empty(self._size, dtype=self._dtype, device=self[0].device)
        start = 0
        self.reverse()
        while self:
            gradient = self.pop()
            flat[start : start + gradient.numel()].copy_(gradient.reshape(-1))
            start += gradient.numel()
        flat[start:].zero_()
        return flat


def take_over_gradients(optimizer: Any) -> None:
    """Let the next step of ZeRO 1 or 2 copy gradients once; other optimizers are left alone."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    for index, gradients in optimizer.averaged_gradients.items():
        # DeepSpeed's own buffers have a partition already.
        if type(gradients) is not list:
            continue
        masters, parameters = optimizer.single_partition_of_fp32_groups[index], optimizer.params_in_partition[index]
        optimizer.averaged_gradients[index] = GradientPartition(
            gradients,
            int(optimizer.partition_size[index]),
            masters.dtype,
            partial(optimizer.free_grad_in_param_list, parameters),
        )


def drop_gradients(optimizer: Any) -> None:
    """Clear what an optimizer of DeepSpeed's has collected for its next step, as its own step does on an overflow.

    Gradients that an engine's module has in ``.grad`` are left to the engine.
    """
    if hasattr(optimizer, "overflow"):
        # accelerate reads it, and would hold back the Trainer's schedule.
        optimizer.overflow = False
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.zero_grad()
        return
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer._wait_for_offload_copies()
    optimizer.zero_grad(set_to_none=True)
    optimizer._release_preflattened_grad_buffers()
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
        return
    for index in optimizer.averaged_gradients:
        optimizer.averaged_gradients[index] = optimizer.all_grad_tensors[index] = None
