"""Detects optimizer steps, which make weights that stay unsharded out of date."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps of all optimizers.

    A tensor's version counter counts changes in place, but not those through ``.data``, which frameworks with a flat
    copy of the parameters use to write back updates. All of them step a ``torch.optim.Optimizer``.
    """

    def __init__(self) -> None:
        self.count = 0
        # Weak, because torch keeps the hook, which is global, until it is removed.
        self_ref = weakref.ref(self)

        def count_one(*_: Any) -> None:
            counter = self_ref()
            if counter is not None:
                counter.count += 1

        weakref.finalize(self, register_optimizer_step_post_hook(count_one).remove)

    def __deepcopy__(self, memo: dict[int, object]) -> OptimizerSteps:
        # It counts the steps of all optimizers, so that a copied model can share it.
        return self
