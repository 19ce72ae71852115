"""What stands in a stage's model for the modules of other stages. None of it has parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cuboid.errors import CuboidError
from cuboid.models.stages.outline import Outline


class _Initialized:
    """Stands for whatever a placeholder hasn't, while weights are made: transformers leaves it as it is."""

    _is_hf_initialized = True

    def __getattr__(self, _: str) -> _Initialized:
        return self


class _Placeholder(nn.Module):
    """What all that are in a model have in common.

    Attributes:
        is_initialized: whether it seems to have all that is asked of it; see :func:`taken_for_initialized`.
    """

    is_initialized = False

    def __getattr__(self, name: str) -> Any:
        # Called for what isn't there by itself.
        return _Initialized() if self.is_initialized else super().__getattr__(name)


@contextmanager
def taken_for_initialized(model: nn.Module) -> Iterator[None]:
    """Inside, code that makes a model's weights may go through modules of other stages: it finds nothing to do there.

    Falcon-H1 makes a buffer of every layer, and ModernBERT the head, in one place.
    """
    placeholders = [module for module in model.modules() if isinstance(module, _Placeholder)]
    for placeholder in placeholders:
        placeholder.is_initialized = True
    try:
        yield
    finally:
        for placeholder in placeholders:
            placeholder.is_initialized = False


class PlaceholderLayer(_Placeholder):
    """In the place of a layer of another stage: hands the hidden state on."""

    def __init__(self, layer: nn.Module, outline: Outline) -> None:
        super().__init__()
        # The base model's forward may ask for its kind of attention and the like.
        for name, value in vars(layer).items():
            if name not in vars(self) and isinstance(value, str | int | float | tuple | None):
                setattr(self, name, value)
        self._argument, self._returned = outline.hidden_argument, outline.returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's arguments to what a layer returns, the hidden state being the one given."""
        hidden = args[0] if self._argument is None else kwargs[self._argument]
        return self.wrapped(self.passed(hidden))

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What becomes of the hidden state ``[B, L, H]``."""
        return hidden

    def wrapped(self, hidden: torch.Tensor) -> Any:
        """The hidden state as layers return it."""
        return hidden if self._returned is None else (hidden, *(None,) * (self._returned - 1))


class StageInput(PlaceholderLayer):
    """Right before a stage's first layer: what it is given gives way to what the stage before sent.

    Attributes:
        hidden: ``[B, L, H]``, to be set before the stage's forward.
    """

    hidden: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The received hidden state."""
        assert self.hidden is not None, "a stage's forward before its input was set"
        return self.hidden


class StageOutput(PlaceholderLayer):
    """Right behind a stage's last layer: keeps what it is given, for the next stage.

    Attributes:
        hidden: ``[B, L, H]``, of the forward that ran last.
    """

    hidden: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same, for the rest of the base model's forward, which nobody will look at."""
        self.hidden = hidden
        # What the base model does to it after the layers is the last stage's business and needs no gradient here.
        return hidden.detach()


class PlaceholderModule(_Placeholder):
    """In the place of an embedding, a projection or a norm of another stage."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The hidden state ``[B, L, …]`` that it is given, or else a zero that adds nothing to what it is added to."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 2), None)
        if hidden is not None:
            return hidden
        return torch.zeros((), dtype=self._dtype, device=tensors[0].device if tensors else None)


class PlaceholderEnd(nn.Module):
    """What a script is given for the embedding or the head of another stage: its sizes, and no numbers.

    Its integers, such as ``num_embeddings``, are those of the whole module. Its parameters are tensors of the whole
    shape on the meta device, and none of the model's.
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
        """Not on this stage.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            f"the model's {self._what} is on another stage of the pipeline; give micro-batches to the engine's "
            "train_batch or eval_batch"
        )
