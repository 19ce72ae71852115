"""Write the items of a save in parallel: every rank writes a share of the full tensors into its own files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cuboid.checkpoint.exchange import Exchange
from cuboid.checkpoint.format.manifest import FileRecord
from cuboid.checkpoint.format.tensor_file import TensorFileWriter, TensorSpec
from cuboid.checkpoint.format.weight_index import write_index
from cuboid.checkpoint.save_plan import WriteItem
from cuboid.checkpoint.save_planner import PlannedItem, gather_ranges, name_files, plan_items, split_files
from cuboid.config.schema import MAX_FILE_BYTES
from cuboid.distributed.mesh import Mesh
from cuboid.failures.rank_agreement import gather_objects


@dataclass
class WriteResult:
    """What one rank wrote.

    Attributes:
        records: size and checksum of each file, by its path relative to the checkpoint.
        weight_maps: by folder, the file of each tensor.
        sizes_bytes: by folder, the total size of its tensors.
        elements: by folder, the total number of elements.
        failure: the error that stopped the rank, if any; its unfinished files are then missing.
    """

    records: dict[str, FileRecord] = field(default_factory=dict)
    weight_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes_bytes: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    failure: str | None = None


def write_items(
    items: Sequence[WriteItem],
    folder: Path,
    mesh: Mesh,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Callable[[float], object] | None = None,
) -> list[WriteResult]:
    """Write the tensors of all stages. Collective over the world, on the host groups.

    Files are named as Hugging Face names them: ``model-00001-of-00003.safetensors``, or ``model.safetensors`` if
    there is only one.

    Args:
        items: the same on all ranks of a stage except for the ranges that a rank has.
        folder: an existing folder that all ranks see.
        mesh: with its host groups connected.
        max_file_bytes: maximum size of a file, unless a single item is larger.
        advance: called after each round with the share of this stage's bytes that the round wrote.

    Returns:
        What each rank wrote, by rank. A rank whose write fails still sends the others its shards, so that the
        exchange doesn't hang.
    """
    planned = plan_items(items, mesh)
    files = split_files([entry for entry in planned if entry.writer == mesh.rank], max_file_bytes)
    names = name_files(gather_objects([file[0].item.folder for file in files], mesh), mesh.rank)
    writer = _RankWriter(folder, dict(zip(names, files, strict=True)))
    total_bytes = max(sum(item.nbytes for item in items), 1)
    for in_round, own_item, full_tensors in Exchange(mesh, gather_ranges(items, mesh)).rounds(planned):
        if own_item is not None:
            writer.write(own_item.item, full_tensors)
        # Freed before the next round receives its tensors.
        full_tensors.clear()
        if advance is not None:
            advance(sum(entry.item.nbytes for entry in in_round) / total_bytes)
    return gather_objects(writer.result, mesh)


class _RankWriter:
    """Writes this rank's files one after another, in the order of its items."""

    def __init__(self, folder: Path, files: dict[str, list[PlannedItem]]) -> None:
        self._folder = folder
        self._files = iter(files.items())
        self._remaining = 0
        self._file: TensorFileWriter | None = None
        self._name = ""
        self.result = WriteResult()

    def write(self, item: WriteItem, full_tensors: dict[str, torch.Tensor]) -> None:
        """Write the outputs of the next item."""
        if self.result.failure is not None:
            return
        try:
            if self._remaining == 0:
                self._open()
            assert self._file is not None
            outputs = item.convert(full_tensors)
            # In the file's order, which the file writer has sorted by dtype width.
            for name in [name for name in self._file.specs if name in outputs]:
                self._file.write(name, outputs[name])
            self._remaining -= 1
            if self._remaining == 0:
                self.result.records[self._name] = self._file.close()
                self._file = None
        except Exception as error:
            # Every error, such as too little memory, is reported only after the last round: until then the other
            # writers still need this rank's shards.
            if self._file is not None:
                self._file.discard()
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self.result.failure = f"{self._folder / self._name} can't be written: {reason}"

    def _open(self) -> None:
        self._name, planned = next(self._files)
        self._remaining, folder = len(planned), planned[0].item.folder
        specs: dict[str, TensorSpec] = {}
        for entry in planned:
            specs.update(entry.item.outputs)
        path = self._folder / self._name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = TensorFileWriter(path, specs)
        weight_map = self.result.weight_maps.setdefault(folder, {})
        weight_map.update(dict.fromkeys(specs, path.name))
        self.result.sizes_bytes[folder] += sum(spec.nbytes for spec in specs.values())
        self.result.elements[folder] += sum(math.prod(spec.shape) for spec in specs.values())


def write_indices(folder: Path, results: Sequence[WriteResult]) -> None:
    """Write the ``model.safetensors.index.json`` of each of a checkpoint's folders, which maps tensors to files."""
    for subfolder in sorted({name for result in results for name in result.weight_maps}):
        weight_map: dict[str, str] = {}
        for result in results:
            weight_map.update(result.weight_maps.get(subfolder, {}))
        parameters = sum(result.elements[subfolder] for result in results)
        size_bytes = sum(result.sizes_bytes[subfolder] for result in results)
        write_index(folder / subfolder, weight_map, parameters=parameters, size_bytes=size_bytes)
