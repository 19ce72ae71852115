"""What one rank contributes to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.checkpoint.optimizer_state import OptimizerState
from cuboid.checkpoint.shards import Family, SplitTensor

#: Folder of the optimizer's per-element state, with one subfolder for each quantity (``optimizer/exp_avg``).
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint.

    Attributes:
        step: optimizer steps so far.
        families: the tensors: weights, and each per-element quantity of the optimizer.
        optimizer: per-parameter numbers and parameter groups; per-element state is in ``families``. None to save no
            optimizer.
        random: this rank's random number generator states.
        document: contents of ``state.json``; rank 0's is written.
        auxiliary_files: writes the other files (config, tokenizer) into a folder; called on rank 0.
    """

    step: int
    families: tuple[Family, ...]
    optimizer: OptimizerState | None
    random: Mapping[str, Any]
    document: Mapping[str, Any]
    auxiliary_files: Callable[[Path], None]

    def snapshot(self) -> Contents:
        """The same contents with tensors copied to the CPU, so that training can continue while they are written."""
        families = []
        for family in self.families:
            bundles = [
                dataclasses.replace(bundle, tensors=tuple(map(_copy_to_cpu, bundle.tensors)))
                for bundle in family.bundles
            ]
            families.append(dataclasses.replace(family, bundles=tuple(bundles)))
        return dataclasses.replace(self, families=tuple(families))


def _copy_to_cpu(tensor: SplitTensor) -> SplitTensor:
    if tensor.run is None:
        return tensor
    # ``copy=True``: a tensor that is on the CPU already would otherwise be shared with training.
    values = tensor.run.values.detach().to("cpu", copy=True)
    return dataclasses.replace(tensor, run=dataclasses.replace(tensor.run, values=values))
