"""What travels between two stages: a queue for each direction, in both of which order is all there is to agree on.

Shapes are known beforehand on both sides, so nothing but the tensors themselves is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from cuboid.errors import PeerLostError


class Arrival:
    """A tensor on its way here."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work, peer: int) -> None:
        self._buffer = buffer
        self._work = work
        self._peer = peer

    def wait(self) -> torch.Tensor:
        """The tensor, once it is complete (under CUDA: for whatever is put on the current stream from now on).

        Raises:
            PeerLostError: the sender went away.
        """
        _wait(self._work, self._peer)
        return self._buffer


class Channel:
    """One direction between this rank and one other: what is sent first is received first.

    Args:
        group: process group of the two ranks, of this direction alone. Under NCCL it has a stream of its own, so that
            neither computation nor the other direction waits for it.
        peer: world rank at the other end.
        count: called with the bytes of each tensor that is sent.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, count: Callable[[int], None]) -> None:
        self._group = group
        self._peer = peer
        self._count = count
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arrival:
        """Offer a buffer for the next tensor, without waiting for it."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, self._peer, group=self._group)
        assert work is not None
        return Arrival(buffer, work, self._peer)

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending; the tensor is kept until it is gone, and must not be written to."""
        while self._sending and self._sending[0][0].is_completed():
            self._finish_first()
        tensor = tensor.contiguous()
        self._count(tensor.nbytes)
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None
        self._sending.append((work, tensor))

    def meet(self, device: torch.device, *, sends: bool) -> None:
        """Exchange a byte, so that whatever the backend sets up at the first message is there.

        NCCL does so with the host waiting for the peer: a receive that is posted early would keep the peer waiting for
        something else of this rank. Both ends must call, and all ranks go through their channels in one order.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        if sends:
            dist.send(byte, self._peer, group=self._group)
        else:
            dist.recv(byte, self._peer, group=self._group)

    def drain(self) -> None:
        """Wait until everything is sent.

        Raises:
            PeerLostError: the receiver went away.
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
