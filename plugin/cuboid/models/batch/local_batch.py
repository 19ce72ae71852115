"""Turns a user's micro-batch into this rank's part of it, padded to what the mesh needs."""

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
#: The tensors of a micro-batch, each ``[B, S]``; positions also ``[1, S]``.
TENSORS = ("input_ids", "labels", "attention_mask", "position_ids", "shift_labels")
#: Another one, ``[B, S]``, for models that were seen to take it, such as those of sentence pairs.
TOKEN_TYPES = "token_type_ids"
#: Further tensors of an encoder-decoder, each ``[B, T]``; its ``input_ids`` and ``attention_mask`` are ``[B, S]``.
TARGET_TENSORS = ("decoder_input_ids", "decoder_attention_mask", "labels")
#: Tensors of a model of images: the images ``[B, C, H, W]``, and which of their P patches are masked, ``[B, P]``.
IMAGE_TENSORS = ("pixel_values", "bool_masked_pos")
LABELS = ("labels", "shift_labels")
_INDICES = (torch.int64, torch.int32)
#: Arguments that are harmless with these values and not supported with others.
_REJECTED: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False),
    "past_key_values": (None,),
    "inputs_embeds": (None,),
    "token_type_ids": (None,),
    "output_attentions": (None, False),
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
        tensors: ids, mask, positions and labels ``[B'/b, S']`` (positions also ``[1, S']``), where b is the size of the
            batch axis, and B' and S' are B and S padded to what the mesh needs.
        rows: B.
        length: S; 0 for images.
        options: the forward's other arguments, unchanged.
        source: the encoder's batch, if this one is for a decoder.
    """

    tensors: dict[str, torch.Tensor]
    rows: int
    length: int
    options: dict[str, Any]
    source: LocalBatch | None = None

    @property
    def padded(self) -> int:
        """S'. Not for images."""
        return self.tensors["input_ids"].shape[1]


def granule(mesh: Mesh) -> int:
    """Return the number that the length of a sequence, or of a segment, must be a multiple of."""
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
    """Check a forward's arguments, shard the batch dim over `batch`, and pad the sequence dim to ``at_least`` or more.

    If `batch` doesn't divide the number of rows, as in the last batch of a data loader, copies of the last row without
    labels are added: they contribute nothing to the loss nor to any gradient.

    Args:
        arguments: the forward's arguments by name.
        config: the model's config.
        mesh: the model's mesh.
        at_least: minimum number of positions after padding.
        inputs: what the model takes. With ``"only ids"`` it counts positions by itself, and none are added.
        token_types: whether ``token_type_ids`` are allowed.

    Raises:
        UnsupportedModelError: an argument isn't supported by sharded models.
        CuboidError: the shapes contradict each other.
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
    """:func:`take_local_batch` for an encoder's and a decoder's sequences, which may differ in length.

    Args:
        arguments: the forward's arguments by name, including ``decoder_input_ids``.
        config, mesh: the model's.

    Returns:
        The decoder's batch, with the encoder's as its ``source``, which has the options. Neither has positions, which
        such a model counts by itself.
    """
    for name in ("position_ids", "shift_labels"):
        if arguments.get(name) is not None:
            raise UnsupportedModelError(f"{name} has no rule for an encoder-decoder, which counts positions by itself")
    # Below, the decoder's tensors have the encoder's names, which an error mustn't show.
    check_tensors(
        {name: arguments[name] for name in TARGET_TENSORS if arguments.get(name) is not None}, "decoder_input_ids"
    )
    inputs = {name: x for name, x in arguments.items() if name not in TARGET_TENSORS}
    names = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask", "labels": "labels"}
    target = {own: arguments[name] for own, name in names.items() if arguments.get(name) is not None}
    source = take_local_batch(inputs, config, mesh, inputs="only ids")
    batch = take_local_batch(target, config, mesh, inputs="only ids")
    if source.rows != batch.rows:
        raise CuboidError(f"input_ids has {source.rows} rows, but decoder_input_ids has {batch.rows}")
    return replace(batch, source=source)


def take_local_images(arguments: dict[str, Any], config: PretrainedConfig, mesh: Mesh) -> LocalBatch:
    """:func:`take_local_batch` for images. A rank gets whole images, because they are sharded after the embeddings.

    Raises:
        UnsupportedModelError: an argument isn't supported, or the images don't have the size in the config.
        CuboidError: ``pixel_values`` are missing or aren't images, or ``bool_masked_pos`` doesn't fit them.
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
    """Return the height and width of a model's images; None if its config doesn't have them."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None


def given_tensors(arguments: dict[str, Any], *, token_types: bool = False) -> dict[str, torch.Tensor]:
    """Return those of a forward's arguments that are tensors of the micro-batch, by name."""
    names = (*TENSORS, TOKEN_TYPES) if token_types else TENSORS
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def _reject(arguments: dict[str, Any]) -> None:
    for name, harmless in _REJECTED.items():
        value = arguments.get(name)
        # A tensor is never harmless, and ``in`` would compare it element by element.
        if value is not None and (isinstance(value, torch.Tensor) or value not in harmless):
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded model"
                + (": its cache would hold parts of the heads; pass use_cache=False" if name == "use_cache" else "")
            )
    if arguments.get("input_ids") is None:
        raise CuboidError("a sharded model needs input_ids [batch, sequence]")


def check_ids(ids: torch.Tensor, name: str = "input_ids") -> None:
    """Check that ids, given as ``name``, are ``[B, S]``.

    Raises:
        CuboidError: they aren't, or are empty.
    """
    if ids.dim() != 2 or 0 in ids.shape:
        raise CuboidError(f"{name} must be [batch, sequence], not {list(ids.shape)}")


def check_tensors(whole: dict[str, torch.Tensor], ids_name: str = "input_ids") -> None:
    """Check that a micro-batch's tensors have the shape of its ids, and hold integers (masks: any numbers).

    Args:
        whole: the tensors by name.
        ids_name: the name of the ids among them.

    Raises:
        CuboidError: they don't, or the ids aren't ``[B, S]`` or are empty.
    """
    ids = whole[ids_name]
    check_ids(ids, ids_name)
    for name, tensor in whole.items():
        # Positions are often given once for all rows.
        rows = (1, ids.shape[0]) if name == "position_ids" else (ids.shape[0],)
        if tensor.dim() != 2 or tensor.shape[0] not in rows or tensor.shape[1] != ids.shape[1]:
            raise CuboidError(f"{name} is {list(tensor.shape)}, but {ids_name} is {list(ids.shape)}")
        # In a mask, only zero or nonzero matters, so any dtype will do.
        if not name.endswith("attention_mask") and tensor.dtype not in _INDICES:
            raise CuboidError(f"{name} holds {tensor.dtype}; give torch.int64")


def _with_rows(name: str, x: torch.Tensor, missing: int) -> torch.Tensor:
    """Append ``missing`` rows without loss."""
    if missing == 0:
        return x
    # Copies of a real row, because those are certainly valid inputs.
    last = x[-1:].expand(missing, *x.shape[1:])
    return torch.cat([x, torch.full_like(last, IGNORE_INDEX) if name in LABELS else last])


def _pad(name: str, x: torch.Tensor, missing: int, config: PretrainedConfig, inputs: Inputs) -> torch.Tensor:
    """Pad at the end, where a causal model's real positions don't see it and other models' masks hide it."""
    if missing == 0:
        return x
    if name == "position_ids":
        return torch.cat([x, _padding_positions(x, missing, config)], dim=1)
    value = IGNORE_INDEX if name in LABELS else 0
    if name == "input_ids" and inputs == "only ids":
        # Some models count positions from the ids and skip this token; other ids could count past the position table.
        value = getattr(config.get_text_config(), "pad_token_id", None) or 0
    return nn.functional.pad(x, (0, missing), value=value)


def _padding_positions(positions: torch.Tensor, missing: int, config: PretrainedConfig) -> torch.Tensor:
    """Count on, so that no packed sequence seems to start, but not past a length at which the model changes.

    Learned position tables end at ``max_position_embeddings``, and some rotary embeddings rescale beyond that or
    beyond the length that they were first trained at.
    """
    last = positions[:, -1:]
    onward = last + torch.arange(1, missing + 1, device=positions.device)
    if "dynamic" in rope_types(config):
        return last.expand(-1, missing)  # every length beyond the original one has its own frequencies
    ends = [threshold.tokens for threshold in thresholds(config) if threshold.tokens >= positions.shape[1]]
    limit = min(ends, default=None)
    return onward if limit is None else torch.minimum(onward, last.clamp(min=limit - 1))
