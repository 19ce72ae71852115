"""When gradients of a stage's sharded parameters are reduced: after each unit's backward, or once for a whole step.

With once, each rank adds up the gradients of its blocks over all segments and micro-batches of a step. The backward
that completes a sum reduce-scatters it, behind the computations that follow, as it would a unit's own: whatever becomes
of a gradient then, hooks and all, is the same in both ways. FSDP2 has the idea as ``set_requires_gradient_sync``.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch


class GradientSync:
    """The unreduced gradients of a stage's blocks, shared by all of its sharded parameters.

    It is an object that parameters refer to, not a context variable: under CUDA, threads of autograd's run backward.

    Attributes:
        is_last: whether the backward that runs now is the last one of the step that gives its parameters a gradient.
    """

    def __init__(self) -> None:
        self.is_last = True
        self._sums: dict[Hashable, torch.Tensor] = {}

    def add(self, key: Hashable, gradient: torch.Tensor, *, is_own: bool) -> torch.Tensor | None:
        """Take in a block's gradient.

        Args:
            key: of the block.
            gradient: of one backward.
            is_own: whether the tensor may be written to.

        Returns:
            The sum, in the gradient's dtype, if this was the last one; else None.
        """
        total = self._sums.pop(key, None)
        if total is not None:
            total += gradient
        elif self.is_last:
            return gradient
        else:
            # In float32 at least, as one product of everything would be added up before it is rounded.
            total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=not is_own)
        if self.is_last:
            return total.to(gradient.dtype)
        self._sums[key] = total
        return None

    def take(self, key: Hashable) -> torch.Tensor | None:
        """The sum of a block that the last backward didn't come to."""
        return self._sums.pop(key, None)

    def clear(self) -> None:
        """Forget everything, after an error."""
        self._sums.clear()
        self.is_last = True
