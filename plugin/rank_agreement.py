"""The one way in which ranks fail together: over gloo they report how it went, so that all continue or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from cuboid.errors import CheckpointError, CuboidError
from cuboid.mesh import Mesh

T = TypeVar("T")


def gather_objects(item: T, mesh: Mesh) -> list[T]:
    """One object of each rank, by rank."""
    if mesh.host_group is None:
        return [item]
    items: list[Any] = [None] * mesh.topology.world_size
    dist.all_gather_object(items, item, group=mesh.host_group)
    return items


def raise_on_all_ranks(error: Exception | None, mesh: Mesh) -> None:
    """Raise on every rank what failed on any; collective over the world.

    Raises:
        CheckpointError: the first rank's failure.
    """
    failures = gather_objects(None if error is None else f"{error}", mesh)
    first = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
    if first is None:
        return
    alike = failures.count(failures[first]) == len(failures)
    raised = CheckpointError(failures[first])
    if not alike:
        raised.arising_on(first)
    raise raised from error


def run_on_all_ranks(action: Callable[[], T], mesh: Mesh) -> T:
    """Do something on every rank; if it fails on any, raise on all. Collective over the world.

    Raises:
        CheckpointError: the first rank's failure.
    """
    error: Exception | None = None
    try:
        result = action()
    except (CuboidError, OSError) as failure:
        error = failure
    raise_on_all_ranks(error, mesh)
    return result
