"""Plan a save over all ranks of a stage: who writes each item, into which file, and who sends which elements.

After :func:`gather_ranges`, pure functions of what all ranks of a stage know: every rank computes the same plan without
communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.format.weight_index import SINGLE
from cuboid.checkpoint.save_plan import WriteItem
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError

#: ``ranges[rank][tensor index]`` is the range [start, stop) of the tensor's flattened shard that the rank has. Tensors
#: are counted through all items.
RangesByRank = Mapping[int, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True)
class PlannedItem:
    """An item, the rank that writes it, and the index of its first tensor in :data:`RangesByRank`."""

    item: WriteItem
    writer: int
    first_tensor: int


@dataclass(frozen=True)
class SourceRange:
    """A range of a shard that one rank sends.

    Attributes:
        source: the rank that sends it.
        cell: index of the shard: the position in the mesh of the ranks that have it, one in each replica.
        start: index of the first element in the flattened shard.
        stop: index after the last element.
    """

    source: int
    cell: int
    start: int
    stop: int


def plan_items(items: Sequence[WriteItem], mesh: Mesh) -> list[PlannedItem]:
    """Assign a stage's items to its ranks; the same list on all of them.

    Each writer's items are in the order of its files: folder by folder, and within one by descending width of the
    dtype, because the file writer aligns tensors by writing wide dtypes first.
    """
    writers = assign([item.nbytes for item in items], sorted(rank for ranks in mesh.stage_ranks for rank in ranks))
    planned, first_tensor = [], 0
    for item, writer in zip(items, writers, strict=True):
        planned.append(PlannedItem(item, writer, first_tensor))
        first_tensor += len(item.tensors)
    order = {folder: index for index, folder in enumerate(dict.fromkeys(item.folder for item in items))}

    def key(entry: PlannedItem) -> tuple[int, int]:
        widest = max(spec.dtype.itemsize for spec in entry.item.outputs.values())
        return order[entry.item.folder], -widest

    return sorted(planned, key=key)


def assign(sizes_bytes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Balance items over ranks: in descending size, each goes to the rank with the least bytes so far.

    Returns:
        The rank of each item.
    """
    load = dict.fromkeys(ranks, 0)
    assigned = [ranks[0]] * len(sizes_bytes)
    for item in sorted(range(len(sizes_bytes)), key=lambda item: (-sizes_bytes[item], item)):
        # ``min`` takes the first of equal loads, so that all ranks choose the same.
        assigned[item] = min(load, key=lambda rank: load[rank])
        load[assigned[item]] += sizes_bytes[item]
    return assigned


def gather_ranges(items: Sequence[WriteItem], mesh: Mesh) -> RangesByRank:
    """Which rank has which elements of the items' tensors. Collective over the stage."""
    tensors = [tensor for item in items for tensor in item.tensors]
    local = {index: (x.local.start, x.local.stop) for index, x in enumerate(tensors) if x.local is not None}
    if mesh.stage_host_group is None:
        return {mesh.rank: local}
    gathered: list[Any] = [None] * dist.get_world_size(mesh.stage_host_group)
    dist.all_gather_object(gathered, local, group=mesh.stage_host_group)
    return dict(zip(dist.get_process_group_ranks(mesh.stage_host_group), gathered, strict=True))


def find_sources(
    name: str, tensor_index: int, numel: int, cells: Sequence[Sequence[int]], ranges: RangesByRank, writer: int
) -> list[SourceRange]:
    """The ranges that cover every shard of a tensor exactly once, and the ranks that send them.

    A shard that some rank has in full comes from one rank: the writer if possible, else the rank of the writer's
    replica, else the first one.

    Args:
        name: the tensor's name, for messages.
        tensor_index: its index in ``ranges``.
        numel: elements of a shard.
        cells: for each shard, the ranks that have it, by replica.
        ranges: what each rank in ``cells`` has.
        writer: the rank that assembles the tensor.

    Raises:
        CheckpointError: there are elements that no rank has.
    """
    replica = next((ranks.index(writer) for ranks in cells if writer in ranks), 0)
    sources: list[SourceRange] = []
    for cell, ranks in enumerate(cells):
        held = {rank: ranges[rank][tensor_index] for rank in ranks if tensor_index in ranges[rank]}
        full = [rank for rank in ranks if held.get(rank) == (0, numel)]
        if full:
            near = [rank for rank in (writer, ranks[replica]) if rank in full]
            sources.append(SourceRange((near or full)[0], cell, 0, numel))
            continue
        # ZeRO-1: each replica has a range. The empty one after the last makes the check for gaps cover the end.
        end = 0
        for rank, (start, stop) in [*sorted(held.items(), key=lambda entry: entry[1]), (-1, (numel, numel))]:
            if start > end:
                raise CheckpointError(f"no rank holds elements {end} to {start} of shard {cell} of {name}")
            if stop > end:
                sources.append(SourceRange(rank, cell, end, stop))
                end = stop
    return sources


def split_files(planned: Sequence[PlannedItem], max_bytes: int) -> list[list[PlannedItem]]:
    """Split one rank's items, in order, into files of at most ``max_bytes``, unless a single item is larger.

    A file has items of one folder only, and at least one.
    """
    files = []
    for _, in_folder in groupby(planned, key=lambda entry: entry.item.folder):
        file: list[PlannedItem] = []
        size = 0
        for entry in in_folder:
            if file and size + entry.item.nbytes > max_bytes:
                files.append(file)
                file, size = [], 0
            file.append(entry)
            size += entry.item.nbytes
        files.append(file)
    return files


def name_files(folders: Sequence[Sequence[str]], rank: int) -> list[str]:
    """Paths of a rank's files, numbered across all ranks.

    Args:
        folders: for each rank, the folder of each of its files.
        rank: the rank whose files to name.
    """
    totals = Counter(folder for of_rank in folders for folder in of_rank)
    numbers = Counter(folder for of_rank in folders[:rank] for folder in of_rank)
    names = []
    for folder in folders[rank]:
        numbers[folder] += 1
        total = totals[folder]
        name = SINGLE if total == 1 else f"model-{numbers[folder]:05d}-of-{total:05d}.safetensors"
        names.append(f"{folder}/{name}" if folder else name)
    return names
