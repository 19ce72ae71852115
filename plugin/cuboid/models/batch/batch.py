"""A micro-batch as users know it, to this rank's part of it, padded to what the mesh needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import own_slice, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import Inputs
from cuboid.models.batch.length_cases import rope_types, thresholds

IGNORE_INDEX = -100
#: What a micro-batch may hold, each ``[B, S]``; positions also ``[1, S]``.
TENSORS = ("input_ids", "labels", "attention_mask", "position_ids", "shift_labels")
#: Of models that were seen to take it, as those of sentence pairs.
TOKEN_TYPES = "token_type_ids"
#: Of an encoder-decoder, beside ``input_ids`` and ``attention_mask`` ``[B, S]``, each ``[B, T]``.
TARGET_TENSORS = ("decoder_input_ids", "decoder_attention_mask", "labels")
#: Of a model of images: ``[B, C, H, W]``, and which patches of it are masked, ``[B, P]``.
IMAGE_TENSORS = ("pixel_values", "bool_masked_pos")
LABELS = ("labels", "shift_labels")
_INDICES = (torch.int64, torch.int32)
#: Arguments that mean "nothing special" with these values and have no rule with others.
_REJECTED: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False),
    "past_key_values": (None,),
    "inputs_embeds": (None,),
    "token_type_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "encoder_hidden_states": (None,),
    "encoder_attention_mask": (None,),
    "cache_position": (None,),
    "encoder_outputs": (None,),
    "decoder_inputs_embeds": (None,),
    "decoder_position_ids": (None,),
}


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a micro-batch.

    Args:
        tensors: ``[B'/b, S']`` ids, mask, positions and labels; B' and S' are B and S filled up to what the mesh needs.
        rows: B.
        length: S.
        options: the forward's other arguments, unchanged.
        source: where this is what a decoder is given, the encoder's.
    """

    tensors: dict[str, torch.Tensor]
    rows: int
    length: int
    options: dict[str, Any]
    source: LocalBatch | None = None

    @property
    def padded(self) -> int:
        """S'; not of images."""
        return self.tensors["input_ids"].shape[1]


def granule(mesh: Mesh) -> int:
    """What the length of a sequence, or of a segment of one, must be a multiple of."""
    return math.lcm(mesh.size("sequence"), mesh.size("hidden"))


def take_local_batch(
    arguments: dict[str, Any],
    config: PretrainedConfig,
    mesh: Mesh,
    *,
    at_least: int = 0,
    inputs: Inputs = "embeddings",
    token_types: bool = False,
) -> LocalBatch:
    """Check a forward's arguments, cut its batch dim over `batch`, and pad its sequence dim to ``at_least`` or more.

    A batch that `batch` doesn't divide, as the last one of a data loader, is filled up with copies of its last row
    without labels: they add nothing to the loss nor to any gradient.

    Args:
        arguments: by name.
        config: of the model.
        mesh: of the model.
        at_least: positions.
        inputs: what the model is given; one that counts positions by itself gets none that nobody gave.
        token_types: whether there may be ``token_type_ids``.

    Raises:
        UnsupportedModelError: an argument that a sharded model has no rule for.
        CuboidError: shapes that contradict each other.
    """
    whole = given_tensors(arguments, token_types=token_types)
    _reject({name: value for name, value in arguments.items() if name not in whole or name == "input_ids"})
    options = {name: value for name, value in arguments.items() if name not in (*TENSORS, *_REJECTED)}
    check_tensors(whole)
    rows, length = whole["input_ids"].shape
    if "position_ids" not in whole and inputs != "only ids":
        whole["position_ids"] = torch.arange(length, device=whole["input_ids"].device).unsqueeze(0)
    more = padded_length(rows, mesh.size("batch")) - rows
    target = padded_length(max(length, at_least), granule(mesh))
    local = {}
    for name, tensor in whole.items():
        given_once = name == "position_ids" and tensor.shape[0] == 1
        own = tensor if given_once else own_slice(_with_rows(name, tensor, more), 0, mesh.along("batch"))
        local[name] = _pad(name, own, target - length, config, inputs)
    return LocalBatch(local, rows, length, options)


def take_local_pair(arguments: dict[str, Any], config: PretrainedConfig, mesh: Mesh) -> LocalBatch:
    """:func:`take_local_batch` of an encoder's sequences and of a decoder's, which may differ in length.

    Args:
        arguments: of an encoder-decoder, by name, with ``decoder_input_ids``.
        config, mesh: of the model.

    Returns:
        What the decoder is given, and its source, which has the options. Neither has positions, which such a model
        counts by itself.
    """
    for name in ("position_ids", "shift_labels"):
        if arguments.get(name) is not None:
            raise UnsupportedModelError(f"{name} has no rule for an encoder-decoder, which counts positions by itself")
    inputs = {name: x for name, x in arguments.items() if name not in TARGET_TENSORS}
    names = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask", "labels": "labels"}
    target = {own: arguments[name] for own, name in names.items() if arguments.get(name) is not None}
    source = take_local_batch(inputs, config, mesh, inputs="only ids")
    batch = take_local_batch(target, config, mesh, inputs="only ids")
    if source.rows != batch.rows:
        raise CuboidError(f"input_ids has {source.rows} rows, but decoder_input_ids has {batch.rows}")
    return replace(batch, source=source)


def take_local_images(arguments: dict[str, Any], config: PretrainedConfig, mesh: Mesh) -> LocalBatch:
    """:func:`take_local_batch` of images, of which a rank is given whole ones: they are split after the embeddings.

    Raises:
        UnsupportedModelError: an argument that has no rule.
        CuboidError: ``pixel_values`` aren't images of the size in the config, or there are none.
    """
    for name, value in arguments.items():
        is_known = name in (*IMAGE_TENSORS, "num_items_in_batch")
        if not is_known and (isinstance(value, torch.Tensor) or value not in (None, False)):
            hint = ": all images have the size in the model's config" if name == "interpolate_pos_encoding" else ""
            raise UnsupportedModelError(f"{name} has no rule on a sharded model of images{hint}")
    tensors = {name: arguments[name] for name in IMAGE_TENSORS if arguments.get(name) is not None}
    images = tensors.get("pixel_values")
    wanted = image_shape(config)
    if images is None or images.dim() != 4 or len(images) == 0 or not images.is_floating_point():
        found = "none" if images is None else f"{images.dtype} {list(images.shape)}"
        raise CuboidError(
            f"a sharded model of images needs pixel_values, floats [batch, channels, height, width], not {found}"
        )
    if wanted is None or tuple(images.shape[2:]) != wanted:
        size = getattr(config, "image_size", None)
        raise UnsupportedModelError(
            f"pixel_values are {list(images.shape)}, but the config's image_size is {size}; "
            "on a mesh there is no rule for other sizes, whose positions are interpolated"
        )
    masked = tensors.get("bool_masked_pos")
    if masked is not None and (masked.dim() != 2 or len(masked) != len(images) or masked.is_floating_point()):
        raise CuboidError(
            f"bool_masked_pos is {masked.dtype} {list(masked.shape)}; give booleans [{len(images)}, patches]"
        )
    rows = len(images)
    more = padded_length(rows, mesh.size("batch")) - rows
    local = {name: own_slice(_with_rows(name, x, more), 0, mesh.along("batch")) for name, x in tensors.items()}
    options = {name: x for name, x in arguments.items() if name == "num_items_in_batch" and x is not None}
    return LocalBatch(local, rows, 0, options)


def image_shape(config: PretrainedConfig) -> tuple[int, int] | None:
    """Height and width of a model's images; None if its config doesn't say."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None


def given_tensors(arguments: dict[str, Any], *, token_types: bool = False) -> dict[str, torch.Tensor]:
    """Those of a forward's arguments that are a micro-batch, by the names in :data:`TENSORS`."""
    names = (*TENSORS, TOKEN_TYPES) if token_types else TENSORS
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def _reject(arguments: dict[str, Any]) -> None:
    for name, harmless in _REJECTED.items():
        value = arguments.get(name)
        # A tensor, which compares element by element, is none of them.
        if value is not None and (isinstance(value, torch.Tensor) or value not in harmless):
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded model"
                + (": its cache would hold parts of the heads; pass use_cache=False" if name == "use_cache" else "")
            )
    if arguments.get("input_ids") is None:
        raise CuboidError("a sharded model needs input_ids [batch, sequence]")


def check_tensors(whole: dict[str, torch.Tensor]) -> None:
    """Make sure that a micro-batch's tensors have the shape of its ids, and hold integers.

    Raises:
        CuboidError: they don't, or the ids aren't ``[B, S]``, or there are none.
    """
    ids = whole["input_ids"]
    if ids.dim() != 2 or 0 in ids.shape:
        raise CuboidError(f"input_ids must be [batch, sequence], not {list(ids.shape)}")
    for name, tensor in whole.items():
        # Positions are often given once for all rows.
        rows = (1, ids.shape[0]) if name == "position_ids" else (ids.shape[0],)
        if tensor.dim() != 2 or tensor.shape[0] not in rows or tensor.shape[1] != ids.shape[1]:
            raise CuboidError(f"{name} is {list(tensor.shape)}, but input_ids is {list(ids.shape)}")
        # A mask may hold anything that is zero or isn't.
        if name != "attention_mask" and tensor.dtype not in _INDICES:
            raise CuboidError(f"{name} holds {tensor.dtype}; give torch.int64")


def _with_rows(name: str, x: torch.Tensor, missing: int) -> torch.Tensor:
    """Fill up with rows that have no loss. What else is in them is what a model surely can compute with."""
    if missing == 0:
        return x
    last = x[-1:].expand(missing, *x.shape[1:])
    return torch.cat([x, torch.full_like(last, IGNORE_INDEX) if name in LABELS else last])


def _pad(name: str, x: torch.Tensor, missing: int, config: PretrainedConfig, inputs: Inputs) -> torch.Tensor:
    """Fill up at the end, where a causal model's real positions don't see it, and masks of others hide it."""
    if missing == 0:
        return x
    if name == "position_ids":
        return torch.cat([x, _padding_positions(x, missing, config)], dim=1)
    value = IGNORE_INDEX if name in LABELS else 0
    if name == "input_ids" and inputs == "only ids":
        # So that positions that the model counts from ids don't go on past the end of their table.
        value = getattr(config.get_text_config(), "pad_token_id", None) or 0
    return nn.functional.pad(x, (0, missing), value=value)


def _padding_positions(positions: torch.Tensor, missing: int, config: PretrainedConfig) -> torch.Tensor:
    """Count on, so that no packed sequence seems to begin, but not past a length at which the model changes.

    Learned position tables end at ``max_position_embeddings``, and some rotary embeddings rescale beyond that or
    beyond the length that they were first trained at.
    """
    last = positions[:, -1:]
    onward = last + torch.arange(1, missing + 1, device=positions.device)
    if "dynamic" in rope_types(config):
        return last.expand(-1, missing)  # every length beyond the original one has frequencies of its own
    ends = [threshold.tokens for threshold in thresholds(config) if threshold.tokens >= positions.shape[1]]
    limit = min(ends, default=None)
    return onward if limit is None else torch.minimum(onward, last.clamp(min=limit - 1))
