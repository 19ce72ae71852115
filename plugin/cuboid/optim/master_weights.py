"""Master weights follow what a script changes in the parameters that they are copies of."""

from __future__ import annotations

import torch

#: Elements that are compared at once: 4 MiB of float32, so that what is cast for it stays in the caches of a CPU.
_CHUNK = 1 << 20
#: On other devices, where each kernel costs a launch: 64 MiB.
_CHUNK_OF_DEVICES = 1 << 24


@torch.no_grad()
def follow(master: torch.Tensor, parameters: torch.Tensor) -> None:
    """Set the elements of ``master`` whose parameters aren't their rounded values any more: a script has changed these.

    Otherwise an optimizer's step would write the values before the change back into the parameters. Nothing counts
    changes by ``.data``, so all elements are compared. The host doesn't wait for a GPU.

    Args:
        master: ``[n]``.
        parameters: ``[n]``, perhaps in a lower precision, perhaps on another device.
    """
    is_on_cpu = master.device.type == "cpu"
    size = _CHUNK if is_on_cpu else _CHUNK_OF_DEVICES
    for chunk, present in zip(master.split(size), parameters.split(size), strict=True):
        present = present.to(chunk.device)
        rounded = chunk.to(present.dtype)
        # In almost every step nothing has changed, which costs a CPU a tenth of what selecting elements does.
        if is_on_cpu and _have_same_bits(rounded, present):
            continue
        chunk.copy_(torch.where(rounded == present, chunk, present.to(chunk.dtype)))


def _have_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits. False also if eight bytes don't divide them."""
    per_word = 8 // left.element_size()
    if left.numel() % per_word or left.storage_offset() % per_word or right.storage_offset() % per_word:
        return False
    return torch.equal(left.view(torch.int64), right.view(torch.int64))
