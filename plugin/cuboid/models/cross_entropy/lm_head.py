"""A model's head: what turns final hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.tensor3d.unshard import UnshardedParam, unshard_modules

#: Whether a :class:`Head` runs, which knows that a sharded model's head takes and gives parts.
_runs: ContextVar[bool] = ContextVar("cuboid_head_runs", default=False)


def is_in_head() -> bool:
    """Whether this thread is inside :meth:`Head.logits`."""
    return _runs.get()


class BasePlace(Protocol):
    """Of an :class:`~cuboid.models.stages.outline.Outline`, what a head needs to know: where the base model is."""

    @property
    def base(self) -> str:
        """The model without its head, by name."""

    @property
    def output(self) -> type:
        """The class of what the base model returns."""


class _Answer(nn.Module):
    """Stands where the base model was, hooks and all, and returns a given output; all else is the base model's."""

    def __init__(self, base: nn.Module, output: Any) -> None:
        super().__init__()
        # In a tuple, so that it isn't a module of this one.
        self._base = (base,)
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"][0], name)


@dataclass(frozen=True)
class Head:
    """What turns final hidden states into logits: the causal language model's own forward around its base model.

    Soft-caps, scaling and biases are so the model's own.

    Args:
        model: a whole model or a last stage, perhaps sharded.
        outline: the model's, or as much of one.
        forward: the architecture's forward, unbound; by default that of the model's class.
    """

    model: PreTrainedModel
    outline: BasePlace
    forward: Callable[..., Any] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, L, H]`` to ``[B, L, V]``; on a mesh ``[B/b, L/s, H/h]`` to ``[B/b, L/h, ⌈V/s⌉]``."""
        output = self.run(self.outline.output(last_hidden_state=hidden), inputs_embeds=hidden)
        # With config.return_dict off a tuple, in which logits come first without labels. In the class an auxiliary loss
        # may stand in front of them.
        logits: torch.Tensor = output[0] if isinstance(output, tuple) else output.logits
        return logits

    def run(self, output: Any, **arguments: Any) -> Any:
        """What the model's own forward returns for some arguments and what its base model returned for them."""
        forward = type(self.model).forward if self.forward is None else self.forward
        base = self.model.get_submodule(self.outline.base)
        token = _runs.set(True)
        self.model.set_submodule(self.outline.base, _Answer(base, output))
        try:
            return forward(self.model, **arguments)
        finally:
            self.model.set_submodule(self.outline.base, base)
            _runs.reset(token)

    def unsharded(self) -> AbstractContextManager[list[UnshardedParam]]:
        """Unshard the head's parameters for the time of a ``with``; see :func:`unshard_modules`."""
        return unshard_modules(self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """All but the base model's. Kept: to walk through the modules of all layers would take long for each unit."""
        base = self.outline.base
        named = self.model.named_modules()
        return [module for name, module in named if name != base and not name.startswith(f"{base}.")]
