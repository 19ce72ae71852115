"""The fp32 master weights of a 16-bit model that DeepSpeed trained without ZeRO, which it saves without names.

They are in the order of the parameter groups, and equal the model's weights when rounded to the model's dtype. They are
matched with the model's weights by order, size and value; an ambiguous match is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.convert.deepspeed.model_states import ModelStates
from cuboid.convert.formats.block_tensors import BLOCK_BYTES
from cuboid.convert.formats.pickles import Extent, ExtentReader, PickledTensor, cut, extent_of
from cuboid.errors import CheckpointError

#: Keys of a list of tensors for each group, or of one flat tensor for each.
_KEYS = ("fp32_groups", "fp32_groups_flat")


@dataclass
class _MasterGroup:
    """A parameter group's fp32 weights, of which the first ``start`` elements have been matched."""

    chain: Sequence[Extent]
    start: int = 0

    def next(self, count: int) -> tuple[Extent, ...]:
        """The next ``count`` elements; fewer at the end."""
        return cut(self.chain, self.start, count)

    @property
    def unmatched(self) -> int:
        """Number of elements that haven't been matched."""
        return sum(extent.count for extent in self.chain) - self.start


def plain_masters(states: ModelStates, path: Path) -> dict[str, PickledTensor]:
    """The fp32 weights of a checkpoint without ZeRO, by name; empty if the optimizer steps the model's own weights.

    Raises:
        CheckpointError: they can't be matched with the model's weights unambiguously.
    """
    groups = _groups(states.ranks[0].get("optimizer"), path)
    # Keyed by the position in the file, because tied parameters are several names of one tensor.
    by_extents: dict[tuple[Extent, ...], PickledTensor | None] = {}
    with ExtentReader() as reader:
        for name, tensor in states.tensors.items():
            if tensor.extents not in by_extents:
                by_extents[tensor.extents] = _take(groups, tensor, name, path, reader)
    if any(group.unmatched for group in groups):
        raise _unnamed(path, "some are none of the model's weights, in the order of its parameters")
    named = ((name, by_extents[tensor.extents]) for name, tensor in states.tensors.items())
    return {name: master for name, master in named if master is not None}


def _take(
    groups: list[_MasterGroup], tensor: PickledTensor, name: str, path: Path, reader: ExtentReader
) -> PickledTensor | None:
    """The master weights of a tensor, from the group in which they are next; None if the tensor is frozen."""
    fitting = [group for group in groups if _rounds_to(group, tensor, reader)]
    if len(fitting) > 1:
        raise _unnamed(path, f"more than one of them could be {name}")
    if not fitting:
        return None
    count = math.prod(tensor.spec.shape)
    extents = fitting[0].next(count)
    fitting[0].start += count
    return PickledTensor(TensorSpec(extents[0].dtype, tensor.spec.shape), extents)


def _groups(optimizer: Any, path: Path) -> list[_MasterGroup]:
    for key in _KEYS:
        groups = optimizer.get(key) if isinstance(optimizer, Mapping) else None
        if groups:
            lists = [group if isinstance(group, list) else [group] for group in groups]
            return [_MasterGroup([extent_of(path, key, tensor) for tensor in group]) for group in lists]
    return []


def _rounds_to(group: _MasterGroup, tensor: PickledTensor, reader: ExtentReader) -> bool:
    count, dtype = math.prod(tensor.spec.shape), tensor.spec.dtype
    extents = group.next(count)
    if sum(extent.count for extent in extents) < count:
        return False
    # In blocks of four-byte elements.
    for start in range(0, count, BLOCK_BYTES // 4):
        length = min(BLOCK_BYTES // 4, count - start)
        master = reader.read(extents, start, length, extents[0].dtype)
        if not torch.equal(master.to(dtype), reader.read(tensor.extents, start, length, dtype)):
            return False
    return True


def _unnamed(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the optimizer's fp32 weights have no names, and {reason}; --dtype with the model's own dtype takes "
        "the model's weights instead"
    )
