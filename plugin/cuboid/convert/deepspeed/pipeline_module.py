"""Map the tensors of DeepSpeed's ``PipelineModule``, which numbers its layers, to the model's names.

A decoder layer is recognized by the names and shapes of its tensors. Tensors before the first or after the last one
belong to the modules that run there (embeddings, final norm, head); they are matched by shape and name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.convert.deepspeed.model_states import Files
from cuboid.convert.formats.parameter_names import state_specs
from cuboid.convert.formats.pickles import PickledTensor, load_pickle, pickled_tensor
from cuboid.errors import CheckpointError
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import draw_outline

_NUMBERED = re.compile(r"(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")


def is_pipeline(names: Iterable[str]) -> bool:
    """Whether these are the tensor names of a ``PipelineModule``."""
    known = list(names)
    return bool(known) and all(_NUMBERED.fullmatch(name) or _TIED.fullmatch(name) for name in known)


def read_layers(files: Files, *, trusted: bool) -> dict[str, PickledTensor]:
    """The tensors of all ``layer_XX-model_states.pt``, with the layer's number as prefix.

    Raises:
        CheckpointError: pickles aren't trusted, or a file isn't what its name says.
    """
    tensors = {}
    for number, path in files.layers.items():
        for name, value in load_pickle(path, trusted=trusted).items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{path}: holds a {type(value).__name__} as {name}, not a tensor")
            tensors[f"{number}.{name}"] = pickled_tensor(path, name, value)
    return tensors


@dataclass(frozen=True)
class _PipelineLayer:
    """A layer of a ``PipelineModule``: its number (None for a tied one) and its tensors by local name."""

    number: int | None
    tensors: dict[str, str]


def model_names(model: PreTrainedModel, specs: Mapping[str, TensorSpec], folder: Path) -> dict[str, str]:
    """Map each tensor name of a full model to the pipeline's name; ``folder`` is for messages.

    Raises:
        CheckpointError: the layers aren't the model's, or a tensor's name is ambiguous.
    """
    outline = draw_outline(type(model), model.config)
    model_specs, parts = state_specs(model), _parts(specs)
    decoders = _decoders(parts, specs, model_specs, outline)
    if len(decoders) != outline.count:
        raise CheckpointError(
            f"{folder}: {len(decoders)} layers of its pipeline are decoder layers of {type(model).__name__}, but the "
            f"model has {outline.count}; is --model the one that was trained?"
        )
    names: dict[str, str] = {}
    count = 0
    for part in parts:
        if part.number in decoders:
            prefix, module = decoders[part.number], outline.layer(count)
            names.update({f"{module}.{local.removeprefix(prefix)}": full for local, full in part.tensors.items()})
            count += 1
            continue
        # A tied layer's tensors get the name that the model ties the other names to.
        used_names = {*names, *(model.all_tied_weights_keys if part.number is None else ())}
        prefixes = tuple(f"{unit}." for unit in _units_around(outline, part, count))
        free = {
            name: spec for name, spec in model_specs.items() if name not in used_names and name.startswith(prefixes)
        }
        for local, full in part.tensors.items():
            name = _find(local, specs[full], free, f"{folder}: {full}")
            names[name] = full
            del free[name]
    return names


def _decoders(
    parts: Sequence[_PipelineLayer],
    specs: Mapping[str, TensorSpec],
    model_specs: Mapping[str, TensorSpec],
    outline: Outline,
) -> dict[int | None, str]:
    """The parts that are decoder layers, by number, with the prefix of their tensors' names."""
    decoders: dict[int | None, str] = {}
    for part in parts:
        # Surplus ones are compared with the last layer, so that they are counted for the error message.
        module = f"{outline.layer(min(len(decoders), outline.count - 1))}."
        layer = {name.removeprefix(module): spec for name, spec in model_specs.items() if name.startswith(module)}
        prefix = None if part.number is None else _wrapper(part, specs, layer)
        if prefix is not None:
            decoders[part.number] = prefix
    return decoders


def _parts(specs: Mapping[str, TensorSpec]) -> list[_PipelineLayer]:
    """Layers in the pipeline's order; the tied ones, which have no number, last."""
    by_number: dict[int | None, dict[str, str]] = {}
    for name in specs:
        numbered, tied = _NUMBERED.fullmatch(name), _TIED.fullmatch(name)
        if numbered:
            by_number.setdefault(int(numbered[1]), {})[numbered[2]] = name
        else:
            assert tied is not None, "all names are a pipeline's"
            by_number.setdefault(None, {})[tied[1]] = name
    order = sorted(by_number, key=lambda number: (number is None, number or 0))
    return [_PipelineLayer(number, by_number[number]) for number in order]


def _wrapper(part: _PipelineLayer, specs: Mapping[str, TensorSpec], layer: Mapping[str, TensorSpec]) -> str | None:
    """The prefix under which a part has exactly the tensors of a decoder layer; None if it isn't one."""
    first = next(iter(layer))
    for local in part.tensors:
        prefix = local.removesuffix(first)
        if local.endswith(first) and (not prefix or prefix.endswith(".")):
            shapes = {name: specs[full].shape for name, full in part.tensors.items()}
            if shapes == {prefix + name: spec.shape for name, spec in layer.items()}:
                return prefix
    return None


def _units_around(outline: Outline, part: _PipelineLayer, count: int) -> Sequence[str]:
    """The modules outside the decoder layers that a part can be, given how many decoder layers precede it."""
    if part.number is None:
        return (*outline.before, *outline.after, *outline.head)
    if count == 0:
        return outline.before
    return (*outline.after, *outline.head) if count == outline.count else ()


def _find(local: str, spec: TensorSpec, candidates: Mapping[str, TensorSpec], who: str) -> str:
    """Of the candidates with the tensor's shape, the one whose dotted name shares the longest suffix with its own."""
    ends = {
        name: _common_end(name, local)
        for name, candidate in candidates.items()
        if candidate.shape == spec.shape and _common_end(name, local)
    }
    best = [name for name, length in ends.items() if length == max(ends.values())]
    if len(best) != 1:
        outcome = f"could be each of {', '.join(best)}" if best else "is nothing that the model has there"
        raise CheckpointError(f"{who}, of shape {list(spec.shape)}, {outcome}; is --model the one that was trained?")
    return best[0]


def _common_end(one: str, other: str) -> int:
    """How many of the last components of two dotted names are the same."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)
