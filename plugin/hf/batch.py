"""A micro-batch as users know it, to this rank's part of it, padded to what the mesh needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.hf.cases import rope_types, thresholds
from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import all_gather, own_slice, padded_length
from cuboid.topology import AXES, divisors

IGNORE_INDEX = -100
#: What a micro-batch may hold, each ``[B, S]``; positions also ``[1, S]``.
TENSORS = ("input_ids", "labels", "attention_mask", "position_ids", "shift_labels")
#: Arguments that mean "nothing special" with these values and have no rule with others.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False),
    "past_key_values": (None,),
    "inputs_embeds": (None,),
    "token_type_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "encoder_hidden_states": (None,),
    "encoder_attention_mask": (None,),
    "cache_position": (None,),
}


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a micro-batch.

    Args:
        tensors: ``[B/b, S']`` ids, mask, positions and labels, S' being S padded to a multiple of the mesh's needs.
        length: S.
        options: the forward's other arguments, unchanged.
    """

    tensors: dict[str, torch.Tensor]
    length: int
    options: dict[str, Any]

    @property
    def padded(self) -> int:
        """S'."""
        return self.tensors["input_ids"].shape[1]


def granule(mesh: Mesh) -> int:
    """What the length of a sequence, or of a segment of one, must be a multiple of."""
    return math.lcm(mesh.size("sequence"), mesh.size("hidden"))


def take_local_batch(
    arguments: dict[str, Any], config: PretrainedConfig, mesh: Mesh, *, at_least: int = 0
) -> LocalBatch:
    """Check a forward's arguments, cut its batch dim over `batch`, and pad its sequence dim to ``at_least`` or more.

    Raises:
        UnsupportedModelError: an argument that a sharded model has no rule for.
        CuboidError: shapes that contradict each other, or a batch that doesn't divide.
    """
    _refuse(arguments)
    whole = {name: arguments[name] for name in TENSORS if arguments.get(name) is not None}
    options = {name: value for name, value in arguments.items() if name not in (*TENSORS, *_REFUSED)}
    check_shapes(whole)
    _check_rows(whole["input_ids"].shape[0], mesh)
    length = whole["input_ids"].shape[1]
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=whole["input_ids"].device).unsqueeze(0)
    target = padded_length(max(length, at_least), granule(mesh))
    local = {}
    for name, tensor in whole.items():
        given_once = name == "position_ids" and tensor.shape[0] == 1
        own = tensor if given_once else own_slice(tensor, 0, mesh, ("batch",))
        local[name] = _pad(name, own, target - length, config)
    return LocalBatch(local, length, options)


def check_same_batch(ids: torch.Tensor, mesh: Mesh) -> None:
    """Make sure that all ranks of the mesh were given the same micro-batch.

    A data loader that shards by the world's ranks, as under plain data parallelism, would train on a mixture.

    Raises:
        CuboidError: on every rank, if any two differ.
    """
    # Weighted by position, so that the same ids in another order differ; int64 wraps around, alike everywhere.
    places = torch.arange(1, ids.numel() + 1, device=ids.device)
    checksum = (ids.flatten().to(torch.int64) * places).sum()
    summary = torch.stack([checksum, *(checksum.new_tensor(size) for size in ids.shape)])
    summaries = all_gather(summary, mesh, AXES)
    if bool((summaries != summaries[0]).any()):
        raise CuboidError(
            f"the {mesh.shape.size} ranks of a mesh must be given the same micro-batch, but theirs differ: shard the "
            "data by cuboid.mesh_of(model).coordinate.data out of cuboid.mesh_of(model).topology.data, not by rank"
        )


def _refuse(arguments: dict[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        value = arguments.get(name)
        if not any(value is allowed or (allowed is not None and value == allowed) for allowed in harmless):
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded model"
                + (": its cache would hold parts of the heads; pass use_cache=False" if name == "use_cache" else "")
            )
    if arguments.get("input_ids") is None:
        raise CuboidError("a sharded model needs input_ids [batch, sequence]")


def check_shapes(whole: dict[str, torch.Tensor]) -> None:
    """Make sure that a micro-batch's tensors have the shape of its ids.

    Raises:
        CuboidError: they don't, or the ids aren't ``[B, S]``.
    """
    ids = whole["input_ids"]
    if ids.dim() != 2:
        raise CuboidError(f"input_ids must be [batch, sequence], not {list(ids.shape)}")
    for name, tensor in whole.items():
        # Positions are often given once for all rows.
        rows = (1, ids.shape[0]) if name == "position_ids" else (ids.shape[0],)
        if tensor.dim() != 2 or tensor.shape[0] not in rows or tensor.shape[1] != ids.shape[1]:
            raise CuboidError(f"{name} is {list(tensor.shape)}, but input_ids is {list(ids.shape)}")


def _check_rows(rows: int, mesh: Mesh) -> None:
    pieces = mesh.size("batch")
    if rows % pieces:
        axes = " or ".join(map(str, divisors(rows)))
        raise CuboidError(
            f"the micro-batch has {rows} rows, which the mesh's batch axis of {pieces} can't share; give it a "
            f"multiple of {pieces} such as {padded_length(rows, pieces)}, or a batch axis of {axes}"
        )


def _pad(name: str, x: torch.Tensor, missing: int, config: PretrainedConfig) -> torch.Tensor:
    """Fill up at the end, where a causal model's real positions don't see it."""
    if missing == 0:
        return x
    if name == "position_ids":
        return torch.cat([x, _padding_positions(x, missing, config)], dim=1)
    value = IGNORE_INDEX if name in ("labels", "shift_labels") else 0
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
