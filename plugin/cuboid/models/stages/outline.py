"""What a model looks like from a pipeline's point of view: which modules run before, in and after its
list of layers, and what passes from layer to layer.

Nothing is known by architecture. The model is built on the meta device and its forward is followed once; a model in
which more than one tensor flows from layer to layer, or whose layers aren't a plain list, is rejected.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.supported_tasks import Task, runs_own_head, task_of
from cuboid.models.plain_construction import plain_construction
from cuboid.models.sharded.sharded_model import learned_positions
from cuboid.models.stages.module_flow import ForwardLog
from cuboid.models.stages.router_loss import RouterLoss

_TRACED_LENGTH = 8
#: Not the default dtype, so that a hidden state kept in float32 on purpose can be told from one in the weights' dtype.
_TRACED_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Outline:
    """The parts of a model. All names are those of modules inside the whole model.

    Args:
        base: the model without its head.
        layers: the ``nn.ModuleList`` of layers.
        count: number of layers.
        hidden_argument: the keyword by which layers are given the hidden state, None where it comes first of all.
        returned: None where a layer returns the hidden state itself, else the length of the tuple that it leads.
        before: modules with parameters that run before the first layer, embeddings among them.
        after: modules with parameters of the base model that run after the last layer.
        head: modules with parameters outside the base model.
        embedding: the module that turns ids into vectors.
        tied: names of parameters that are another parameter, and which.
        width: H, features of the hidden state between layers.
        final_width: features of what the base model returns; some models project it after the layers.
        dtype: of the hidden state between layers, where it isn't the weights'.
        output: the class of what the base model returns.
        options: arguments that the base model takes by name.
        longest: positions that the model has learned, where it has a table of them.
        task: what it is for.
        router_loss: what ``output_router_logits`` adds to its loss, where its config says so.
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
    task: Task
    router_loss: RouterLoss | None = None

    @property
    def is_causal(self) -> bool:
        """Whether it predicts the token after each position."""
        return self.task == "causal"

    @property
    def runs_own_head(self) -> bool:
        """Whether its loss is what its own forward makes of whole sequences."""
        return runs_own_head(self.task)

    def layer(self, index: int) -> str:
        """Name of a layer."""
        return f"{self.layers}.{index}"

    @property
    def fixed_options(self) -> dict[str, bool]:
        """What the base model is always given by name."""
        fixed = {"use_cache": False} if "use_cache" in self.options else {}
        # The stages take them from the routers.
        return fixed if self.router_loss is None else {**fixed, "output_router_logits": False}


def outline_on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[PreTrainedModel, Outline]:
    """Build a model on the meta device, and find its parts.

    Raises:
        UnsupportedModelError: a pipeline can't cut it, with the reason.
    """
    model = _build_on_meta(cls, config)
    # The model's own: the decoder of an encoder-decoder, as a causal language model, says of itself that it is one.
    _check_config(cls, model.config)
    outline = trace_outline(model)
    # Classifiers of transformers ignore it.
    if getattr(config, "output_router_logits", False) and outline.is_causal:
        router_loss = RouterLoss.on_meta(model, outline.base, outline.layers)
        outline = dataclasses.replace(outline, router_loss=router_loss)
    return model, outline


def _build_on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    own = copy.deepcopy(config)
    with torch.device("meta"):
        own.return_dict, own.use_cache = True, False
        if getattr(own, "output_router_logits", False):
            # The loss around the base model isn't a stage's.
            own.output_router_logits = False
        with plain_construction():
            model: PreTrainedModel = cls._from_config(own, dtype=_TRACED_DTYPE, attn_implementation="eager")
    return model.eval()


def _check_config(cls: type[PreTrainedModel], config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise _unsupported(cls, "it is an encoder-decoder")
    is_causal = task_of(cls) == "causal"
    if (
        is_causal
        and getattr(config, "is_decoder", True) is False
        and getattr(config, "add_cross_attention", None) is not None
    ):
        raise _unsupported(cls, "its config says is_decoder=False, so that its tokens see the ones after them")
    for name in ("layerdrop", "layer_dropout"):
        if getattr(config, name, None):
            raise _unsupported(cls, f"config.{name} drops whole layers at random; set it to 0")


def trace_outline(model: PreTrainedModel) -> Outline:
    """The outline of a model that is on the meta device, which is left as it was.

    Raises:
        UnsupportedModelError: see :func:`outline_on_meta`.
    """
    cls = type(model)
    name = _find_layers(model)
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    _check_layers(cls, layers)
    units = tuple(_units(model, _ancestors(name)))
    ids = torch.zeros((1, _TRACED_LENGTH), dtype=torch.int64, device="meta")
    log = ForwardLog(model, layers, units, ids, task=task_of(cls))
    try:
        with log.recording(), torch.no_grad(), torch.device("meta"):
            output = model(input_ids=ids)
    except Exception as error:
        raise _unsupported(cls, f"its forward can't be followed: {type(error).__name__}: {error}") from error
    _check_log(cls, log)
    _check_causality(cls, layers, log)
    logits = getattr(output, "logits", None)
    is_language_model = not runs_own_head(task_of(cls))
    if is_language_model and (not isinstance(logits, torch.Tensor) or logits.dim() != 3):
        raise _unsupported(cls, "it returns no logits [batch, sequence, vocabulary]")
    return _outline_of(model, name, log)


def _unsupported(cls: type, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"a pipeline can't cut {cls.__name__}: {reason}")


def _find_layers(model: PreTrainedModel) -> str:
    """The list with ``num_hidden_layers`` modules, else of any number; of several, the one with the most parameters."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # Of an encoder-decoder's config, the number may be the encoder's. A list inside a layer is never the largest.
    counted = {name: module for name, module in lists.items() if len(module) == count} or lists
    if not counted:
        raise _unsupported(type(model), "it has no list of layers")
    return max(counted, key=lambda name: sum(p.numel() for p in counted[name].parameters()))


def _check_layers(cls: type, layers: nn.ModuleList) -> None:
    seen: dict[nn.Parameter, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if seen.setdefault(parameter, index) != index:
                raise _unsupported(cls, f"layers {seen[parameter]} and {index} share a parameter")


def _check_causality(cls: type, layers: nn.ModuleList, log: ForwardLog) -> None:
    if task_of(cls) != "causal":
        return
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            # Attention to an encoder's output doesn't run in a decoder that is given none.
            if getattr(module, "is_causal", True) is False and module in log.ran:
                raise _unsupported(cls, f"{name} of layer {index} isn't causal")


def _ancestors(name: str) -> tuple[str, ...]:
    """Names of the modules around a module, from the outside in, itself last. The model's own name is ""."""
    parts = name.split(".")
    return ("", *(".".join(parts[: end + 1]) for end in range(len(parts))))


def _units(model: PreTrainedModel, path: tuple[str, ...]) -> Iterator[str]:
    """The largest modules with parameters that the layers aren't inside: what a stage has or doesn't have."""
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


def _outline_of(model: PreTrainedModel, layers: str, log: ForwardLog) -> Outline:
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
        # What never ran (a part for another kind of input, say) has to be somewhere for checkpoints' sake.
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
        task=task_of(cls),
    )
    _check_ties(cls, outline)
    return outline


def _base_of(cls: type, layers: str, log: ForwardLog) -> tuple[str, Any]:
    """The module that the model's own forward calls to run the layers, and what it returned."""
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
