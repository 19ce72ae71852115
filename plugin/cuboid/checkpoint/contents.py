"""What one rank contributes to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cuboid.checkpoint.host_copies import HostCopies
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
        """Copy to host memory all that training changes in place, so that it can be written in the background."""
        families = []
        host = HostCopies()

        def copied(tensor: SplitTensor) -> SplitTensor:
            if tensor.run is None:
                return tensor
            # Tensors on the CPU are cloned too, because training continues to update them.
            values = host.copy(tensor.run.values, shared=False)
            return dataclasses.replace(tensor, run=dataclasses.replace(tensor.run, values=values))

        for family in self.families:
            bundles = [
                dataclasses.replace(bundle, tensors=tuple(map(copied, bundle.tensors))) for bundle in family.bundles
            ]
            families.append(dataclasses.replace(family, bundles=tuple(bundles)))
        host.wait()
        optimizer = self.optimizer
        if optimizer is not None:
            # The runs of its quantities were copied with the families; from here on only their names are used.
            numbers, groups = _copy_value(optimizer.numbers), _copy_value(optimizer.groups)
            optimizer = dataclasses.replace(optimizer, numbers=numbers, groups=groups)
        return dataclasses.replace(
            self, families=tuple(families), optimizer=optimizer, document=_copy_value(dict(self.document))
        )


def _copy_value(value: Any) -> Any:
    """Deep-copy what ``state.json`` can hold; other values are kept, so that the encoder rejects them by key.

    A step counter, a learning rate or a list in ``client_state`` may be changed in place by the next step.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and type(value) in (torch.Tensor, nn.Parameter)
    ):
        return value if value.is_meta or value.is_quantized else value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copy_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        copies = [_copy_value(each) for each in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value
