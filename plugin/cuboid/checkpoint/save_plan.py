"""What one rank saves, before anything is written: a plan, made of the items that are written together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.checkpoint.metadata import ShardedTensor
from cuboid.checkpoint.optimizer_state import OptimizerState

#: Folder of the optimizer's per-element state, with one subfolder for each quantity (``optimizer/exp_avg``).
OPTIMIZER = "optimizer"

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class WriteItem:
    """Tensors that one rank writes together, because the file may store them in another form.

    For example, transformers merges experts into one parameter when it loads a checkpoint.

    Attributes:
        folder: the files' folder, relative to the checkpoint: empty for the weights, else that of a quantity of the
            optimizer. The files of a folder have a common index.
        tensors: at least one.
        outputs: dtype and shape of the tensors in the file.
        convert: computes the outputs from the full ``tensors``, both by name.
    """

    folder: str
    tensors: tuple[ShardedTensor, ...]
    outputs: dict[str, TensorSpec]
    convert: Convert

    @classmethod
    def plain(cls, folder: str, tensor: ShardedTensor) -> WriteItem:
        """One tensor that is written unchanged."""
        return cls(folder, (tensor,), {tensor.name: tensor.spec}, lambda full_tensors: full_tensors)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return sum(spec.nbytes for spec in self.outputs.values())


@dataclass(frozen=True)
class SavePlan:
    """One rank's part of a checkpoint.

    Attributes:
        step: optimizer steps so far.
        items: the weights, then each per-element quantity of the optimizer; the same on all ranks of a stage except for
            the ranges that a rank has.
        optimizer: per-parameter numbers and parameter groups; per-element state is in ``items``. None to save no
            optimizer.
        random: this rank's random number generator states.
        document: contents of ``state.json``; rank 0's is written.
        auxiliary_files: writes the other files (config, tokenizer) into a folder; called on rank 0.
    """

    step: int
    items: tuple[WriteItem, ...]
    optimizer: OptimizerState | None
    random: Mapping[str, Any]
    document: Mapping[str, Any]
    auxiliary_files: Callable[[Path], None]
