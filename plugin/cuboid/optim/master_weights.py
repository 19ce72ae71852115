"""Master weights follow what a script changes in the parameters that they are copies of."""

from __future__ import annotations

import torch

#: Elements that are compared at once: 64 MiB of float32.
_CHUNK = 1 << 24


@torch.no_grad()
def follow(master: torch.Tensor, parameters: torch.Tensor) -> None:
    """Set the elements of ``master`` whose parameters aren't their rounded values any more: a script has changed these.

    Otherwise an optimizer's step would write the values before the change back into the parameters. Nothing counts
    changes by ``.data``, so all elements are compared. The host doesn't wait for the device.

    Args:
        master: ``[n]``.
        parameters: ``[n]``, perhaps in a lower precision, perhaps on another device.
    """
    for chunk, present in zip(master.split(_CHUNK), parameters.split(_CHUNK), strict=True):
        present = present.to(chunk.device)
        chunk.copy_(torch.where(chunk.to(present.dtype) == present, chunk, present.to(chunk.dtype)))
