"""When the values of parameters change, as far as weights that are kept gathered must know."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps of all optimizers.

    A version counter tells of changes in place, but not of those through ``.data``, by which frameworks with a flat
    copy of the parameters hand out what their optimizer made. Every one of them steps a ``torch.optim.Optimizer``.
    """

    def __init__(self) -> None:
        self.count = 0
        own = weakref.ref(self)

        def count_one(*_: Any) -> None:
            counter = own()
            if counter is not None:
                counter.count += 1

        weakref.finalize(self, register_optimizer_step_post_hook(count_one).remove)

    def __deepcopy__(self, memo: dict[int, object]) -> OptimizerSteps:
        # A copied model's optimizers count as well.
        return self
