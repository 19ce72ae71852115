"""Device-to-host copies of tensors, all in flight concurrently."""

from __future__ import annotations

import torch


class HostCopies:
    """Device-to-host copies that are complete after :meth:`wait`.

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


def _pinned_like(values: torch.Tensor) -> torch.Tensor | None:
    """An empty pinned tensor of the same shape and dtype; None if the system can't pin more memory."""
    try:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return None
