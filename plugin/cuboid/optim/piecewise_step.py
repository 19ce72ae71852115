"""Adam's step on long flat parameters, piece by piece, so that what it makes on the way is as large as a piece.

Torch's Adam makes tensors as long as its parameters: by default the denominator, and beforehand somebody has made the
gradient in the parameters' dtype. Each element's new value follows from that element's alone, so that pieces have the
same bits as the whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as global_hooks

#: Elements of a piece: a multiple of what a vector instruction takes, so that the same elements are in one.
PIECE = 1 << 24
#: Attribute of a hook of all optimizers' steps that may run once for each piece.
MAY_REPEAT = "cuboid_may_repeat"
#: Gives a parameter's gradient ``[stop - start]``, in its dtype, from ``start`` and ``stop``. Called in order.
GradientPieces = Callable[[int, int], torch.Tensor]


class PiecewiseStep:
    """Steps an optimizer piece by piece from now on.

    Attributes:
        gradients: by parameter, what gives its gradient in the next step. ``grad`` is a stand-in then, one number that
            is expanded, which the gradient is multiplied with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._step = optimizer, optimizer.step
        self.gradients: dict[torch.Tensor, GradientPieces] = {}

        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            return self._step(closure) if closure is not None or self.is_whole else self._run()

        # Schedules look for it, and take a method only.
        if hasattr(self._step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    @classmethod
    def of(cls, optimizer: Any) -> PiecewiseStep | None:
        """For an optimizer whose rule is known to allow it; None for others."""
        is_known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        return cls(optimizer) if is_known and not optimizer.defaults["differentiable"] else None

    @property
    def is_whole(self) -> bool:
        """Whether there are hooks of steps, which run once for a whole one."""
        hooks = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        others = global_hooks._global_optimizer_pre_hooks, global_hooks._global_optimizer_post_hooks
        return any(hooks) or any(not hasattr(hook, MAY_REPEAT) for by_id in others for hook in by_id.values())

    def _run(self) -> None:
        groups = self._optimizer.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_parameter(group, parameter, self.gradients.pop(parameter, None))
        finally:
            self._optimizer.param_groups = groups
            self.gradients.clear()

    def _step_parameter(self, group: dict[str, Any], parameter: torch.Tensor, pieces: GradientPieces | None) -> None:
        count = parameter.numel()
        if parameter.dim() != 1 or (count <= PIECE and pieces is None):
            self._step_one(group, parameter)
            return
        state = self._optimizer.state
        before = dict(state.get(parameter, {}))
        after: dict[str, Any] = dict(before)
        for start in range(0, count, PIECE):
            stop = min(start + PIECE, count)
            piece = parameter.detach()[start:stop]
            gradient = parameter.grad[start:stop]  # type: ignore[index]
            piece.grad = gradient if pieces is None else pieces(start, stop).mul_(gradient[:1])
            if before:
                state[piece] = {name: _part(value, parameter, start, stop) for name, value in before.items()}
            self._step_one(group, piece)
            for name, value in state.pop(piece).items():
                after[name] = _joined(after.get(name), value, parameter, start, stop)
        if not before:
            state[parameter] = after
            return
        for name, value in before.items():
            # Others may refer to the tensors of a state.
            if not isinstance(value, torch.Tensor):
                state[parameter][name] = after[name]
            elif value.shape != parameter.shape:
                value.copy_(after[name])

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        self._optimizer.param_groups = [{**group, "params": [parameter]}]
        self._step()


def _part(value: Any, parameter: torch.Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Each piece counts the step by itself.
    return value[start:stop] if value.shape == parameter.shape else value.clone()


def _joined(total: Any, value: Any, parameter: torch.Tensor, start: int, stop: int) -> Any:
    """A state's value with that of a piece in it."""
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return value
    if total is None:
        total = torch.zeros_like(parameter, dtype=value.dtype)
    if total.data_ptr() + start * total.itemsize != value.data_ptr():
        total[start:stop].copy_(value)
    return total
