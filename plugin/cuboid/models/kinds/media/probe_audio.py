"""Short clips for small models of audio: which arguments a model needs, and how many features clips have."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuboid.models.architectures.media import AUDIO, FRAMES
from cuboid.models.architectures.roles import tower_names
from cuboid.models.kinds.media.compute import needed_of, parameters_of
from cuboid.models.kinds.probe_rows import CannotProbe

#: Frames of the longest small clips, in the order in which they are tried.
EDGES = (32, 64, 16, 8)
_TOWERS = ("audio_config", "encoder_config")
#: Keys of configs for the number of positions that a tower has for a clip, which is filled up to twice as many frames;
#: and for half the frames of a part of a clip, of which code may know how many features it has.
_POSITIONS, _WINDOW = "max_source_positions", "n_window"
#: Where clips may have any length, their frames; only small configs have it.
_FRAMES, _USUAL_FRAMES = "frames_of_small_clips", 64


def _tower_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of what computes features of audio."""
    tower = next((part for name in _TOWERS if (part := getattr(config, name, None)) is not None), None)
    if not isinstance(tower, PretrainedConfig):
        raise CannotProbe(f"its config has no {' or '.join(_TOWERS)}, which would tell the form of audio")
    return tower


def with_edge(small: PretrainedConfig, frames: int) -> PretrainedConfig:
    """A small config whose clips have up to so many frames."""
    config = copy.deepcopy(small)
    tower = _tower_config(config)
    if isinstance(getattr(tower, _POSITIONS, None), int):
        setattr(tower, _POSITIONS, frames // 2)
    elif not isinstance(getattr(tower, _WINDOW, None), int):
        setattr(tower, _FRAMES, frames)
    return config


def arguments(model: Any) -> tuple[str, ...]:
    """Those tensors of audio that a model takes.

    Raises:
        CannotProbe: it needs another one.
    """
    needed_of(AUDIO, parameters_of(AUDIO, type(model), type(model.base_model)))
    takes = inspect.signature(type(model).forward).parameters
    return tuple(name for name in AUDIO.tensors if name in takes)


def feature_counts(model: Any, generator: torch.Generator) -> list[int]:
    """How many features clips have, of two of different lengths, which micro-batches have in turn.

    Raises:
        CannotProbe: none can be computed.
    """
    return [_features(model, number, generator) for number in range(2)]


def _features(model: Any, number: int, generator: torch.Generator) -> int:
    """How many features a micro-batch's clip has."""
    clips = _inputs(model, [number], generator, arguments(model))
    masks = [clips[name] for name in clips if name != FRAMES]
    features = _computed(model, clips)
    if features.dim() > 2 and masks:
        # The model's own code drops those that the mask leaves out.
        return int(masks[0].sum())
    return features.numel() // features.shape[-1]


def _computed(model: Any, clips: dict[str, torch.Tensor]) -> torch.Tensor:
    compute = getattr(model.base_model, AUDIO.compute)
    takes = parameters_of(AUDIO, type(model), type(model.base_model))
    try:
        with torch.no_grad():
            output = compute(**{name: x for name, x in clips.items() if name in takes}, return_dict=True)
        features: torch.Tensor = output.pooler_output
    except Exception as error:
        raise CannotProbe(f"of a clip, a small one has no features: {type(error).__name__}: {error}") from error
    return features


def blank(model: Any) -> dict[str, torch.Tensor]:
    """Arguments of a silent clip, for a model whose probe has made some."""
    takes = parameters_of(AUDIO, type(model), type(model.base_model))
    clips = _inputs(model, [0], torch.Generator(), [name for name in arguments(model) if name in takes])
    return {name: torch.ones_like(x, device=model.device) for name, x in clips.items()}


def random_inputs(model: Any, counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Arguments of random clips, so many of each row; two lengths alternate where a model takes masks.

    Raises:
        CannotProbe: the model's config doesn't tell which form they have.
    """
    return _inputs(model, range(sum(counts)), generator, arguments(model))


def _inputs(
    model: Any, numbers: Sequence[int], generator: torch.Generator, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """These arguments of clips with these numbers in a micro-batch."""
    frames = _frames(_tower_config(model.config))
    bins, is_first = _bins(model)
    shape = (len(numbers), bins, frames) if is_first else (len(numbers), frames, bins)
    clips = {FRAMES: torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)}
    takes = parameters_of(AUDIO, type(model), type(model.base_model))
    for name in names:
        if name == FRAMES:
            continue
        # A mask that the method doesn't take is of the features that it returns.
        length = frames if name in takes else _computed(model, clips).shape[1]
        lengths = torch.tensor([length if number % 2 == 0 else length // 2 for number in numbers])
        mask = torch.arange(length) < lengths.unsqueeze(1)
        clips[name] = mask if name not in takes else mask.long()
    return clips


def _frames(tower: PretrainedConfig) -> int:
    if isinstance(getattr(tower, _POSITIONS, None), int):
        return 2 * int(getattr(tower, _POSITIONS))
    if isinstance(getattr(tower, _WINDOW, None), int):
        return 2 * int(getattr(tower, _WINDOW))
    return int(getattr(tower, _FRAMES, _USUAL_FRAMES))


def _bins(model: Any) -> tuple[int, bool]:
    """How many numbers a frame of audio has, and whether they come before the frames, as in convolutions."""
    towers = [model.get_submodule(name) for name in tower_names(model)]
    tower = next((part for part in towers if getattr(part, "main_input_name", None) == FRAMES), towers[0])
    convolutions = [part for part in tower.children() if isinstance(part, nn.Conv1d | nn.Conv2d)]
    others = (part for part in tower.modules() if isinstance(part, nn.Linear | nn.LayerNorm))
    first: nn.Module | None = next(iter(convolutions), None) or next(others, None)
    if isinstance(first, nn.Conv1d):
        return first.in_channels, True
    if isinstance(first, nn.Conv2d):
        return int(getattr(_tower_config(model.config), "num_mel_bins", 0)), True
    if isinstance(first, nn.LayerNorm):
        return int(first.normalized_shape[0]), False
    if isinstance(first, nn.Linear):
        return first.in_features, False
    raise CannotProbe("its tower begins with no layer that tells the form of audio")
