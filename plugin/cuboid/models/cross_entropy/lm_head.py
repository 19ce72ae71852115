"""A model's head, which computes logits from final hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.tensor3d.running_forward import begin_forward, end_forward
from cuboid.tensor3d.unshard import UnshardedParam, unshard_modules


class BasePlace(Protocol):
    """The part of an :class:`~cuboid.models.stages.outline.Outline` that a head needs: where the base model is."""

    @property
    def base(self) -> str:
        """Name of the module that is the model without its head."""

    @property
    def output(self) -> type:
        """The class of the base model's output."""


class _Answer(nn.Module):
    """Replaces the base model and returns a given output, without running hooks. Other attributes are the base's."""

    def __init__(self, base: nn.Module, output: Any) -> None:
        super().__init__()
        # In a tuple, so that it isn't registered as a submodule.
        self._base = (base,)
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"][0], name)


@dataclass(frozen=True)
class Head:
    """Computes logits with the language model's own forward, whose base model returns given hidden states.

    So soft-caps, scaling and biases are the model's own.

    Args:
        model: a whole model or a last stage, perhaps sharded.
        outline: the model's outline, or the part of it in :class:`BasePlace`.
        forward: the architecture's forward, unbound; by default that of the model's class.
    """

    model: PreTrainedModel
    outline: BasePlace
    forward: Callable[..., Any] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, L, H]`` to ``[B, L, V]``; on a mesh ``[B/b, L/s, H/h]`` to ``[B/b, L/h, ⌈V/s⌉]``."""
        output = self.run(self.outline.output(last_hidden_state=hidden), inputs_embeds=hidden)
        # With ``config.return_dict`` false, the output is a tuple that starts with logits, since there are no labels.
        # In the output class, an auxiliary loss may precede them.
        logits: torch.Tensor = output[0] if isinstance(output, tuple) else output.logits
        return logits

    def run(self, output: Any, **arguments: Any) -> Any:
        """Call the model's own forward with some arguments, in which the base model returns ``output``."""
        forward = type(self.model).forward if self.forward is None else self.forward
        base = self.model.get_submodule(self.outline.base)
        # Of a stage, whose head runs outside of its units.
        token = begin_forward(True)
        self.model.set_submodule(self.outline.base, _Answer(base, output))
        try:
            return forward(self.model, **arguments)
        finally:
            self.model.set_submodule(self.outline.base, base)
            end_forward(token)

    def unsharded(self) -> AbstractContextManager[list[UnshardedParam]]:
        """In the ``with`` block, the head's parameters are unsharded; see :func:`unshard_modules`."""
        return unshard_modules(self._modules)

    @property
    def drops_out(self) -> bool:
        """Whether what it computes has dropout, as an adapter's may."""
        return any(isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """All modules outside the base model. Cached, since walking through all layers for each unit would be slow."""
        outside = list(_outside(self.model, self.outline.base))
        modules = dict.fromkeys(outside)
        for module in outside:
            if "modules_to_save" in module._modules:
                for copy in _idle_copies(module):
                    for part in copy.modules():
                        modules.pop(part, None)
        return list(modules)


def _outside(module: nn.Module, base: str) -> Iterator[nn.Module]:
    """A module and those in it, without the one named ``base`` and what is reached through that alone.

    An adapter of a head that is tied to the embedding has the embedding's module, under two names.
    """
    yield module
    first, _, rest = base.partition(".")
    for name, child in module._modules.items():
        if child is not None and (name != first or rest):
            yield from _outside(child, rest if name == first else "")


def running_module(module: nn.Module) -> nn.Module:
    """What a wrapper of PEFT's ``modules_to_save`` calls, a copy or the model's own; any other module itself."""
    if "modules_to_save" not in module._modules:
        return module
    wrapper: Any = module
    names = [] if wrapper.disable_adapters else wrapper.active_adapters[:1]
    running: nn.Module = next(
        (wrapper.modules_to_save[name] for name in names if name in wrapper.modules_to_save), wrapper.original_module
    )
    return running


def _idle_copies(wrapper: Any) -> list[nn.Module]:
    """The modules in a wrapper of PEFT's ``modules_to_save`` that it doesn't call now."""
    running = running_module(wrapper)
    return [module for module in (wrapper.original_module, *wrapper.modules_to_save.values()) if module is not running]
