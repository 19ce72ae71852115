"""What is known of a tensor or a checkpoint without its values: shapes, shardings, ranges, what ``state.json`` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


@dataclass(frozen=True)
class CheckpointMetadata:
    """A verified checkpoint: the sizes of all files were checked, and on request their checksums."""

    path: Path
    #: Optimizer steps at the time it was written.
    step: int
    #: Contents of its ``state.json``.
    document: dict[str, Any]


@dataclass(frozen=True)
class TensorMetadata:
    """A parameter's full shape, and how the mesh shards it (None if it doesn't)."""

    shape: tuple[int, ...]
    sharding: ShardingSpec | None


@dataclass(frozen=True)
class ShardRange:
    """A contiguous range of the elements of a rank's shard: all of them, or under ZeRO-1 those of this replica.

    Attributes:
        start: index of the first element in the flattened shard, including padding.
        values: ``[elements]``, a view of the parameter or optimizer state itself.
    """

    start: int
    values: torch.Tensor

    @classmethod
    def of_shard(cls, shard: torch.Tensor) -> ShardRange:
        """The range of all elements of a contiguous shard, without a copy."""
        return cls(0, shard.detach().view(-1))

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.values.numel()


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor that is spread over the ranks of a pipeline stage.

    Attributes:
        name: its name in the model's state dict.
        spec: dtype and shape of the full tensor.
        sharding: how the mesh shards it; None if each rank has the full tensor.
        local: the elements that this rank has; None if it has none.
    """

    name: str
    spec: TensorSpec
    sharding: ShardingSpec | None
    local: ShardRange | None
