"""One rank of a mesh without the others, to count what it would allocate.

It runs the same code as a rank of a cluster. Its collectives return at once and leave their results as they are, of the
right shapes and with any values, so this is for tensors without values.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.thread_ranks import Done
from cuboid.distributed.topology import AXES, MeshShape


class _WithoutPeers(dist.ProcessGroup):
    """A process group of which only this rank exists, with the collectives that the layers use."""

    #: Collectives take the path of groups of threads, which aren't registered with torch.distributed either.
    in_threads = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This rank's position in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks that the group would have."""
        return self._size

    def allreduce(self, *_: Any) -> Any:  # type: ignore[override]
        """``dist.all_reduce``."""
        return Done()

    def all_gather_single(self, _: torch.Tensor, __: torch.Tensor, ___: Any = None) -> Any:
        """``dist.all_gather_into_tensor``."""
        return Done()

    def reduce_scatter_single(self, _: torch.Tensor, __: torch.Tensor, ___: Any = None) -> Any:
        """``dist.reduce_scatter_tensor``."""
        return Done()

    # Names of these methods in earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


def lone_rank(shape: MeshShape, rank: int = 0) -> Mesh:
    """A rank's view of its mesh, connected to nothing."""
    mesh = Mesh(shape, rank=rank, world_size=shape.size)
    split = mesh.split_axes(AXES)
    subsets = [axes for count in range(1, len(split) + 1) for axes in combinations(split, count)]
    mesh.connect_threads({frozenset(axes): _WithoutPeers(mesh.index(*axes), mesh.size(*axes)) for axes in subsets})
    return mesh
