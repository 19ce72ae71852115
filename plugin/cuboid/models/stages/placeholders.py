"""Placeholders for modules of other stages in a stage's model. None of them has parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cuboid.errors import CuboidError
from cuboid.models.stages.outline import Branch, Outline


class _Initialized:
    """Any attribute of a placeholder while weights are initialized; transformers skips what has this flag."""

    _is_hf_initialized = True

    def __getattr__(self, _: str) -> _Initialized:
        return self


class _Placeholder(nn.Module):
    """Base class of the placeholders in a model.

    Attributes:
        is_initialized: whether every missing attribute seems to be there; see :func:`taken_for_initialized`.
    """

    is_initialized = False

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that aren't found otherwise.
        if self.is_initialized:
            return _Initialized()
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"{name!r} belongs to a module that another stage has", name=name, obj=self) from None


@contextmanager
def taken_for_initialized(model: nn.Module) -> Iterator[None]:
    """In the ``with`` block, code that initializes weights may access modules of other stages; it skips all of them.

    Falcon-H1 initializes a buffer of every layer in one place, and ModernBERT the head.
    """
    placeholders = [module for module in model.modules() if isinstance(module, _Placeholder)]
    for placeholder in placeholders:
        placeholder.is_initialized = True
    try:
        yield
    finally:
        for placeholder in placeholders:
            placeholder.is_initialized = False


def _copy_values(module: nn.Module, placeholder: nn.Module) -> None:
    """Give a placeholder the module's attributes of plain types that it hasn't itself."""
    for name, value in vars(module).items():
        if name not in vars(placeholder) and isinstance(value, str | int | float | tuple | None):
            setattr(placeholder, name, value)


class PlaceholderLayer(_Placeholder):
    """Placeholder for a layer of another stage: returns the hidden state unchanged."""

    def __init__(self, layer: nn.Module, outline: Outline) -> None:
        super().__init__()
        # The base model's forward may read these, for example a layer's kind of attention.
        _copy_values(layer, self)
        self._argument, self._returned = outline.hidden_argument, outline.returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take a layer's arguments, and return :meth:`passed` in the form of a layer's output."""
        hidden = args[0] if self._argument is None else kwargs[self._argument]
        return self.wrapped(self.passed(hidden))

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state ``[B, L, H]`` to return for a given one."""
        return hidden

    def wrapped(self, hidden: torch.Tensor) -> Any:
        """The hidden state as layers return it: itself, or first in a tuple."""
        return hidden if self._returned is None else (hidden, *(None,) * (self._returned - 1))


class StageInput(PlaceholderLayer):
    """Placeholder right before a stage's first layer: returns the hidden state that was received.

    Attributes:
        hidden: ``[B, L, H]``, to be set before the stage's forward.
    """

    hidden: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The received hidden state."""
        assert self.hidden is not None, "a stage's forward before its input was set"
        return self.hidden


class StageOutput(PlaceholderLayer):
    """Placeholder right after a stage's last layer: keeps the stage's output for the next stage.

    Attributes:
        hidden: ``[B, L, H]``, the output of the last forward.
    """

    hidden: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the hidden state. The rest of the base model's forward runs on, but its result is ignored."""
        self.hidden = hidden
        # Code after the layers belongs to the last stage, so it must not extend the graph here.
        return hidden.detach()


class PlaceholderBranch(_Placeholder):
    """Placeholder for a branch of a layer's other half: returns zeros, which change nothing in a residual sum."""

    def __init__(self, module: nn.Module, branch: Branch) -> None:
        super().__init__()
        # The layer's forward may read these.
        _copy_values(module, self)
        self._branch = branch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros ``[B, L, H]`` in the form of the branch's output. One expanded element takes no memory."""
        argument = self._branch.argument
        hidden = args[argument] if isinstance(argument, int) else kwargs[argument]
        zeros = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
        return zeros if self._branch.returned is None else (zeros, *(None,) * (self._branch.returned - 1))


class PlaceholderModule(_Placeholder):
    """Placeholder for an embedding, a projection or a norm of another stage."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The hidden state ``[B, L, …]`` among the arguments, or a scalar zero, which is neutral in a sum."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 2), None)
        if hidden is not None:
            return hidden
        return torch.zeros((), dtype=self._dtype, device=tensors[0].device if tensors else None)


class PlaceholderEnd(nn.Module):
    """Stands in for the embedding or the head of another stage when a script asks for it: has sizes, but no values.

    Its integers, such as ``num_embeddings``, are those of the whole module. Its weights are tensors of the whole shape
    on the meta device, and aren't parameters of the model.
    """

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if isinstance(value, int) and name not in vars(self):
                setattr(self, name, value)
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        self.bias = getattr(self, "bias", None)
        self._what = what

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Can't run on this stage.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            f"the model's {self._what} is on another stage of the pipeline; give micro-batches to the engine's "
            "train_batch or eval_batch"
        )
