"""Gradients that ZeRO's step doesn't copy as a whole; and those of a step that isn't taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

from cuboid.optim.piecewise_step import PiecewiseStep


class GradientPartition(list[Any]):
    """A rank's gradients of one parameter group, in place of the list that DeepSpeed has.

    The step lays them end to end in 16 bits, and then copies that into float32. Of a list with a ``flat_partition`` it
    takes that instead: here they are copied into float32 at once, and freed; or, for an optimizer that steps piece by
    piece, a stand-in without memory, and each piece is copied when it is stepped.

    Args:
        gradients: laid end to end, with padding, they are the partition.
        size: of the partition.
        dtype: of the master weights.
        forget: drops all other references to the gradients.
        take: called with what gives pieces of the partition; None if the optimizer needs the whole of it.
    """

    def __init__(
        self,
        gradients: Iterable[torch.Tensor],
        size: int,
        dtype: torch.dtype,
        forget: Callable[[], object],
        take: Callable[[_Pieces], None] | None = None,
    ) -> None:
        super().__init__(gradients)
        self._size, self._dtype, self._forget, self._take = size, dtype, forget, take

    @property
    def flat_partition(self) -> torch.Tensor:
        """``[size]``; the list is empty afterwards."""
        self._forget()
        pieces = _Pieces(list(self), self._dtype)
        self.clear()
        if self._take is None:
            return pieces(0, self._size)
        self._take(pieces)
        return torch.ones(1, dtype=self._dtype, device=pieces.device).expand(self._size)


class _Pieces:
    """Gradients laid end to end, of which pieces are taken in order; what has been taken is freed."""

    def __init__(self, gradients: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.device = gradients[0].device
        # The last comes first, so that taking one is quick.
        self._gradients, self._dtype, self._taken = gradients[::-1], dtype, 0

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        flat = torch.empty(stop - start, dtype=self._dtype, device=self.device)
        at = 0
        while self._gradients and at < len(flat):
            gradient = self._gradients[-1].reshape(-1)
            part = gradient[self._taken : self._taken + len(flat) - at]
            flat[at : at + len(part)].copy_(part)
            at, self._taken = at + len(part), self._taken + len(part)
            if self._taken == len(gradient):
                self._gradients.pop()
                self._taken = 0
        flat[at:].zero_()
        return flat


def _scale(optimizer: DeepSpeedZeroOptimizer, gradients: Iterable[torch.Tensor], norm: Any) -> None:
    """``unscale_and_clip_grads`` of an optimizer; of a stand-in, its only element."""
    written = [gradient[:1] if gradient.stride() == (0,) else gradient for gradient in gradients]
    DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, written, norm)


def take_over_gradients(optimizer: Any, piecewise: PiecewiseStep | None) -> None:
    """Let the next step of ZeRO 1 or 2 copy gradients as little as it can; other optimizers are left alone.

    Args:
        optimizer: DeepSpeed's.
        piecewise: of the optimizer that it steps; None if that needs whole gradients.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    if piecewise is not None and (piecewise.is_whole or optimizer.torch_autocast_gradscaler):
        piecewise = None
    optimizer.unscale_and_clip_grads = partial(_scale, optimizer)
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
            None if piecewise is None else partial(piecewise.gradients.__setitem__, masters),
        )


def leave_matrices(optimizer: Any) -> None:
    """Keep an optimizer with master weights from running Muon's rule itself, on the gradients of a rank's shards."""
    if isinstance(optimizer, BF16_Optimizer):
        optimizer._uses_muon = False
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        # DeepSpeed marks parameters anew for each engine.
        for parameter in chain.from_iterable(optimizer.bit16_groups):
            parameter.use_muon = False


def has_gradients(optimizer: Any) -> bool:
    """Whether ZeRO 1 or 2 has gradients for its step, without which DeepSpeed's fails; True of other optimizers."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return True
    return bool(optimizer.averaged_gradients) and None not in optimizer.averaged_gradients.values()


def keeps_gradients(optimizer: Any) -> bool:
    """Whether an optimizer of DeepSpeed's takes each backward's gradients, also those that don't end a step.

    ZeRO 1 then leaves sums in ``.grad``, unless it accumulates them in another precision.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return bool(optimizer.partition_gradients or optimizer.use_grad_accum_attribute)
    return isinstance(optimizer, BF16_Optimizer)


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
    for index in (*optimizer.averaged_gradients, *optimizer.all_grad_tensors):
        optimizer.averaged_gradients[index] = optimizer.all_grad_tensors[index] = None
