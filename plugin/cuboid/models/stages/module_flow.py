"""Trace one forward on the meta device: which modules run in which order, and what they pass on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.tensor_flow import Flow


class ForwardLog:
    """Records with hooks how one forward of a model runs its list of layers.

    Args:
        model: the model.
        layers: the model's list of layers.
        units: names of modules of which a stage has all or none.
        ids: the forward's token ids ``[B, S]``.
        kind: of the model.

    Attributes:
        flow: tracks dependencies between tensors.
        times: when each unit of modules ran: "before" the first layer, "between" the layers or in them, or "after".
        outermost: names of the modules that the model's own forward called, with their outputs.
        ran: all modules that were called.
        hidden: the hidden state that the last layer to run returned.
        argument: the layers' argument for the hidden state: 0 (the first positional one) or a keyword.
        returned: None if layers return the hidden state itself; else the length of the tuple that it comes first in.
        finished: number of layers that ran.
        problem: in words, the first deviation from a plain list of layers; None if there was none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: nn.ModuleList,
        units: Iterable[str],
        ids: torch.Tensor,
        kind: ModelKind,
    ) -> None:
        self.flow = Flow()
        self.flow.mark(ids, _IDS)
        self.count = len(layers)
        self.times: dict[str, set[str]] = {name: set() for name in units}
        self.outermost: list[tuple[str, Any]] = []
        self.ran: set[nn.Module] = set()
        self.hidden: torch.Tensor | None = None
        self.argument: int | str | None = None
        self.returned: int | None = None
        self.finished = 0
        self.problem: str | None = None
        self._model, self._layers, self._ids, self._kind = model, layers, ids, kind
        self._embedding = model.get_input_embeddings()
        self._begun = 0
        self._version = 0
        self._depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward that runs in the ``with`` block."""
        hooks: list[Any] = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave(name)))
        for unit, times in self.times.items():
            for module in self._model.get_submodule(unit).modules():
                hooks.append(module.register_forward_pre_hook(self._note(times)))
        for index, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(self._begin_layer(index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._end_layer(index)))
        try:
            with self.flow:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _complain(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._depth += 1
        self.ran.add(module)

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._depth -= 1
            # The model itself is at depth 1, so this module was called by the model's own forward.
            if self._depth == 1:
                self.outermost.append((name, output))

        return leave

    def _note(self, times: set[str]) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            times.add("before" if not self._begun else "between" if self.finished < self.count else "after")
            if not isinstance(module, nn.Embedding) or module is self._embedding or not self._kind.is_causal:
                return
            index = args[0] if args else None
            if isinstance(index, torch.Tensor) and index is not self._ids and self.flow.marks_of(index):
                # As RoBERTa does for its positions. A stage is given positions that count from 0 instead.
                self._complain("it looks up an embedding by something that it computes from the token ids")

        return note

    def _begin_layer(self, index: int) -> Callable[..., None]:
        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index != self._begun:
                self._complain(f"layer {index} runs as number {self._begun}")
            inputs: dict[int | str, Any] = dict(enumerate(args[:1]))
            inputs.update(kwargs)
            place = next((key for key, value in inputs.items() if self._is_hidden(value)), None)
            if place is None or (index and place != self.argument):
                self._complain(f"layer {index} isn't given what the layer before it returned")
            else:
                self.argument = place
                self.flow.mark(inputs[place], f"the hidden state of layer {index}")
            self.flow.allowed = frozenset({f"the hidden state of layer {index}"})
            self.flow.place = f"layer {index}"
            self._begun = index + 1

        return begin

    def _is_hidden(self, value: Any) -> bool:
        """Whether an argument is the hidden state: the previous layer's, unmodified; for layer 0 any that may be it."""
        if self.hidden is not None:
            return value is self.hidden and value._version == self._version
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3

    def _end_layer(self, index: int) -> Callable[..., None]:
        def end(_: nn.Module, __: Any, output: Any) -> None:
            returned = len(output) if isinstance(output, tuple) else None
            hidden = output[0] if isinstance(output, tuple) else output
            if not isinstance(hidden, torch.Tensor):
                self._complain(f"layer {index} returns a {type(output).__name__}")
                return
            if index and (returned != self.returned or self._shape() != (hidden.shape, hidden.dtype)):
                self._complain(f"layer {index} returns something else than the layers before it")
            self.hidden, self._version, self.returned = hidden, hidden._version, returned
            self.finished += 1
            last = self.finished == self.count
            # A head that the model's own forward runs is given the ids again on the last stage.
            ends = frozenset({_END, _IDS} if self._kind.runs_own_head else {_END})
            self.flow.allowed = ends if last else None
            self.flow.place = "what follows the last layer"
            if last:
                self.flow.mark(hidden, _END)

        return end

    def _shape(self) -> tuple[torch.Size, torch.dtype]:
        assert self.hidden is not None
        return self.hidden.shape, self.hidden.dtype


_END, _IDS = "the hidden state of the last layer", "the token ids"
