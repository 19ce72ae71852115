"""The ranks of a small mesh as threads of one process, which talk through memory: no launcher, no ports, no groups.

What runs on such ranks is the same code that runs on a cluster; only what carries the bytes is another. It is made for
looking at models of a few thousand parameters in a second, not for training.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, MeshShape

T = TypeVar("T")

#: For a rank that hangs where the others don't come. All of them compute in the meantime, on one processor perhaps.
_TIMEOUT_S = 120.0


class _Meeting:
    """Where some ranks lay down what they have, and read what the others have."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=_TIMEOUT_S)
        self.given: list[torch.Tensor] = [torch.empty(0)] * count


class _Done:
    """In place of a ``dist.Work``: a collective that is through when it returns."""

    def wait(self) -> bool:
        return True


class ThreadGroup(dist.ProcessGroup):
    """One rank's view of some threads as a process group, with the collectives that the layers use."""

    in_threads = True

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._meeting, self._rank, self._size = meeting, rank, size

    def rank(self) -> int:
        """Of this thread, among the group's."""
        return self._rank

    def size(self) -> int:
        """How many threads."""
        return self._size

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """``dist.all_reduce``. The order of the sum is that of the ranks, so that all get the same."""
        (own,) = tensors if isinstance(tensors, list | tuple) else (tensors,)
        is_max = opts is not None and opts.reduceOp == dist.ReduceOp.MAX

        def reduce(given: list[torch.Tensor]) -> torch.Tensor:
            stacked = torch.stack(given)
            return stacked.amax(0) if is_max else stacked.sum(0)

        own.copy_(self._meet(own, reduce))
        return _Done()

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, _: Any = None) -> Any:
        """``dist.all_gather_into_tensor``."""
        output.view(-1).copy_(self._meet(own, lambda given: torch.cat([each.reshape(-1) for each in given])))
        return _Done()

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, _: Any = None) -> Any:
        """``dist.reduce_scatter_tensor``, of sums."""

        def reduce(given: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([each.view(self._size, -1)[self._rank] for each in given]).sum(0)

        output.view(-1).copy_(self._meet(own, reduce))
        return _Done()

    # The names of the same in earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _meet(self, own: torch.Tensor, read: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        meeting = self._meeting
        meeting.given[self._rank] = own.detach()
        meeting.barrier.wait()
        found = read(list(meeting.given))
        # Nobody changes what the others may be reading.
        meeting.barrier.wait()
        return found


class ThreadRanks:
    """The ranks of a mesh, each of which is a thread while :meth:`run` runs.

    Args:
        shape: of the mesh.
        pipe: pipeline stages. A thread is one place of the mesh in all of them.

    Attributes:
        meshes: by rank of the world, as each rank sees its own: those of the first stage first.
    """

    def __init__(self, shape: MeshShape, pipe: int = 1) -> None:
        world_size = shape.size * pipe
        self.meshes = [Mesh(shape, pipe=pipe, rank=rank, world_size=world_size) for rank in range(world_size)]
        self._places = self.meshes[: shape.size]
        self._meetings = _connect(self.meshes)

    def run(self, action: Callable[[Mesh], T]) -> list[T]:
        """Do something on every rank of a mesh.

        Args:
            action: is given a rank's connected mesh; with several stages that of the first one.

        Returns:
            What each rank's call returned, by rank.

        Raises:
            Exception: what the first rank raised that failed by itself; the others are let go.
        """
        for meeting in self._meetings:
            meeting.barrier.reset()
        results: list[Any] = [None] * len(self._places)
        failures: list[BaseException] = []

        def run(mesh: Mesh, context: contextvars.Context) -> None:
            try:
                results[mesh.rank] = context.run(action, mesh)
            except BaseException as error:
                if _was_let_go(error):
                    failures.append(error)
                    return
                failures.insert(0, error)
                for meeting in self._meetings:
                    meeting.barrier.abort()

        threads = [
            threading.Thread(
                daemon=True, target=run, args=(mesh, contextvars.copy_context()), name=f"cuboid rank {mesh.rank}"
            )
            for mesh in self._places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results


def _was_let_go(error: BaseException | None) -> bool:
    """Whether somebody else's failure is behind an error.

    Of an error in a collective, torch.distributed makes another one where it knows the world but not this group.
    """
    while error is not None and not isinstance(error, threading.BrokenBarrierError):
        error = error.__cause__ or error.__context__
    return error is not None


def _connect(meshes: list[Mesh]) -> list[_Meeting]:
    split = meshes[0].split_axes(AXES)
    subsets = chain.from_iterable(combinations(split, count) for count in range(1, len(split) + 1))
    groups: list[dict[frozenset[str], dist.ProcessGroup]] = [{} for _ in meshes]
    meetings = []
    for axes in subsets:
        for ranks in meshes[0].topology.groups(axes):
            meeting = _Meeting(len(ranks))
            meetings.append(meeting)
            for index, rank in enumerate(ranks):
                groups[rank][frozenset(axes)] = ThreadGroup(meeting, index, len(ranks))
    for mesh, own in zip(meshes, groups, strict=True):
        mesh.connect_threads(own)
    return meetings
