"""Turns a user's micro-batch into this rank's part of it, padded to what the mesh needs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import own_slice, padded_length, positions_are_whole
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import Inputs
from cuboid.models.batch.length_cases import rope_types, thresholds
from cuboid.models.batch.rank_cache import RankCache
from cuboid.models.batch.row_media import RankMedia

IGNORE_INDEX = -100
#: The tensors of a micro-batch, each ``[B, S]``; positions also ``[1, S]``.
TENSORS = ("input_ids", "labels", "attention_mask", "position_ids", "shift_labels")
#: Another one, ``[B, S]``, for models that were seen to take it, such as those of sentence pairs.
TOKEN_TYPES = "token_type_ids"
LABELS = ("labels", "shift_labels")
#: Rotary embeddings whose frequencies depend on the highest position of a whole micro-batch.
_OF_HIGHEST = frozenset({"dynamic", "longrope"})
#: Tensors that aren't cut: how many tokens a loss is averaged over, and where packed sequences begin.
_WHOLE = ("num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
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
    # A kind that takes images or audio takes them out first.
    **dict.fromkeys(("pixel_values", "pixel_values_videos", "input_features"), (None,)),
    "mm_encoder_outputs": (None, {}),
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
        cache: what the tokens before these left, in generation. The mask is then of all tokens, ``[B'/b, T + S]``.
        media: images or clips of the rank's rows, if the model takes them beside ids; they are among the options.
    """

    tensors: dict[str, torch.Tensor]
    rows: int
    length: int
    options: dict[str, Any]
    source: LocalBatch | None = None
    cache: RankCache | None = None
    media: tuple[RankMedia, ...] = ()

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
    types: Collection[str] = (),
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
        types: names of further tensors ``[B, S]`` that are allowed, which say of what kind each token is.

    Raises:
        UnsupportedModelError: an argument isn't supported by sharded models.
        CuboidError: the shapes contradict each other.
    """
    given_cache = arguments.get("past_key_values")
    cache = given_cache if isinstance(given_cache, RankCache) else None
    tensors = given_tensors(arguments, types)
    handled = {*tensors} - {"input_ids"} | (set() if cache is None else {"past_key_values", "use_cache"})
    _reject({name: value for name, value in arguments.items() if name not in handled})
    options = {name: value for name, value in arguments.items() if name not in (*TENSORS, *types, *_REJECTED)}
    for name, x in options.items():
        # A model that is given embeddings sees nothing of other inputs.
        if isinstance(x, torch.Tensor) and x.dim() > 0 and name not in _WHOLE:
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded model, whose inputs here are {', '.join(TENSORS)}; leave it out, or "
                "train this model without a mesh"
            )
    whole_mask = None if cache is None else tensors.pop("attention_mask", None)
    check_tensors(tensors)
    rows, length = tensors["input_ids"].shape
    # Positions that aren't given are the same in all rows.
    positions, highest, differs = tensors.get("position_ids"), None, False
    if positions is not None and not _OF_HIGHEST.isdisjoint(rope_types(config)):
        highest, differs = positions.max(), len(positions) > 1 and mesh.size("batch") > 1
        if differs and (at_least or positions_are_whole()):
            _check_highest(positions, config, mesh)
    if cache is not None:
        cache.begin(rows, length)
    if "position_ids" not in tensors and inputs != "only ids":
        seen = 0 if cache is None else cache.seen
        tensors["position_ids"] = torch.arange(seen, seen + length, device=tensors["input_ids"].device).unsqueeze(0)
    more = padded_length(rows, mesh.size("batch")) - rows
    # With a position to spare, which can be the highest one of all rows.
    needed = length + 1 if differs and not at_least else max(length, at_least)
    target = length if positions_are_whole() else padded_length(needed, granule(mesh))
    local = {}
    for name, tensor in tensors.items():
        given_once = name == "position_ids" and tensor.shape[0] == 1
        local_rows = tensor if given_once else own_slice(with_rows(name, tensor, more), 0, mesh.along("batch"))
        local[name] = _pad(name, local_rows, target - length, config, inputs, highest)
    if whole_mask is not None:
        local["attention_mask"] = own_slice(with_rows("attention_mask", whole_mask, more), 0, mesh.along("batch"))
    return LocalBatch(local, rows, length, options, cache=cache)


def given_tensors(arguments: dict[str, Any], types: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return those of a forward's arguments that are tensors of the micro-batch, by name.

    Raises:
        CuboidError: one isn't a tensor, as of an array of numpy, or a mask for each kind of attention.
    """
    tensors = {name: arguments[name] for name in (*TENSORS, *types) if arguments.get(name) is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CuboidError(f"{name} is a {type(tensor).__name__}; give a tensor [batch, sequence]")
    return tensors


def _reject(arguments: dict[str, Any]) -> None:
    for name, harmless in _REJECTED.items():
        value = arguments.get(name)
        # A tensor is never harmless, and ``in`` would compare it element by element.
        if value is not None and (isinstance(value, torch.Tensor) or value not in harmless):
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded model"
                + (": generate makes its cache by itself; pass use_cache=False" if name == "use_cache" else "")
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


def check_tensors(tensors: dict[str, torch.Tensor], ids_name: str = "input_ids") -> None:
    """Check that a micro-batch's tensors have the shape of its ids, and hold integers (masks: any numbers).

    Raises:
        CuboidError: they don't, or the ids aren't ``[B, S]`` or are empty.
    """
    ids = tensors[ids_name]
    check_ids(ids, ids_name)
    for name, tensor in tensors.items():
        # Positions are often given once for all rows.
        rows = (1, ids.shape[0]) if name == "position_ids" else (ids.shape[0],)
        if tensor.dim() != 2 or tensor.shape[0] not in rows or tensor.shape[1] != ids.shape[1]:
            raise CuboidError(f"{name} is {list(tensor.shape)}, but {ids_name} is {list(ids.shape)}")
        # In a mask, only zero or nonzero matters, so any dtype will do.
        if not name.endswith("attention_mask") and tensor.dtype not in _INDICES:
            raise CuboidError(f"{name} holds {tensor.dtype}; give torch.int64")


def with_rows(name: str, x: torch.Tensor, missing: int) -> torch.Tensor:
    """Append ``missing`` rows without loss."""
    if missing == 0:
        return x
    # Copies of a real row, because those are certainly valid inputs.
    last = x[-1:].expand(missing, *x.shape[1:])
    return torch.cat([x, torch.full_like(last, IGNORE_INDEX) if name in LABELS else last])


def _check_highest(positions: torch.Tensor, config: PretrainedConfig, mesh: Mesh) -> None:
    """Check that no rank of `batch` would choose other frequencies than the whole micro-batch does.

    Raises:
        UnsupportedModelError: one would.
    """
    parts = mesh.size("batch")
    rows = with_rows("position_ids", positions, padded_length(len(positions), parts) - len(positions))
    highest: list[int] = rows.reshape(parts, -1).amax(dim=1).tolist()
    ends = [threshold.tokens for threshold in thresholds(config) if threshold.key.endswith("max_position_embeddings")]
    types = rope_types(config) & _OF_HIGHEST
    # Beyond the end, each length has its own frequencies if they are dynamic.
    chosen = {(*(end <= x for end in ends), x if "dynamic" in types and min(ends) <= x else 0) for x in highest}
    if len(chosen) > 1:
        raise UnsupportedModelError(
            f"position_ids reach {max(highest)} in some rows, but only {min(highest)} in those of another rank of "
            f"`batch`; rotary embeddings of type {', '.join(sorted(types))} (rope_parameters) have frequencies for the "
            "highest position of all rows, for which there is no rule in a pipeline and in generation. Use a mesh "
            "without `batch`, or rows whose longest sequences are alike"
        )


def _pad(
    name: str, x: torch.Tensor, missing: int, config: PretrainedConfig, inputs: Inputs, highest: torch.Tensor | None
) -> torch.Tensor:
    """Pad at the end, where a causal model's real positions don't see it and other models' masks hide it."""
    if missing == 0:
        return x
    if name == "position_ids" and highest is not None:
        # Every rank sees the highest position of all rows, and none beyond it; packed sequences may end with others.
        return torch.cat([x, highest.expand(len(x), missing)], dim=1)
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
    # Sequences that are packed into a row are shorter than the row.
    ends = [x.tokens for x in thresholds(config) if x.is_end or x.tokens >= positions.shape[1]]
    limit = min(ends, default=None)
    return onward if limit is None else torch.minimum(onward, last.clamp(min=limit - 1))
