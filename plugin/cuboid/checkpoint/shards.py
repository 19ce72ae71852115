"""Value types that describe which elements of a tensor a rank has, and which tensors are written into which files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


@dataclass(frozen=True)
class Run:
    """A contiguous run of the elements of a rank's shard: all of them, or this replica's range under ZeRO-1.

    Attributes:
        start: index of the first element in the flattened shard, including padding.
        values: ``[elements]``, a view of the parameter or optimizer state itself.
    """

    start: int
    values: torch.Tensor

    @classmethod
    def whole(cls, shard: torch.Tensor) -> Run:
        """The run of a whole contiguous shard, without a copy."""
        return cls(0, shard.detach().view(-1))

    @property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.values.numel()


@dataclass(frozen=True)
class SplitTensor:
    """A tensor that is spread over the ranks of a pipeline stage.

    Attributes:
        name: its name in the model's state dict.
        spec: dtype and shape of the full tensor.
        layout: how the mesh shards it; None if each rank has the full tensor.
        run: the elements that this rank has; None if it has none.
    """

    name: str
    spec: TensorSpec
    layout: ShardingSpec | None
    run: Run | None


Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Bundle:
    """Tensors that one rank writes together, because the file may store them in another form.

    For example, transformers merges experts into one parameter when it loads a checkpoint.

    Attributes:
        tensors: at least one.
        outputs: dtype and shape of the tensors in the file.
        convert: computes the outputs from the full ``tensors``, both by name.
    """

    tensors: tuple[SplitTensor, ...]
    outputs: dict[str, TensorSpec]
    convert: Convert

    @classmethod
    def plain(cls, tensor: SplitTensor) -> Bundle:
        """A bundle of one tensor that is written unchanged."""
        return cls((tensor,), {tensor.name: tensor.spec}, lambda whole: whole)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return sum(spec.nbytes for spec in self.outputs.values())


@dataclass(frozen=True)
class Family:
    """The tensors of one set of files with a common index: the weights, or one quantity of the optimizer.

    Attributes:
        folder: the files' folder, relative to the checkpoint; empty for the checkpoint's own folder.
        bundles: the same on all ranks of a stage except for the runs.
    """

    folder: str
    bundles: tuple[Bundle, ...]
