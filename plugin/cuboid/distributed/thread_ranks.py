"""The ranks of a small mesh as threads of one process that communicate through memory: no launcher, ports or backend.

They run the same code as ranks of a cluster; only the transport differs. This is for examining models of a few thousand
parameters in a second, not for training.

One rank computes at a time, until it waits for others in a collective: threads of Python code can't run at once, and
are several times slower where they take the interpreter from each other at every call.
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

#: Timeout of a collective that some rank never joins. Long, because the others may compute meanwhile, one by one.
_TIMEOUT_S = 120.0


class _Meeting:
    """Slots for each rank's tensor, and a barrier: where the ranks of a group exchange tensors.

    The lock ``turn`` is held by the one rank that computes; a rank releases it while it waits here.
    """

    def __init__(self, count: int, turn: threading.Lock) -> None:
        self.barrier = threading.Barrier(count, timeout=_TIMEOUT_S)
        self._turn = turn
        # Two sets of slots, used alternately: whoever passes the barrier of one exchange knows that all ranks have
        # read the slots of the one before it, which the next exchange overwrites.
        self._slots: tuple[list[Any], list[Any]] = ([None] * count, [None] * count)
        self._exchanges = [0] * count

    def reset(self) -> None:
        """Forget a run that may have failed."""
        self.barrier.reset()
        self._exchanges = [0] * len(self._exchanges)

    def exchange(self, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Copies of all ranks' tensors, by rank."""
        slots = self._slots[self._exchanges[rank] % 2]
        self._exchanges[rank] += 1
        # A copy: the caller may change its tensor while other ranks still read.
        slots[rank] = x.detach().clone()
        self._turn.release()
        try:
            self.barrier.wait()
        finally:
            self._turn.acquire()
        return list(slots)


class Done:
    """A ``dist.Work`` of a collective that is complete when it returns."""

    def wait(self) -> bool:
        return True


class ThreadGroup(dist.ProcessGroup):
    """One rank's view of some threads as a process group, with the collectives that the layers use."""

    in_threads = True

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._meeting, self._rank, self._size = meeting, rank, size

    def rank(self) -> int:
        """Rank of this thread in the group."""
        return self._rank

    def size(self) -> int:
        """Number of threads in the group."""
        return self._size

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """``dist.all_reduce``, of sums and maxima. It adds in rank order, so that all ranks get bitwise the same."""
        (x,) = tensors if isinstance(tensors, list | tuple) else (tensors,)
        is_max = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
        stacked = torch.stack(self._exchange(x))
        x.copy_(stacked.amax(0) if is_max else stacked.sum(0))
        return Done()

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, _: Any = None) -> Any:
        """``dist.all_gather_into_tensor``."""
        torch.cat([copy.reshape(-1) for copy in self._exchange(x)], out=output.view(-1))
        return Done()

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, _: Any = None) -> Any:
        """``dist.reduce_scatter_tensor``, of sums."""
        shards = [copy.view(self._size, -1)[self._rank] for copy in self._exchange(x)]
        output.view(-1).copy_(torch.stack(shards).sum(0))
        return Done()

    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, _: Any, in_splits: list[int], __: Any = None
    ) -> Any:
        """``dist.all_to_all_single``, with slices of any sizes."""
        slices = [
            copy.split(splits.tolist())[self._rank]
            for copy, splits in zip(self._exchange(x), self._exchange(torch.tensor(in_splits)), strict=True)
        ]
        torch.cat(slices, out=output)
        return Done()

    # Names of these methods in earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._meeting.exchange(x, self._rank)


class ThreadRanks:
    """The ranks of a mesh, each of which is a thread during :meth:`run`.

    Args:
        shape: of the mesh.
        pipe: number of pipeline stages. A thread runs one position of the mesh in all of them.

    Attributes:
        meshes: each rank's view of its mesh, by world rank: those of the first stage come first.
    """

    def __init__(self, shape: MeshShape, pipe: int = 1) -> None:
        world_size = shape.size * pipe
        self.meshes = [Mesh(shape, pipe=pipe, rank=rank, world_size=world_size) for rank in range(world_size)]
        self._places = self.meshes[: shape.size]
        self._turn = threading.Lock()
        self._meetings = _connect(self.meshes, self._turn)

    def run(self, action: Callable[[Mesh], T]) -> list[T]:
        """Run an action on every rank of a mesh.

        Args:
            action: called with a rank's connected mesh; with several stages, that of the first one.

        Returns:
            What each rank's call returned, by rank.

        Raises:
            Exception: the error of the first rank that failed by itself; ranks that wait for it are released.
        """
        for meeting in self._meetings:
            meeting.reset()
        results: list[Any] = [None] * len(self._places)
        failures: list[BaseException] = []
        let_go: list[BaseException] = []

        def run(mesh: Mesh, context: contextvars.Context) -> None:
            try:
                with self._turn:
                    results[mesh.rank] = context.run(action, mesh)
            except BaseException as error:
                if _was_let_go(error):
                    let_go.append(error)
                    return
                failures.append(error)
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
        # Without any of the former, a barrier's timeout broke it: a rank never joined a collective.
        errors = failures or let_go
        if errors:
            raise errors[0]
        return results


def _was_let_go(error: BaseException | None) -> bool:
    """Whether another rank's failure caused an error: it broke the barrier.

    torch.distributed may replace an error in a collective by another one, because it doesn't know this group.
    """
    while error is not None and not isinstance(error, threading.BrokenBarrierError):
        error = error.__cause__ or error.__context__
    return error is not None


def _connect(meshes: list[Mesh], turn: threading.Lock) -> list[_Meeting]:
    split = meshes[0].split_axes(AXES)
    subsets = chain.from_iterable(combinations(split, count) for count in range(1, len(split) + 1))
    groups: list[dict[frozenset[str], dist.ProcessGroup]] = [{} for _ in meshes]
    meetings = []
    for axes in subsets:
        for ranks in meshes[0].topology.groups(axes):
            meeting = _Meeting(len(ranks), turn)
            meetings.append(meeting)
            for index, rank in enumerate(ranks):
                groups[rank][frozenset(axes)] = ThreadGroup(meeting, index, len(ranks))
    for mesh, rank_groups in zip(meshes, groups, strict=True):
        mesh.connect_threads(rank_groups)
    return meetings
