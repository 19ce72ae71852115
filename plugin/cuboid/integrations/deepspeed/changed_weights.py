"""What a script changes in an engine's parameters counts in the next step, as under a plain optimizer of torch's.

DeepSpeed's optimizers step on copies of the parameters, and write these back. So they lose a change of the parameters
themselves; and a parameter whose ``data`` is another tensor keeps that for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from cuboid.optim.master_weights import follow
from cuboid.optim.param_groups import AlignedGroups
from cuboid.optim.trained_parameters import TrainedParameters

#: Of a parameter group: the parameters, the flat tensor that they are views of, this replica's part of that, and its
#: master weights.
_WatchedGroup = tuple[list[nn.Parameter], torch.Tensor, torch.Tensor, torch.Tensor]


def _zero_groups(optimizer: Any) -> list[_WatchedGroup]:
    ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]
    parts = [parts[rank] for parts, rank in zip(optimizer.parallel_partitioned_bit16_groups, ranks, strict=True)]
    masters = optimizer.single_partition_of_fp32_groups
    return list(zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, parts, masters, strict=True))


def _bf16_groups(optimizer: Any) -> list[_WatchedGroup]:
    ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]
    parts = [parts[rank] for parts, rank in zip(optimizer.bf16_partitioned_groups, ranks, strict=True)]
    masters = optimizer.fp32_groups_flat_partition
    return list(zip(optimizer.bf16_groups, optimizer.bf16_groups_flat, parts, masters, strict=True))


def _groups_of(optimizer: Any) -> list[_WatchedGroup]:
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return _zero_groups(optimizer)
    if isinstance(optimizer, BF16_Optimizer):
        return _bf16_groups(optimizer)
    # Others step on the parameters themselves.
    return []


def _set_both(
    parameter: Any, set_master: Callable[..., None], value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    """``safe_set_full_fp32_param`` and its kin of DeepSpeed's: a master weight's parameter gets the new value, too."""
    set_master(value, optim_state_key)
    if optim_state_key is None and parameter._hp_mapping is not None:
        parameter._hp_mapping.update_lp()


class ChangedWeights:
    """Finds changes of parameters, and lets the optimizer of a new engine step from them.

    Args:
        optimizer: of the engine.
        model: inside of the engine's module.
        groups: the optimizer's parameter groups, as all stages have them.
    """

    def __init__(self, optimizer: Any, model: nn.Module, groups: AlignedGroups) -> None:
        self._optimizer, self._groups = optimizer, groups
        copied = itertools.chain.from_iterable(parameters for parameters, *_ in _groups_of(optimizer))
        alone = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._trained = TrainedParameters(model, copied, alone, "deepspeed.initialize")
        #: Of each parameter in its flat tensor, which may be moved, but not what is in it.
        self._offsets: dict[nn.Parameter, int] = {}
        for parameters, flat, *_ in _groups_of(optimizer):
            for parameter in parameters:
                self._offsets[parameter] = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
                if hasattr(parameter, "set_full_hp_param"):
                    parameter.set_full_hp_param = partial(_set_both, parameter, parameter.set_full_hp_param)

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Those that the optimizer has copies of."""
        return self._offsets.keys()

    def check_trained(self) -> None:
        """See :meth:`TrainedParameters.check` and :meth:`AlignedGroups.check`."""
        self._trained.check()
        if self._groups.unsure:
            self._groups.check(self._optimizer.param_groups)

    @torch.no_grad()
    def take(self) -> None:
        """Take the parameters' present values, before a step; see also :meth:`check_trained`."""
        self.check_trained()
        for parameters, flat, partition, master in _groups_of(self._optimizer):
            for parameter in parameters:
                offset = self._offsets[parameter]
                if parameter.data_ptr() != flat.data_ptr() + offset * flat.element_size():
                    view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
                    parameter.data = view.copy_(parameter.data)
            follow(master, partition)
