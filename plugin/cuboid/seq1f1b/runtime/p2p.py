"""P2p messages between two stages: one ordered channel for each direction.

Both ends know the shapes and the order of messages in advance, so only the tensors themselves are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from cuboid.errors import PeerLostError


class Arrival:
    """A tensor that is being received."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work, peer: int) -> None:
        self._buffer = buffer
        self._work = work
        self._peer = peer

    def wait(self) -> torch.Tensor:
        """Wait for the tensor. On CUDA only the current stream waits, not the host.

        Raises:
            PeerLostError: the connection to the sender is lost.
        """
        _wait(self._work, self._peer)
        return self._buffer


class Channel:
    """One direction between this rank and one other: what is sent first is received first.

    Args:
        group: process group of the two ranks, used for this direction only. With NCCL it has a stream of its own, so
            that neither computation nor the other direction waits for it.
        peer: world rank at the other end.
        count: called with the size in bytes of each tensor that is sent.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, count: Callable[[int], None]) -> None:
        self._group = group
        self._peer = peer
        self._count = count
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arrival:
        """Allocate a buffer for the channel's next tensor and start to receive it."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, self._peer, group=self._group)
        assert work is not None
        return Arrival(buffer, work, self._peer)

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending. The channel keeps the tensor until it is sent; it must not be modified until then."""
        # Free the tensors of sends that have completed.
        while self._sending and self._sending[0][0].is_completed():
            self._finish_first()
        tensor = tensor.contiguous()
        self._count(tensor.nbytes)
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None
        self._sending.append((work, tensor))

    def meet(self, device: torch.device, *, sends: bool) -> None:
        """Exchange a byte, so that the backend sets up the connection before the first message.

        NCCL's set-up blocks the host until the peer joins. If that happened in a receive that is posted early, the peer
        could be waiting for another message from this rank: a deadlock. Both ends must call this, and all ranks must go
        through their channels in the same order.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        if sends:
            dist.send(byte, self._peer, group=self._group)
        else:
            dist.recv(byte, self._peer, group=self._group)

    def drain(self) -> None:
        """Wait until everything is sent; on CUDA, only the current stream waits.

        Raises:
            PeerLostError: the connection to the receiver is lost.
        """
        while self._sending:
            self._finish_first()

    def _finish_first(self) -> None:
        work, _ = self._sending.popleft()
        _wait(work, self._peer)


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLostError(f"rank {peer} of the pipeline went away: {error}").arising_on(peer) from error
