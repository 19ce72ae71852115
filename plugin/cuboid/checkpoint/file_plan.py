"""Which rank writes which tensors, in which order, and into which files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.exchange import Task
from cuboid.checkpoint.format.weight_index import SINGLE
from cuboid.checkpoint.save_planner import Holdings, assign
from cuboid.checkpoint.shards import Family
from cuboid.distributed.mesh import Mesh


@dataclass(frozen=True)
class FilePlan:
    """One file of one rank: its folder and the tasks whose tensors it holds."""

    folder: str
    tasks: tuple[Task, ...]


def plan_tasks(families: Sequence[Family], mesh: Mesh) -> list[Task]:
    """The tasks of all ranks of a stage; the same list on all of them.

    Each writer's tasks are in the order of its files: family by family, and within one by descending width of the
    dtype, because the file writer aligns tensors by writing wide dtypes first.
    """
    bundles = [(family.folder, bundle) for family in families for bundle in family.bundles]
    writers = sorted(rank for ranks in mesh.stage_ranks for rank in ranks)
    chosen = assign([bundle.nbytes for _, bundle in bundles], writers)
    tasks, item = [], 0
    for (folder, bundle), writer in zip(bundles, chosen, strict=True):
        tasks.append(Task(folder, bundle, writer, item))
        item += len(bundle.tensors)
    order = {family.folder: place for place, family in enumerate(families)}

    def key(task: Task) -> tuple[int, int]:
        widest = max(spec.dtype.itemsize for spec in task.bundle.outputs.values())
        return order[task.folder], -widest

    return sorted(tasks, key=key)


def gather_holdings(families: Sequence[Family], mesh: Mesh) -> Holdings:
    """Which rank has which elements of the families' tensors. Collective over the stage."""
    tensors = [tensor for family in families for bundle in family.bundles for tensor in bundle.tensors]
    own = {item: (x.run.start, x.run.stop) for item, x in enumerate(tensors) if x.run is not None}
    if mesh.stage_host_group is None:
        return {mesh.rank: own}
    everyone: list[Any] = [None] * dist.get_world_size(mesh.stage_host_group)
    dist.all_gather_object(everyone, own, group=mesh.stage_host_group)
    return dict(zip(dist.get_process_group_ranks(mesh.stage_host_group), everyone, strict=True))


def cut_files(tasks: Sequence[Task], max_bytes: int) -> list[FilePlan]:
    """Split one rank's tasks, in order, into files of at most ``max_bytes``, unless a single bundle is larger."""
    files = []
    for folder, own in groupby(tasks, key=lambda task: task.folder):
        chunk: list[Task] = []
        size = 0
        for task in own:
            if chunk and size + task.bundle.nbytes > max_bytes:
                files.append(FilePlan(folder, tuple(chunk)))
                chunk, size = [], 0
            chunk.append(task)
            size += task.bundle.nbytes
        files.append(FilePlan(folder, tuple(chunk)))
    return files


def name_files(folders: Sequence[Sequence[str]], rank: int) -> list[str]:
    """Paths of a rank's files, numbered across all ranks.

    Args:
        folders: for each rank, the folder of each of its files.
        rank: the rank whose files to name.
    """
    totals = Counter(folder for own in folders for folder in own)
    numbers = Counter(folder for own in folders[:rank] for folder in own)
    names = []
    for folder in folders[rank]:
        numbers[folder] += 1
        total = totals[folder]
        name = SINGLE if total == 1 else f"model-{numbers[folder]:05d}-of-{total:05d}.safetensors"
        names.append(f"{folder}/{name}" if folder else name)
    return names
