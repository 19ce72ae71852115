"""Small images for small vision-language models: which arguments a model needs, and how many features images have."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuboid.models.architectures.media import GRID, IMAGE_SIZES, IMAGES, LARGER_PIXELS, MERGES, PIXEL_MASKS, PIXELS
from cuboid.models.architectures.roles import tower_names
from cuboid.models.kinds.images import image_shape
from cuboid.models.kinds.media.compute import needed_of, parameters_of
from cuboid.models.kinds.probe_rows import CannotProbe

_SIZES, _SHAPES, _IN_STRIPS = IMAGE_SIZES
#: Keys of towers that take images of any size: along how many patches' edges these are merged; and of how many frames
#: of a video a patch is.
_MERGES, _TIMES = ("spatial_merge_size", "merge_size"), ("temporal_patch_size", "patch_temporal")
_FEWEST_FEATURES = 4
#: Keys of configs for how many features an image has, whatever its size.
_FEATURES_OF_IMAGE = ("mm_tokens_per_image", "resampler_n_latents", "num_query_tokens")
_PINPOINTS = "image_grid_pinpoints"
#: How many features an image of so many patches has.
_QUERIES = "projector_patch_to_query_dict"
#: Patches along an edge of small images, in the order in which they are tried.
EDGES = (4, 2, 8, 1)


def with_edge(small: PretrainedConfig, edge: int) -> PretrainedConfig:
    """A small config whose images have so many patches along an edge."""
    config = copy.deepcopy(small)
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return config
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in _FEATURES_OF_IMAGE:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, _FEWEST_FEATURES)
    shape = image_shape(vision)
    patch = getattr(vision, "patch_size", None)
    if _of_any_size(vision):
        # Some of its layers may attend in windows of several merged patches.
        vision.patch_size = 2
        if isinstance(getattr(vision, "window_size", None), int):
            vision.window_size = 2 * _number(vision, _MERGES, 2) * vision.patch_size
    elif shape is not None and patch is not None:
        if getattr(config, _QUERIES, None):
            setattr(config, _QUERIES, {edge * edge: _FEWEST_FEATURES})
        patches = patch if isinstance(patch, list | tuple) else (patch, patch)
        size = [edge * int(one) for one in patches]
        vision.image_size = size if isinstance(vision.image_size, list | tuple) else size[0]
        pinpoints = getattr(config, _PINPOINTS, None)
        if pinpoints:
            # Tiles of an image, of the size of which small configs have made an image's.
            tiles = [[max(1, round(x / max(map(min, pinpoints)) * 2)) for x in pair] for pair in pinpoints]
            setattr(config, _PINPOINTS, [[height * size[0], width * size[1]] for height, width in tiles])
    return config


def _of_any_size(vision: PretrainedConfig) -> bool:
    """Whether a tower takes patches of images of any size, of which it merges some."""
    return any(isinstance(getattr(vision, name, None), int) for name in _MERGES)


def _number(vision: PretrainedConfig, names: Sequence[str], otherwise: int) -> int:
    return next((int(x) for name in names if (x := getattr(vision, name, None)) is not None), otherwise)


def arguments(model: Any) -> tuple[str, ...]:
    """Those tensors of images that a model needs, or that its processor makes.

    Raises:
        CannotProbe: it needs another one.
    """
    classes: Any = type(model), type(model.base_model), tuple(type(part) for part in model.base_model.children())
    return _arguments_of(*classes)


@functools.cache
def _arguments_of(cls: Any, base: Any, parts: tuple[Any, ...]) -> tuple[str, ...]:
    """The same of a model's class, those of its base model, and of this one's parts."""
    takes = inspect.signature(cls.forward).parameters.keys()
    parameters = parameters_of(IMAGES, cls, base)
    needed = needed_of(IMAGES, parameters)
    if GRID in takes:
        return (PIXELS, GRID, *(name for name in (MERGES,) if name in needed))
    # Towers for images of several sizes may take these, whatever the model around them says.
    of_parts = {name for part in parts for name in inspect.signature(part.forward).parameters}
    sizes = [name for name in IMAGE_SIZES if name in needed | of_parts]
    larger = (LARGER_PIXELS,) if LARGER_PIXELS in needed else ()
    return (
        PIXELS,
        *larger,
        *(name for name in (*PIXEL_MASKS, *sizes) if name in takes and name in {*parameters, *sizes}),
    )


def feature_counts(model: Any, generator: torch.Generator) -> list[int]:
    """How many features images have, of two of different sizes, which micro-batches have in turn.

    Raises:
        CannotProbe: none can be computed.
    """
    compute = getattr(model.base_model, IMAGES.compute, None) or getattr(model, IMAGES.compute)
    try:
        images = random_inputs(model, [2], generator)
        with torch.no_grad():
            output = compute(**images, return_dict=True)
        features = output[features_of(output)]
    except CannotProbe:
        raise
    except Exception as error:
        raise CannotProbe(f"of an image, a small one has no features: {type(error).__name__}: {error}") from error
    if not isinstance(features, torch.Tensor) and len(features) == 2:
        return [len(x) for x in features]
    total = sum(x.numel() // x.shape[-1] for x in ((features,) if isinstance(features, torch.Tensor) else features))
    entries = images[GRID].prod(-1).tolist() if GRID in images else [1, 1]
    return [total * entry // sum(entries) for entry in entries]


def blank(model: Any) -> dict[str, torch.Tensor]:
    """Arguments of an image of one colour, for a model whose probe has made some."""
    images = random_inputs(model, [1], torch.Generator())
    # Of zeros it would only fill up a row.
    return {
        name: torch.ones_like(x, device=model.device) if name == PIXELS else x.to(model.device)
        for name, x in images.items()
    }


def random_inputs(model: Any, counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Arguments of random images, so many of each row; two sizes alternate where a model takes several.

    Raises:
        CannotProbe: the model's config doesn't tell which images it takes.
    """
    names, config = arguments(model), getattr(model.config, "vision_config", None)
    if config is None:
        raise CannotProbe("its config has no vision_config, which would tell the size of images")
    channels = next(
        (int(getattr(config, name)) for name in ("num_channels", "in_channels", "in_chans") if hasattr(config, name)), 3
    )
    total = sum(counts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)

    def in_turn(*pairs: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([pairs[number % len(pairs)] for number in range(total)])

    if GRID in names:
        merged = _number(config, _MERGES, 2)
        grid = in_turn((1, 2 * merged, 2 * merged), (1, merged, 2 * merged))
        edge, frames = config.patch_size, _number(config, _TIMES, 1)
        # What convolves each patch by itself gets its edges; others get it flat, or take it either way.
        is_flat = frames > 1 or not _convolves_patches(model)
        of_patch = (channels * frames * edge**2,) if is_flat else (channels, edge, edge)
        merges = {MERGES: torch.full((total,), merged)} if MERGES in names else {}
        return {PIXELS: random(int(grid.prod(-1).sum()), *of_patch), GRID: grid, **merges}
    if _SHAPES in names:
        shapes = in_turn((2, 4), (2, 2))
        real = torch.arange(8) < shapes.prod(-1, keepdim=True)
        pixels = random(total, 8, channels * config.patch_size**2) * real.unsqueeze(-1).to(model.dtype)
        return {PIXELS: pixels, _SHAPES: shapes, PIXEL_MASKS[0]: real.long()}
    if _IN_STRIPS in names:
        # The patches of all images in one strip of an image.
        shapes = in_turn((8, 8), (4, 8))
        return {
            PIXELS: random(1, channels, config.patch_size, config.patch_size * int(shapes.prod(-1).sum())),
            _IN_STRIPS: shapes,
        }
    shape = image_shape(config)
    if shape is None:
        raise CannotProbe("its vision_config has no image_size of a height and a width")
    if _SIZES in names:
        pinpoints = getattr(model.config, _PINPOINTS, None)
        if pinpoints:
            tiles = 1 + max((height // shape[0]) * (width // shape[1]) for height, width in pinpoints)
            return {PIXELS: random(total, tiles, channels, *shape), _SIZES: in_turn(shape, (shape[0], 2 * shape[1]))}
        return {PIXELS: random(total, channels, *shape), _SIZES: in_turn(shape, (shape[0], shape[1] // 2))}
    if PIXEL_MASKS[0] in names:
        rows, most = len(counts), max(counts, default=0)
        is_there = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
        pixels = random(rows, most, channels, *shape) * is_there[..., None, None, None].to(model.dtype)
        return {PIXELS: pixels, PIXEL_MASKS[0]: is_there[..., None, None].expand(rows, most, *shape).contiguous()}
    others = {name: torch.ones((total, *shape), dtype=torch.bool) for name in PIXEL_MASKS if name in names}
    if LARGER_PIXELS in names:
        larger = image_shape(getattr(model.config, "high_res_vision_config", config))
        if larger is None:
            raise CannotProbe("its high_res_vision_config has no image_size of a height and a width")
        others[LARGER_PIXELS] = random(total, channels, *larger)
    return {PIXELS: random(total, channels, *shape), **others}


def _convolves_patches(model: Any) -> bool:
    """Whether a tower begins with a convolution of two dims."""
    towers = [model.get_submodule(name) for name in tower_names(model)]
    tower = next((part for part in towers if getattr(part, "main_input_name", None) == PIXELS), towers[0])
    first = next((part for part in tower.modules() if isinstance(part, nn.Linear | nn.Conv2d | nn.Conv3d)), None)
    return isinstance(first, nn.Conv2d)


def features_of(output: Any) -> str:
    """The entry of a tower's output that is among the embeddings, after a projector behind it if there is one."""
    return "last_hidden_state" if output.pooler_output is None else "pooler_output"
