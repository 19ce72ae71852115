"""Copy what is saved to host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from cuboid.checkpoint.metadata import ShardedTensor
from cuboid.checkpoint.save_plan import SavePlan


class HostCopies:
    """Device-to-host copies, all in flight concurrently, that are complete after :meth:`wait`.

    Copies from an accelerator run asynchronously into pinned memory, for which the driver needs no staging buffer.
    torch's host allocator keeps the pinned memory for the next checkpoint.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def copy(self, values: torch.Tensor, *, shared: bool) -> torch.Tensor:
        """Start to copy a tensor to the CPU; the result is valid after :meth:`wait`.

        Args:
            values: a tensor on any device.
            shared: whether to return a tensor that is already on the CPU itself, instead of a clone.
        """
        values = values.detach()
        if values.device.type == "cpu":
            return values if shared else values.clone()
        pinned = _pinned_like(values)
        if pinned is None:
            return values.to("cpu")
        self._devices.add(values.device)
        return pinned.copy_(values, non_blocking=True)

    def wait(self) -> None:
        """Block until all copies are complete."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices = set()


def snapshot(plan: SavePlan) -> SavePlan:
    """The plan with copies, in host memory, of all that training changes in place."""
    host = HostCopies()

    def copied(tensor: ShardedTensor) -> ShardedTensor:
        if tensor.local is None:
            return tensor
        # Tensors on the CPU are cloned too, because training continues to update them.
        values = host.copy(tensor.local.values, shared=False)
        return replace(tensor, local=replace(tensor.local, values=values))

    items = tuple(replace(item, tensors=tuple(map(copied, item.tensors))) for item in plan.items)
    host.wait()
    optimizer = plan.optimizer
    if optimizer is not None:
        # Its quantities were copied with the items; from here on only their names are used.
        numbers, groups = _copy_value(optimizer.numbers), _copy_value(optimizer.groups)
        optimizer = replace(optimizer, numbers=numbers, groups=groups)
    return replace(plan, items=items, optimizer=optimizer, document=_copy_value(dict(plan.document)))


def _copy_value(value: Any) -> Any:
    """Deep-copy what ``state.json`` can hold; other values are kept, so that the encoder rejects them by key.

    A step counter, a learning rate or a list in ``client_state`` may be changed in place by the next step.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and type(value) in (torch.Tensor, nn.Parameter)
    ):
        return value if value.is_meta or value.is_quantized else value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copy_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        copies = [_copy_value(item) for item in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value


def _pinned_like(values: torch.Tensor) -> torch.Tensor | None:
    """An empty pinned tensor of the same shape and dtype; None if the system can't pin more memory."""
    try:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return None
