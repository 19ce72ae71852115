"""Assemble the fp32 master weights from the optimizer states of ZeRO's data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec, check_sizes
from cuboid.convert.deepspeed.model_states import ModelStates, assembled
from cuboid.convert.formats.pickles import Extent, PickledTensor, cut, extent_of, load_pickle
from cuboid.errors import CheckpointError

_OPTIMIZER, _COUNT, _PADDINGS = "optimizer_state_dict", "partition_count", "param_alignment_paddings"
#: ZeRO 1 and 2: for each parameter group, this rank's partition of the flat concatenation of its parameters.
_PARTITIONS = "single_partition_of_fp32_groups"
#: ZeRO 3: the flat concatenation of this rank's partitions of each parameter.
_FRAGMENTS = "fp32_flat_groups"


def zero_masters(paths: Sequence[Path], states: ModelStates, *, trusted: bool) -> dict[str, PickledTensor]:
    """Assemble the fp32 weights from the files of all data-parallel ranks.

    Args:
        paths: their ``*_optim_states.pt``, by rank.
        states: the model states of the same model-parallel rank.
        trusted: whether pickles may be loaded.

    Raises:
        CheckpointError: a file is missing or malformed, or there are too many or too few elements.
    """
    saved = [_optimizer_of(path, trusted) for path in paths]
    count = saved[0].get(_COUNT)
    if (set(count) if isinstance(count, list) else {count}) != {len(paths)}:
        raise CheckpointError(
            f"{paths[0].parent}: the optimizer was cut into {count} parts, but there are files of {len(paths)} ranks"
        )
    if not states.groups:
        raise CheckpointError(f"{paths[0].parent}: the model's states don't say which parameters the optimizer has")
    if _PARTITIONS in saved[0]:
        return dict(_from_partitions(paths, saved, states))
    if _FRAGMENTS in saved[0]:
        return dict(_from_fragments(paths, saved, states))
    raise CheckpointError(f"{paths[0]}: has neither {_PARTITIONS} nor {_FRAGMENTS}, as ZeRO 1 to 3 have")


def _optimizer_of(path: Path, trusted: bool) -> Mapping[str, Any]:
    loaded = load_pickle(path, trusted=trusted)
    optimizer = loaded.get(_OPTIMIZER) if isinstance(loaded, Mapping) else None
    if not isinstance(optimizer, Mapping):
        raise CheckpointError(f"{path}: isn't what DeepSpeed saves of an optimizer: it has no key {_OPTIMIZER!r}")
    return optimizer


def _extents(path: Path, key: str, tensors: Any) -> list[Extent]:
    return [extent_of(path, f"{key}[{number}]", tensor) for number, tensor in enumerate(tensors)]


def _from_partitions(
    paths: Sequence[Path], saved: Sequence[Mapping[str, Any]], states: ModelStates
) -> Iterator[tuple[str, PickledTensor]]:
    ranks = [_extents(path, _PARTITIONS, rank[_PARTITIONS]) for path, rank in zip(paths, saved, strict=True)]
    paddings = saved[0].get(_PADDINGS) or [[0] * len(group) for group in states.groups]
    for number, (group, behind) in enumerate(zip(states.groups, paddings, strict=True)):
        chain, start = [rank[number] for rank in ranks], 0
        for (name, shape), padding in zip(group.items(), check_sizes(list(behind)), strict=True):
            elements = math.prod(shape)
            yield name, assembled(name, shape, cut(chain, start, elements))
            start += elements + padding
        _check_used(paths, start, sum(extent.count for extent in chain))


def _from_fragments(
    paths: Sequence[Path], saved: Sequence[Mapping[str, Any]], states: ModelStates
) -> Iterator[tuple[str, PickledTensor]]:
    chains = [_extents(path, _FRAGMENTS, rank[_FRAGMENTS]) for path, rank in zip(paths, saved, strict=True)]
    start = 0
    for group in states.groups:
        for name, shape in group.items():
            # ZeRO 3 pads each parameter to a multiple of the number of ranks.
            share = math.ceil(math.prod(shape) / len(chains))
            parts = [part for chain in chains for part in cut(chain, start, share)]
            yield name, assembled(name, shape, parts)
            start += share
    _check_used(paths, start * len(chains), sum(extent.count for chain in chains for extent in chain))


def _check_used(paths: Sequence[Path], used: int, present: int) -> None:
    # DeepSpeed aligns the end of a group to twice the number of ranks, which suits NCCL.
    unit = 2 * len(paths)
    if math.ceil(used / unit) != math.ceil(present / unit):
        raise CheckpointError(
            f"{paths[0].parent}: the optimizer has {present:,} elements, but the model's parameters take {used:,}; the "
            "files are of different checkpoints, or of a kind that convert doesn't know"
        )


def universal_masters(folder: Path, states: Sequence[ModelStates], *, trusted: bool) -> dict[str, PickledTensor]:
    """The fp32 weights of a universal checkpoint: one file for each parameter.

    Args:
        folder: the tag's folder, with ``zero/`` in it.
        states: the states of all model-parallel ranks; a tensor that is stored flat gets its shape from them.
        trusted: whether pickles may be loaded.

    Raises:
        CheckpointError: a file is malformed, or there are none.
    """
    shapes = {name: shape for state in states for group in state.groups for name, shape in group.items()}
    masters = {}
    for path in sorted((folder / "zero").glob("*/fp32.pt")):
        name = path.parent.name
        loaded = load_pickle(path, trusted=trusted)
        tensor = loaded.get("param") if isinstance(loaded, Mapping) else loaded
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: holds no tensor")
        extent, shape = extent_of(path, name, tensor), tuple(tensor.shape)
        if len(shape) == 1 and math.prod(shapes.get(name, ())) == extent.count:
            shape = shapes.get(name, shape)
        masters[name] = PickledTensor(TensorSpec(extent.dtype, shape), (extent,))
    if not masters:
        raise CheckpointError(f"{folder / 'zero'}: has no */fp32.pt, as a universal checkpoint has")
    return masters
