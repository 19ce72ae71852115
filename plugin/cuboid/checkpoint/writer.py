"""Write families of tensors in parallel: every rank writes a share of the full tensors into its own files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cuboid.checkpoint.exchange import Exchange, Task
from cuboid.checkpoint.file_plan import FilePlan, cut_files, gather_holdings, name_files, plan_tasks
from cuboid.checkpoint.format.manifest import FileRecord
from cuboid.checkpoint.format.tensor_file import TensorFileWriter
from cuboid.checkpoint.format.tensor_header import TensorSpec
from cuboid.checkpoint.format.weight_index import write_index
from cuboid.checkpoint.shards import Family
from cuboid.config.schema import MAX_FILE_BYTES
from cuboid.distributed.mesh import Mesh
from cuboid.failures.rank_agreement import gather_objects


@dataclass
class Written:
    """What one rank wrote.

    Attributes:
        records: size and checksum of each file, by its path relative to the checkpoint.
        weight_maps: for each family's folder, the file of each tensor.
        sizes_bytes: for each family's folder, the total size of its tensors.
        elements: for each family's folder, the total number of elements.
        failure: the error that stopped the rank, if any; its unfinished files are then missing.
    """

    records: dict[str, FileRecord] = field(default_factory=dict)
    weight_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes_bytes: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    failure: str | None = None


def write_families(
    families: Sequence[Family],
    folder: Path,
    mesh: Mesh,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Callable[[float], object] | None = None,
) -> list[Written]:
    """Write the tensors of all stages. Collective over the world, on the host groups.

    Files are named as Hugging Face names them: ``model-00001-of-00003.safetensors``, or ``model.safetensors`` if
    there is only one.

    Args:
        families: the same on all ranks of a stage except for the runs; the same folders on all stages.
        folder: an existing folder that all ranks see.
        mesh: this rank's mesh, with its host groups connected.
        max_file_bytes: maximum size of a file, unless a single bundle is larger.
        advance: called after each round with the share of this stage's bytes that the round wrote.

    Returns:
        What each rank wrote, by rank. A rank whose write fails still sends the others their parts, so that the
        exchange doesn't hang.
    """
    tasks = plan_tasks(families, mesh)
    files = cut_files([task for task in tasks if task.writer == mesh.rank], max_file_bytes)
    names = name_files(gather_objects([plan.folder for plan in files], mesh), mesh.rank)
    writer = _RankWriter(folder, dict(zip(names, files, strict=True)))
    total = max(sum(task.bundle.nbytes for task in tasks), 1)
    for current, own, wholes in Exchange(mesh, gather_holdings(families, mesh)).rounds(tasks):
        if own is not None:
            writer.write(own, wholes)
        # Freed before the next round receives its tensors.
        wholes.clear()
        if advance is not None:
            advance(sum(task.bundle.nbytes for task in current) / total)
    return gather_objects(writer.written, mesh)


class _RankWriter:
    """Writes this rank's files one after another, in the order of its tasks."""

    def __init__(self, folder: Path, plans: dict[str, FilePlan]) -> None:
        self._folder = folder
        self._plans = iter(plans.items())
        self._remaining = 0
        self._file: TensorFileWriter | None = None
        self._name = ""
        self.written = Written()

    def write(self, task: Task, wholes: dict[str, torch.Tensor]) -> None:
        """Write the outputs of the next task."""
        if self.written.failure is not None:
            return
        try:
            if self._remaining == 0:
                self._open()
            assert self._file is not None
            outputs = task.bundle.convert(wholes)
            # In the file's order, which the file writer has sorted by dtype width.
            for name in [name for name in self._file.specs if name in outputs]:
                self._file.write(name, outputs[name])
            self._remaining -= 1
            if self._remaining == 0:
                self.written.records[self._name] = self._file.close()
                self._file = None
        except Exception as error:
            # Every error, such as too little memory, is reported only after the last round: until then the other
            # writers still need this rank's shards.
            if self._file is not None:
                self._file.discard()
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self.written.failure = f"{self._folder / self._name} can't be written: {reason}"

    def _open(self) -> None:
        self._name, plan = next(self._plans)
        self._remaining = len(plan.tasks)
        specs: dict[str, TensorSpec] = {}
        for task in plan.tasks:
            specs.update(task.bundle.outputs)
        path = self._folder / self._name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = TensorFileWriter(path, specs)
        weight_map = self.written.weight_maps.setdefault(plan.folder, {})
        weight_map.update(dict.fromkeys(specs, path.name))
        self.written.sizes_bytes[plan.folder] += sum(spec.nbytes for spec in specs.values())
        self.written.elements[plan.folder] += sum(math.prod(spec.shape) for spec in specs.values())


def write_indices(folder: Path, results: Sequence[Written]) -> None:
    """Write each family's ``model.safetensors.index.json``, which maps tensors to files.

    Args:
        folder: the checkpoint's folder.
        results: what each rank wrote.
    """
    for family in sorted({name for written in results for name in written.weight_maps}):
        weight_map: dict[str, str] = {}
        for written in results:
            weight_map.update(written.weight_maps.get(family, {}))
        parameters = sum(written.elements[family] for written in results)
        size_bytes = sum(written.sizes_bytes[family] for written in results)
        write_index(folder / family, weight_map, parameters=parameters, size_bytes=size_bytes)
