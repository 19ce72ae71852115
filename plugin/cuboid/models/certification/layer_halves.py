"""Finds where stages may begin inside a layer: between two branches of the usual ``h = h + branch(h)``, one by one.

A stage that has one half of a layer runs the layer's own forward, in which the other half's branches give zeros. That
is right only if the layer adds what its branches give to what it was given, and does nothing else to that. So a small
model is run, and each kind of layer is compared with its halves, one after the other: outputs and every gradient.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.certification.certificates import Question
from cuboid.models.certification.layer_kinds import layer_kinds, on_meta
from cuboid.models.certification.sides import first_that_runs, quiet_cpu, small_for_probe
from cuboid.models.certification.small_config import fields_read, layer_count, small_config
from cuboid.models.certification.trials import ATTEMPTS, Attempt
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.stages.outline import Branch, Halves, Outline
from cuboid.models.stages.placeholders import PlaceholderBranch
from cuboid.models.stages.stage_cut import LayerHalves, draw_outline

_ROWS, _LENGTH = 2, 12
_known: dict[tuple[Question, str], LayerHalves] = {}
#: A probe sets torch's default dtype, which ranks that are threads share.
_lock = threading.Lock()


def layer_halves(cls: type[PreTrainedModel], config: PretrainedConfig, count: int) -> LayerHalves:
    """For each layer of a model its halves, or why no stage can begin inside it. A probe, once in a process.

    Args:
        cls: the architecture's class.
        config: of the model, with its real sizes.
        count: number of the model's layers.
    """
    try:
        question = Question.of(cls, config)
    except CannotProbe as error:
        return (f"no small model of {cls.__name__} can be tried: {error}",) * count
    # The question knows the code and the small model's config, but not how many layers of each kind the model has.
    key = question, json.dumps(fields_read(config), sort_keys=True, default=str)
    with _lock:
        if key not in _known:
            _known[key] = _probe(cls, config, count)
        return _known[key]


def _probe(cls: type[PreTrainedModel], config: PretrainedConfig, count: int) -> LayerHalves:
    try:
        with quiet_cpu():
            small = small_for_probe(cls, config)
            outline = draw_outline(cls, small)
            deep = layer_kinds(on_meta(cls, small_config(config, range(layer_count(config)))))[outline.layers]
            if len(deep) != count:
                raise CannotProbe(f"made from its config it has {len(deep)} layers rather than {count}")
            by_kind = first_that_runs(
                cls,
                small,
                config._attn_implementation,
                ATTEMPTS,
                lambda model, attempt: _by_kind(model, outline, attempt),
            )
    except CannotProbe as error:
        return (f"no small model of {cls.__name__} runs, on which it would be tried ({error})",) * count
    except Exception as error:
        reason = f"a small {cls.__name__} can't be tried: {type(error).__name__}: {error}"
        return (reason,) * count
    return tuple(by_kind.get(kind, "no small model has a layer of its kind") for kind in deep)


def _by_kind(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> dict[Any, Halves | str]:
    kinds = layer_kinds(model)[outline.layers]
    calls = _record(model, outline, attempt)
    by_kind: dict[Any, Halves | str] = {}
    for kind, call in zip(kinds, calls, strict=True):
        if kind not in by_kind:
            by_kind[kind] = call.halves(attempt)
    return by_kind


@dataclass
class _LayerCall:
    """A layer's call in a forward of the small model.

    Attributes:
        layer: the layer.
        argument: its argument for the hidden state.
        args, kwargs: what it was given.
        branches: the children with parameters, in the order of their calls; None for one that was called otherwise
            than once for a tensor, or that has no argument like its result.
    """

    layer: nn.Module
    argument: int | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    branches: dict[str, Branch | None]

    def halves(self, attempt: Attempt) -> Halves | str:
        """The halves with the most even numbers of parameters among those that are right, or why there are none."""
        name = type(self.layer).__name__
        direct = (*self.layer.named_parameters(recurse=False), *self.layer.named_buffers(recurse=False))
        if direct:
            return f"{name} has tensors of its own, such as {direct[0][0]}"
        owners = {child for child, part in self.layer.named_children() if any(True for _ in part.parameters())}
        odd = sorted(owners - self.branches.keys()) + [child for child, branch in self.branches.items() if not branch]
        if odd:
            return f"{name} doesn't call {odd[0]} once, with a tensor like what it returns"
        branches = {child: branch for child, branch in self.branches.items() if branch is not None}
        right = [halves for halves in _ways(branches) if self._is_right(halves, attempt)]
        if not right:
            return (
                f"{name} isn't a residual sum of attention followed by one of an MLP, so that its halves one after the "
                "other compute something else"
            )
        return min(right, key=self._unevenness)

    def _unevenness(self, halves: Halves) -> int:
        first, second = (
            sum(parameter.numel() for child in half for parameter in self.layer.get_submodule(child).parameters())
            for half in (halves.first, halves.second)
        )
        return abs(first - second)

    def _is_right(self, halves: Halves, attempt: Attempt) -> bool:
        """Whether the halves one after the other compute what the layer does, and the second each token by itself."""
        hidden = self.kwargs[self.argument] if isinstance(self.argument, str) else self.args[self.argument]
        parameters = list(self.layer.parameters())

        def in_halves(x: torch.Tensor) -> torch.Tensor:
            with _without(self.layer, halves.second):
                between = self._run(x)
            with _without(self.layer, halves.first):
                return self._run(between)

        try:
            with attempt.precision():
                generator = torch.Generator().manual_seed(0)
                # Not the recorded one, which is close to the embeddings: of the size that the residual stream grows to.
                noise = torch.randn(hidden.shape, generator=generator, dtype=torch.float64).to(hidden.dtype)
                x = (hidden + noise).requires_grad_()
                expected = self._run(x)
                cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(expected.dtype)
                wanted = [expected, *_gradients(expected, [x, *parameters], cotangent)]
                made = in_halves(x)
                if made.shape != expected.shape or made.dtype != expected.dtype:
                    return False
                outcome = [made, *_gradients(made, [x, *parameters], cotangent)]
                moved = x.detach().clone()
                moved[:, _LENGTH // 2] += 1
                with torch.no_grad(), _without(self.layer, halves.first):
                    one_by_one = [self._run(input_).detach() for input_ in (x, moved)]
        except Exception:
            return False
        others = [x[:, torch.arange(_LENGTH) != _LENGTH // 2] for x in one_by_one]
        return _are_close(outcome, wanted, attempt.tolerance) and _are_close(others[:1], others[1:], attempt.tolerance)

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.args, dict(self.kwargs)
        if isinstance(self.argument, str):
            kwargs[self.argument] = hidden
        else:
            args = (*args[: self.argument], hidden, *args[self.argument + 1 :])
        output = self.layer(*args, **kwargs)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result


def _ways(branches: Mapping[str, Branch]) -> Iterator[Halves]:
    """All ways to divide branches, in their order, in two."""
    names = list(branches)
    for count in range(1, len(names)):
        halves = ({name: branches[name] for name in part} for part in (names[:count], names[count:]))
        yield Halves(*halves)


def _gradients(output: torch.Tensor, inputs: Sequence[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
    trained = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(output, trained, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(trained, gradients, strict=True)]


def _are_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> bool:
    return all(
        bool(b.isfinite().all()) and float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-6)
        for a, b in zip(actual, expected, strict=True)
    )


@contextmanager
def _without(layer: nn.Module, branches: Mapping[str, Branch]) -> Iterator[None]:
    """In the ``with`` block, a layer has placeholders for some of its branches, as on a stage without them."""
    present = {name: layer._modules[name] for name in branches}
    for name, branch in branches.items():
        module = present[name]
        assert module is not None
        layer._modules[name] = PlaceholderBranch(module, branch)
    try:
        yield
    finally:
        layer._modules.update(present)


def _record(model: PreTrainedModel, outline: Outline, attempt: Attempt) -> list[_LayerCall]:
    """Run a small model, and record the calls of its layers and of their branches."""
    calls: list[_LayerCall] = []
    hooks: list[Any] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        argument = 0 if outline.hidden_argument is None else outline.hidden_argument
        calls.append(_LayerCall(layer, argument, copy.copy(args), dict(kwargs), {}))

    def leave(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            branches = calls[-1].branches
            branches[name] = None if name in branches else _branch(args, kwargs, output)

        return note

    layers = [model.get_submodule(outline.layer(index)) for index in range(outline.count)]
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        for name, child in layer.named_children():
            if any(True for _ in child.parameters()):
                hooks.append(child.register_forward_hook(leave(name), with_kwargs=True))
    ids = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH) * 7 % (model.config.get_text_config().vocab_size - 4) + 4
    base = model.get_submodule(outline.base)
    try:
        with attempt.precision(), torch.no_grad():
            base(input_ids=ids, **outline.fixed_options)
    except Exception as error:
        raise CannotProbe(f"{type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if [call.layer for call in calls] != layers:
        raise CannotProbe("its layers don't run one after the other")
    return calls


def _branch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Branch | None:
    result = output[0] if isinstance(output, tuple) else output
    if not isinstance(result, torch.Tensor):
        return None
    inputs: dict[int | str, Any] = dict(enumerate(args))
    inputs.update(kwargs)
    tensors = [(key, x) for key, x in inputs.items() if _is_hidden(x)]
    # Of a projection, whose result is wider, the input: what matters is that the last branch of a half gives zeros.
    alike = [key for key, x in tensors if x.shape == result.shape] or [
        key for key, x in tensors if x.dim() == result.dim()
    ]
    return Branch(alike[0], len(output) if isinstance(output, tuple) else None) if alike else None


def _is_hidden(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1
