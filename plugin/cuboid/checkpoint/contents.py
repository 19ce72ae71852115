"""What one rank gives to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.checkpoint.optimizer_state import OptimizerState
from cuboid.checkpoint.shards import Bundle, Family, SplitTensor

#: The folder of the optimizer's quantities, each of which has one of its own.
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint, of one rank.

    Attributes:
        step: optimizer steps so far.
        families: of tensors.
        optimizer: its numbers and groups; its quantities are in ``families``. None without one.
        random: this rank's random states.
        document: what ``state.json`` says; the first rank's counts.
        auxiliary_files: writes further files into a folder; called on the first rank.
    """

    step: int
    families: tuple[Family, ...]
    optimizer: OptimizerState | None
    random: Mapping[str, Any]
    document: Mapping[str, Any]
    auxiliary_files: Callable[[Path], None]

    def copied(self) -> Contents:
        """The same with copies of everything that training goes on to change."""
        return dataclasses.replace(self, families=tuple(_copied(family) for family in self.families))


def _copied(family: Family) -> Family:
    return dataclasses.replace(family, bundles=tuple(_copied_bundle(bundle) for bundle in family.bundles))


def _copied_bundle(bundle: Bundle) -> Bundle:
    return dataclasses.replace(bundle, tensors=tuple(map(_copied_tensor, bundle.tensors)))


def _copied_tensor(tensor: SplitTensor) -> SplitTensor:
    if tensor.run is None:
        return tensor
    values = tensor.run.values.detach().to("cpu", copy=True)
    return dataclasses.replace(tensor, run=dataclasses.replace(tensor.run, values=values))
