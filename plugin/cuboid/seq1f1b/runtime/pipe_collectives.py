"""The collectives of a head that is spread over the ranks of a pipeline: what each rank's share needs of the others.

Programs place those of units so that all ranks join them in the same order, after all that they need has been started;
see :func:`cuboid.seq1f1b.schedule.lowering.insert_messages_once_sent`. Rows of the head's weight are scattered before
all of these, and their gradients gathered behind them. None blocks the host.

What guarantees the order in which tensors are written and read:

* Each collective has tensors of its own, a fresh buffer wherever it writes: the results of two units never share one.
* A backend reads and writes these behind all work that the rank's stream had when it joined. So a buffer that the
  allocator takes over from an earlier kernel isn't written before that kernel is over.
* Who uses a result waits for it (:meth:`Joined.wait`), the root of a broadcast or a reduction like the others.
* Given tensors are referred to until :meth:`Joined.wait` has returned for their collective, in whatever order units ask
  for results, and nobody writes into them: that would be a race with the other ranks' reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cuboid.errors import PeerLostError


class Joined:
    """The result of a collective that is under way; it keeps what this rank gave to it."""

    def __init__(self, contribution: Sequence[torch.Tensor], result: torch.Tensor, work: dist.Work) -> None:
        self._contribution, self._result = contribution, result
        self._work = work

    def is_complete(self) -> bool:
        """Whether it is over, so that :meth:`wait` returns at once."""
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for the result. On CUDA only the current stream waits, not the host.

        Raises:
            PeerLostError: the connection to another rank is lost.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a rank of the pipeline went away during a collective of the head: {error}") from error
        return self._result


class PipeCollectives:
    """Collectives over the ranks of a pipeline.

    Args:
        group: the ranks, in the order of the pipeline.
        root: world rank of the last stage.
        count: called with the number of bytes that this rank sends, as optimal algorithms do.
    """

    def __init__(self, group: dist.ProcessGroup, root: int, count: Callable[[int], None]) -> None:
        self._group, self._root = group, root
        self._count = count
        self._ranks = dist.get_world_size(group)
        self._under_way: deque[Joined] = deque()

    def broadcast(self, hidden: torch.Tensor) -> Joined:
        """From the root, whose tensor must not be modified until all is drained, into the others' buffers."""
        # The root's own share of the head reads the tensor while it is sent; its chunks are slices that it detaches.
        hidden = hidden.contiguous()
        self._count(hidden.nbytes * (self._ranks - 1) // self._ranks)
        return self._started([hidden], hidden, dist.broadcast(hidden, self._root, group=self._group, async_op=True))

    def all_gather(self, part: torch.Tensor) -> Joined:
        """``[P, …]``: all ranks' tensors, in the order of the pipeline."""
        self._count(part.nbytes * (self._ranks - 1))
        gathered = part.new_empty((self._ranks * part.shape[0], *part.shape[1:]))
        work = dist.all_gather_into_tensor(gathered, part, group=self._group, async_op=True)
        return self._started([part], gathered.view(-1, *part.shape), work)

    def reduce(self, part: torch.Tensor) -> Joined:
        """The sum of all ranks' tensors, on the root only, in the tensor that it gave."""
        self._count(part.nbytes * (self._ranks - 1) // self._ranks)
        # The others' tensors may be overwritten with partial sums: they aren't used again.
        return self._started([part], part, dist.reduce(part, self._root, group=self._group, async_op=True))

    def scatter(self, parts: Sequence[torch.Tensor], part: torch.Tensor) -> Joined:
        """From the root, one of its ``parts`` for each rank, in the order of the pipeline, into ``part``."""
        self._count(sum(sent.nbytes for sent in parts[1:]))
        work = dist.scatter(part, list(parts) or None, self._root, group=self._group, async_op=True)
        return self._started(parts, part, work)

    def gather(self, part: torch.Tensor) -> Joined:
        """``[P, …]`` on the root: all ranks' tensors, in the order of the pipeline; elsewhere the given one."""
        is_root = dist.get_rank() == self._root
        self._count(0 if is_root else part.nbytes)
        gathered = part.new_empty((self._ranks, *part.shape)) if is_root else part
        work = dist.gather(part, list(gathered) if is_root else None, self._root, group=self._group, async_op=True)
        return self._started([part], gathered, work)

    def drain(self) -> None:
        """Wait for everything that is under way; on CUDA, only the current stream waits.

        Raises:
            PeerLostError: the connection to another rank is lost.
        """
        while self._under_way:
            self._under_way.popleft().wait()

    def _started(self, contribution: Sequence[torch.Tensor], result: torch.Tensor, work: dist.Work | None) -> Joined:
        assert work is not None
        joined = Joined(contribution, result, work)
        # Free the tensors of those that are complete: they are, in the order of their start. One that isn't keeps those
        # behind it, so that none is freed, and its memory taken for the next buffer, while a backend reads it.
        while self._under_way and self._under_way[0].is_complete():
            self._under_way.popleft().wait()
        self._under_way.append(joined)
        return joined
