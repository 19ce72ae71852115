"""Assemble full tensors from per-rank files, with one block of rows in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.manifest import content_fault, size_fault
from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.convert.formats.block_tensors import BlockTensors, row_ranges
from cuboid.distributed.topology import Coordinate
from cuboid.errors import CheckpointError
from cuboid.tensor3d.sharding.sharding_spec import shard_boxes
from cuboid.weights.rank_folder import SHARDS, RankFolder, RankTensor, file_name, shard_spec

#: Maximum number of open files. The common limit of a process is 1024.
_MOST_FILES = 256
#: Opens a progress bar for a number of bytes and yields the function that advances it.
ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], Any]]]


def open_rank_files(folder: Path, stack: ExitStack, checking: ProgressBar) -> BlockTensors:
    """The full tensors of a folder of per-rank files, all of which are first compared with their checksums.

    ``stack`` closes the files on exit; ``checking`` opens a progress bar for the comparison.

    Raises:
        CheckpointError: names a file that is missing, foreign, truncated or altered.
    """
    document = RankFolder.read(folder)
    with checking(document.nbytes) as advance:
        for fault in rank_file_faults(folder, document, advance):
            raise CheckpointError(fault)
    files = _RankFiles(folder, document)
    stack.callback(files.close)
    return BlockTensors({name: tensor.spec for name, tensor in document.tensors.items()}, files.blocks)


def rank_file_faults(folder: Path, document: RankFolder, advance: Callable[[int], Any] | None) -> Iterator[str]:
    """A message for each fault of a folder's files, whose ``shards.json`` is ``document``.

    ``advance`` is called with each file's size after it was read; with None, only sizes are checked.
    """
    expected_names = {file_name(document.topology, place) for place in range(document.topology.world_size)}
    present = {path.name for path in folder.glob("rank-*.safetensors")}
    for name in sorted(expected_names ^ document.files.keys()):
        yield f"{folder / SHARDS}: its layout and its list of files contradict each other about {name}"
    for name in sorted(present - expected_names):
        yield f"{folder / name}: is foreign: {SHARDS} doesn't name it"
    for name, record in sorted({**document.files, **document.beside}.items()):
        path = folder / name
        fault = size_fault(path, record)
        if fault is not None:
            yield fault
        elif advance is not None:
            fault = content_fault(path, record, SHARDS)
            if fault is not None:
                yield fault
            advance(record.bytes)


class _RankFiles:
    """Assembles full rows from the files of a stage's ranks."""

    def __init__(self, folder: Path, document: RankFolder) -> None:
        self._folder, self._document, self._mesh = folder, document, document.mesh.shape
        places = document.topology
        self._places = [places.coordinate(place) for place in range(places.world_size)]
        self._open: dict[str, TensorFile] = {}

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The rows of a full tensor, in consecutive blocks."""
        tensor = self._document.tensors[name]
        ranks = [at for at in self._places if at.pipe == tensor.stages[0]]
        sharding = tensor.sharding
        for rows in row_ranges(tensor.spec):
            if sharding is None:
                yield self._file(name, tensor, ranks[0]).read(name, [rows])
                continue
            block = torch.empty((rows.stop - rows.start, *tensor.shape[1:]), dtype=tensor.spec.dtype)
            for at in ranks:
                file = self._file(name, tensor, at)
                # Each pair is a box of the rank's shard and the same box in the full tensor; both are clipped to the
                # rows of this block.
                for (shard_rows, *shard_dims), (full_rows, *full_dims) in shard_boxes(sharding, self._mesh, at):
                    low, high = max(full_rows.start, rows.start), min(full_rows.stop, rows.stop)
                    if low < high:
                        start = shard_rows.start + low - full_rows.start
                        rows_of_rank = file.read(name, [slice(start, start + high - low), *shard_dims])
                        block[(slice(low - rows.start, high - rows.start), *full_dims)] = rows_of_rank
            yield block

    def _file(self, name: str, tensor: RankTensor, at: Coordinate) -> TensorFile:
        file = self._document.file_of(at)
        if file not in self._open:
            if len(self._open) == _MOST_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[file] = TensorFile(self._folder / file)
        spec, expected_spec = self._open[file].specs.get(name), shard_spec(tensor, self._mesh, at)
        if spec != expected_spec:
            raise CheckpointError(f"{self._folder / file}: has {name} as {spec}, but {SHARDS} says {expected_spec}")
        return self._open[file]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
