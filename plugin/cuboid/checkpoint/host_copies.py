"""Copies of a device's tensors in the host's memory, all of them in flight at once."""

from __future__ import annotations

import torch


class HostCopies:
    """Copies of tensors in host memory; complete once they were waited for.

    From an accelerator all of them are in flight at once, into pinned memory, for which its driver needs no buffer of
    its own. torch keeps pinned memory for the next checkpoint.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def copy(self, values: torch.Tensor, *, shared: bool) -> torch.Tensor:
        """The values on the CPU, after :meth:`wait`.

        Args:
            values: of any device.
            shared: whether a tensor that is on the CPU already may be given back as it is.
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
        """Until all copies are complete."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices = set()


def _pinned_like(values: torch.Tensor) -> torch.Tensor | None:
    """Pinned memory of a tensor's size; None where the system pins no more."""
    try:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return None
