"""Which parameters an optimizer was taken for: a script may freeze some later, or freeze others no longer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from cuboid.errors import OptimizerError


class TrainedParameters:
    """What an optimizer trains, to tell when a script has changed that.

    Optimizers of frameworks step flat tensors of the parameters that are trained when they are made. One that is frozen
    later still has momentum and weight decay there, and one that isn't frozen any more is in none of them.

    Args:
        model: sharded.
        flat: its parameters that are stepped as parts of flat tensors.
        optimizer: of whose groups each parameter is stepped by itself; None if none is.
        by: the call that took them, for messages.
    """

    def __init__(
        self, model: nn.Module, flat: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None, by: str
    ) -> None:
        in_flat = set(map(id, flat))
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._flat = [(name, p, p.dtype) for name, p in model.named_parameters() if id(p) in in_flat]
        self._optimizer, self._by = optimizer, by

    def check(self) -> None:
        """Check that all is stepped that has gradients now, as it is now, and nothing that is frozen.

        Raises:
            OptimizerError: it isn't so; names the parameter.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad and not self._is_stepped_alone(parameter):
                raise OptimizerError(
                    f"{name} was frozen in {self._by}, and has requires_grad now: it would get gradients but no steps. "
                    "Let all that is ever to be trained have requires_grad there, or call it anew"
                )
        for name, parameter, dtype in self._flat:
            if parameter.dtype != dtype:
                raise OptimizerError(
                    f"{name} was cast from {dtype} to {parameter.dtype} after {self._by}, whose optimizer steps flat "
                    f"tensors in the former: the step would cast it back. Cast the model before, or take "
                    "zero_optimization.stage 0 in float32, where each parameter is stepped by itself"
                )
            if not parameter.requires_grad:
                raise OptimizerError(
                    f"{name} was frozen after {self._by}, since when the optimizer steps flat tensors of all that was "
                    "trained then: momentum and weight decay would go on changing it. Freeze it before, call that "
                    "anew, or take zero_optimization.stage 0 in float32, where each parameter is stepped by itself"
                )

    def _is_stepped_alone(self, parameter: nn.Parameter) -> bool:
        # Its groups may have been replaced, by a state dict for one.
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return any(other is parameter for group in groups for other in group["params"])
