"""When gradients of a stage's sharded parameters are reduced: after each unit's backward, or once for a whole step.

If once, each rank sums the gradients of its blocks over all segments and micro-batches of a step. The backward that
completes a sum reduce-scatters it as it would a single unit's gradient, overlapping with the computations that follow;
from there on, hooks included, both modes are the same. FSDP2 has the same idea in ``set_requires_gradient_sync``.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch


class GradientSync:
    """The unreduced gradients of a stage's blocks, shared by all of its sharded parameters.

    It is an object that parameters refer to and not a context variable: on CUDA, backward runs in autograd's threads.

    Attributes:
        is_last: whether the current backward is the step's last one that gives its parameters a gradient.
    """

    def __init__(self) -> None:
        self.is_last = True
        self._sums: dict[Hashable, torch.Tensor] = {}

    def add(self, key: Hashable, gradient: torch.Tensor, *, is_own: bool) -> torch.Tensor | None:
        """Add one backward's gradient of the block ``key``; ``is_own`` says whether it may be modified in place.

        Returns the sum, in the gradient's dtype, if this backward was the step's last one; else None.
        """
        total = self._sums.pop(key, None)
        if total is not None:
            total += gradient
        elif self.is_last:
            return gradient
        else:
            # In float32 at least: one product over the whole step would sum in float32 before it rounds, too.
            total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=not is_own)
        if self.is_last:
            return total.to(gradient.dtype)
        self._sums[key] = total
        return None

    def take(self, key: Hashable) -> torch.Tensor | None:
        """Remove and return the sum of a block that the last backward didn't use."""
        return self._sums.pop(key, None)

    def clear(self) -> None:
        """Drop all sums, after an error."""
        self._sums.clear()
        self.is_last = True
