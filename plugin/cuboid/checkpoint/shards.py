"""What ranks hold of tensors, and what is to be written of them: values that the other modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


@dataclass(frozen=True)
class Run:
    """A run of the elements of a rank's shard: all of them, or what an optimizer gave this replica of them.

    Attributes:
        start: of the first element, in the flattened shard, padding counted.
        values: ``[elements]``, a view of live memory.
    """

    start: int
    values: torch.Tensor

    @classmethod
    def whole(cls, shard: torch.Tensor) -> Run:
        """All of a shard, without a copy; the shard is contiguous."""
        return cls(0, shard.detach().view(-1))

    @property
    def stop(self) -> int:
        """End of the run."""
        return self.start + self.values.numel()


@dataclass(frozen=True)
class SplitTensor:
    """A tensor whose parts the ranks of a pipeline stage hold.

    Attributes:
        name: as the model calls it.
        spec: of the whole.
        layout: how the mesh cuts it; None where each rank has the whole.
        run: what this rank has; None for nothing.
    """

    name: str
    spec: TensorSpec
    layout: ShardingSpec | None
    run: Run | None


Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Bundle:
    """Tensors that are written together, because the file may have them in another form.

    Attributes:
        tensors: at least one.
        outputs: what the file is to have of them.
        convert: makes it of the whole tensors.
    """

    tensors: tuple[SplitTensor, ...]
    outputs: dict[str, TensorSpec]
    convert: Convert

    @classmethod
    def plain(cls, tensor: SplitTensor) -> Bundle:
        """One tensor that is written as it is."""
        return cls((tensor,), {tensor.name: tensor.spec}, lambda whole: whole)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return sum(spec.nbytes for spec in self.outputs.values())


@dataclass(frozen=True)
class Family:
    """What makes up one set of files with an index.

    Attributes:
        folder: where the files go, relative to the checkpoint; empty for the checkpoint itself.
        bundles: alike on all ranks of a stage but for the runs.
    """

    folder: str
    bundles: tuple[Bundle, ...]
