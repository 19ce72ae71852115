"""The outline of a model for a pipeline: which modules run before, in and after its list of layers, and what passes
from layer to layer.

There is no table of architectures. The model is built on the meta device and one forward is traced. A model is rejected
if more than one tensor flows from layer to layer, or if its layers aren't a plain list.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from cuboid.errors import UnsupportedModelError
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.registry import kind_of
from cuboid.models.plain_construction import plain_construction
from cuboid.models.routers.router_loss import RouterLoss
from cuboid.models.sharded.sharded_model import learned_positions
from cuboid.models.stages.layer_list import layer_list
from cuboid.models.stages.module_flow import ForwardLog
from cuboid.models.stages.random_layers import check_all_layers_run

_TRACED_LENGTH = 8
#: Not the default dtype: a hidden state that is float32 in the trace is kept in float32 on purpose.
_TRACED_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Branch:
    """A module with parameters that a layer's own forward calls once.

    Args:
        argument: which of its arguments is shaped as what it returns: a position, or a keyword.
        returned: None if it returns a tensor; else the length of the tuple that this comes first in.
    """

    argument: int | str
    returned: int | None


@dataclass(frozen=True)
class Halves:
    """A layer that two stages may share: its branches, by name, up to its inner residual sum (attention), and after it
    (the MLP).
    """

    first: Mapping[str, Branch]
    second: Mapping[str, Branch]


@dataclass(frozen=True)
class Outline:
    """The parts of a model, by the names of modules in the whole model.

    Args:
        base: the model without its head.
        layers: the ``nn.ModuleList`` of layers.
        count: number of layers.
        hidden_argument: the keyword argument of layers for the hidden state; None if it is the first positional one.
        returned: None if a layer returns the hidden state itself; else the length of the tuple that it comes first in.
        before: modules with parameters that run before the first layer, including embeddings.
        after: modules with parameters in the base model that run after the last layer.
        head: modules with parameters outside the base model.
        embedding: the module that turns ids into vectors.
        tied: tied parameters, each by name with the name of the parameter that it is tied to.
        width: H, features of the hidden state between layers.
        final_width: features of the base model's output; some models project it after the layers.
        dtype: dtype of the hidden state between layers; None if it is that of the weights.
        output: the class of the base model's output.
        options: names of the arguments of the base model's forward.
        longest: number of learned positions; None if the model has no table of them.
        kind: of the model.
        router_loss: the loss that ``output_router_logits`` adds; None if the config doesn't set it.
        halves: of the layers inside which a stage ends, by their index.
    """

    base: str
    layers: str
    count: int
    hidden_argument: str | None
    returned: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    head: tuple[str, ...]
    embedding: str
    tied: Mapping[str, str]
    width: int
    final_width: int
    dtype: torch.dtype | None
    output: type
    options: frozenset[str]
    longest: int | None
    kind: ModelKind
    router_loss: RouterLoss | None = None
    halves: Mapping[int, Halves] = field(default_factory=dict)

    @property
    def is_causal(self) -> bool:
        """Whether the model predicts the token after each position."""
        return self.kind.is_causal

    @property
    def runs_own_head(self) -> bool:
        """Whether the last stage calls the model's own forward for the loss, on whole sequences."""
        return self.kind.runs_own_head

    def layer(self, index: int) -> str:
        """Name of a layer."""
        return f"{self.layers}.{index}"

    @property
    def fixed_options(self) -> dict[str, bool]:
        """Keyword arguments that the base model is always called with."""
        fixed = {"use_cache": False} if "use_cache" in self.options else {}
        # The stages collect router logits by hooks on the routers.
        return fixed if self.router_loss is None else {**fixed, "output_router_logits": False}


def outline_on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[PreTrainedModel, Outline]:
    """Build a model on the meta device, and find its parts.

    Raises:
        UnsupportedModelError: a pipeline can't cut it; the message names the reason.
    """
    model = _build_on_meta(cls, config)
    # Check the model's own config: BartForCausalLM, the decoder alone, clears ``is_encoder_decoder`` in its copy.
    _check_config(cls, model.config)
    outline = trace_outline(model)
    ids = torch.zeros((1, _TRACED_LENGTH), dtype=torch.int64, device="meta")
    check_all_layers_run(model, outline.layers, ids)
    # transformers' classifiers ignore this option.
    if getattr(config, "output_router_logits", False) and outline.is_causal:
        router_loss = RouterLoss.on_meta(model, outline.base, outline.layers)
        outline = dataclasses.replace(outline, router_loss=router_loss)
    return model, outline


def _build_on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    traced = copy.deepcopy(config)
    with torch.device("meta"):
        traced.return_dict, traced.use_cache = True, False
        if getattr(traced, "output_router_logits", False):
            # Stages compute the router loss themselves, so the trace must not contain the model's own computation.
            traced.output_router_logits = False
        with plain_construction():
            model: PreTrainedModel = cls._from_config(traced, dtype=_TRACED_DTYPE, attn_implementation="eager")
    return model.eval()


def _check_config(cls: type[PreTrainedModel], config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise _unsupported(cls, "it is an encoder-decoder")
    if (
        kind_of(cls, config).is_causal
        and getattr(config, "is_decoder", True) is False
        and getattr(config, "add_cross_attention", None) is not None
    ):
        raise _unsupported(cls, "its config says is_decoder=False, so that its tokens see the ones after them")
    for name in ("layerdrop", "layer_dropout", "decoder_layerdrop"):
        if getattr(config, name, None):
            raise _unsupported(cls, f"config.{name} drops whole layers at random; set it to 0")


def trace_outline(model: PreTrainedModel) -> Outline:
    """Trace one forward of a model on the meta device, and return its outline. The model is left unchanged.

    Raises:
        UnsupportedModelError: see :func:`outline_on_meta`.
    """
    cls = type(model)
    name = layer_list(model)
    if name is None:
        raise _unsupported(cls, "it has no list of layers")
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    _check_layers(cls, layers)
    units = tuple(_units(model, _ancestors(name)))
    ids = torch.zeros((1, _TRACED_LENGTH), dtype=torch.int64, device="meta")
    kind = kind_of(cls, model.config)
    log = ForwardLog(model, layers, units, ids, kind)
    try:
        with log.recording(), torch.no_grad(), torch.device("meta"):
            output = model(input_ids=ids)
    except Exception as error:
        raise _unsupported(cls, f"its forward can't be followed: {type(error).__name__}: {error}") from error
    _check_log(cls, log)
    if kind.is_causal:
        _check_causality(cls, layers, log)
    logits = getattr(output, "logits", None)
    if not kind.runs_own_head and (not isinstance(logits, torch.Tensor) or logits.dim() != 3):
        raise _unsupported(cls, "it returns no logits [batch, sequence, vocabulary]")
    return _outline_of(model, kind, name, log)


def _unsupported(cls: type, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"a pipeline can't cut {cls.__name__}: {reason}")


def _check_layers(cls: type, layers: nn.ModuleList) -> None:
    seen: dict[nn.Parameter, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if seen.setdefault(parameter, index) != index:
                raise _unsupported(cls, f"layers {seen[parameter]} and {index} share a parameter")


def _check_causality(cls: type, layers: nn.ModuleList, log: ForwardLog) -> None:
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            # Cross-attention, which isn't causal, doesn't run in a decoder without an encoder's output.
            if getattr(module, "is_causal", True) is False and module in log.ran:
                raise _unsupported(cls, f"{name} of layer {index} isn't causal")


def _ancestors(name: str) -> tuple[str, ...]:
    """Names of the modules that contain a module, outermost first, and last its own. The model's own name is ""."""
    parts = name.split(".")
    return ("", *(".".join(parts[: end + 1]) for end in range(len(parts))))


def _units(model: PreTrainedModel, path: tuple[str, ...]) -> Iterator[str]:
    """Names of the largest modules with parameters that don't contain the layers: a stage has all of each, or none."""
    for name in path[:-1]:
        owner = model.get_submodule(name)
        direct = [parameter for parameter, _ in owner.named_parameters(recurse=False)]
        if direct:
            raise _unsupported(type(model), f"the parameter {direct[0]} belongs to {type(owner).__name__} itself")
        for child, module in owner.named_children():
            full = f"{name}.{child}" if name else child
            if full not in path:
                yield from _leaves(full, module)


def _leaves(name: str, module: nn.Module) -> Iterator[str]:
    if not any(True for _ in module.parameters()):
        return
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child, inner in module.named_children():
            yield from _leaves(f"{name}.{child}", inner)
    else:
        yield name


def _check_log(cls: type, log: ForwardLog) -> None:
    if log.problem is not None:
        raise _unsupported(cls, log.problem)
    if log.finished != log.count:
        raise _unsupported(cls, f"its forward ran {log.finished} of its {log.count} layers")
    if log.flow.leaks:
        mark, place = log.flow.leaks[0]
        raise _unsupported(cls, f"{place} needs more than the hidden state it is given: it depends on {mark}")


def _outline_of(model: PreTrainedModel, kind: ModelKind, layers: str, log: ForwardLog) -> Outline:
    cls = type(model)
    base, output = _base_of(cls, layers, log)
    inside = {name: times for name, times in log.times.items() if name.startswith(f"{base}.")}
    head = {name: times for name, times in log.times.items() if name not in inside}
    for name, times in log.times.items():
        if len(times) > 1 or "between" in times or (name in head and "before" in times):
            raise _unsupported(cls, f"{name} has parameters and runs {' and '.join(sorted(times))} the layers")
    hidden = log.hidden
    assert hidden is not None
    outline = Outline(
        base=base,
        layers=layers,
        count=log.count,
        hidden_argument=log.argument if isinstance(log.argument, str) else None,
        returned=log.returned,
        # Modules that never ran (for another kind of input, say) must be on some stage, or checkpoints would lack them.
        before=tuple(name for name, times in inside.items() if times <= {"before"}),
        after=tuple(name for name, times in inside.items() if times == {"after"}),
        head=tuple(head),
        embedding=_embedding_of(model),
        tied=dict(model.all_tied_weights_keys),
        width=hidden.shape[-1],
        final_width=output.last_hidden_state.shape[-1],
        dtype=None if hidden.dtype == _TRACED_DTYPE else hidden.dtype,
        output=type(output),
        options=frozenset(inspect.signature(type(model.get_submodule(base)).forward).parameters),
        longest=learned_positions(model),
        kind=kind,
    )
    _check_ties(cls, outline)
    return outline


def _base_of(cls: type, layers: str, log: ForwardLog) -> tuple[str, Any]:
    """Name of the module that the model's own forward calls to run the layers, and the output of that call."""
    bases = [(name, output) for name, output in log.outermost if layers.startswith(f"{name}.")]
    if len(bases) != 1:
        raise _unsupported(cls, f"its forward doesn't call one base model around {layers}")
    name, output = bases[0]
    if not isinstance(output, ModelOutput) or not hasattr(output, "last_hidden_state"):
        raise _unsupported(cls, f"{name} returns a {type(output).__name__} without last_hidden_state")
    return name, output


def _embedding_of(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)


def _check_ties(cls: type, outline: Outline) -> None:
    for pair in outline.tied.items():
        for name in pair:
            if name.startswith(f"{outline.layers}."):
                raise _unsupported(cls, f"{pair[0]} is tied to {pair[1]}, and a layer can be on one stage only")
