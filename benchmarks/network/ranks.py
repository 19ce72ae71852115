"""Ranks forked from this process, which has imported everything, each at its place in a network.

Sixty-four processes that import PyTorch and transformers by themselves take minutes and tens of gigabytes; forked ones
take seconds and share what was imported and built before.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cuboid.errors import CuboidError
from cuboid.verify.workers.pool import collect_replies
from network.networks import Loopback
from network.serving import Reply, serve

_HOST = "127.0.0.1"
#: Of a process group, to run its collectives; as gloo has by default.
_THREADS = 2
#: How long to wait for a process whose connection has closed.
_GRACE_S = 0.5
_PR_SET_PDEATHSIG = 1
#: For one call that the slowest contestant may take.
TIMEOUT_S = 900.0


class RankError(CuboidError):
    """A rank raised, died or ran out of time."""


class Member(NamedTuple):
    """A rank as its parent sees it: its process, and the connection for calls and replies."""

    process: psutil.Process
    connection: Connection


class Ranks:
    """The ranks of one ``torch.distributed`` world, each with an object whose methods it is told to call."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    def call(self, method: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What a method of every rank's object returns, by rank; a RankError tells of the rank that failed first."""
        for member in self.members:
            # One that has died is told of by its silence.
            with contextlib.suppress(BrokenPipeError):
                member.connection.send((method, arguments))
        return self.collect(method, timeout_s)

    def collect(self, what: str, timeout_s: float) -> list[Any]:
        replies = collect_replies(self.members, timeout_s, _receive, lambda reply: reply.failure is not None)
        failed = {rank: reply for rank, reply in replies.items() if reply.failure is not None}
        if failed:
            # A death has no time: whatever the others ran into came of it.
            rank = min(failed, key=lambda rank: failed[rank].at_s)
            raise RankError(f"rank {rank} of {len(self.members)} failed in {what}:\n{failed[rank].failure}")
        silent = [rank for rank in range(len(self.members)) if rank not in replies]
        if silent:
            listed = ", ".join(map(str, silent))
            raise RankError(f"{what}: no answer from rank {listed} of {len(self.members)} within {timeout_s:g} s")
        return [replies[rank].result for rank in range(len(self.members))]

    def close(self) -> None:
        """End every rank, by force: what they hold is of no use to anybody."""
        for member in self.members:
            member.connection.close()
            with contextlib.suppress(psutil.NoSuchProcess):
                member.process.kill()
        for member in self.members:
            member.process.wait()


def _receive(member: Member) -> Reply:
    try:
        return member.connection.recv()
    except (EOFError, ConnectionResetError):
        with contextlib.suppress(psutil.TimeoutExpired):
            return Reply(failure=f"the process ended with exit code {member.process.wait(_GRACE_S)}")
        return Reply(failure="the process hung up")


@contextlib.contextmanager
def forked_ranks(network: Loopback, build: Callable[[int], Any], *, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Ranks for the time of a ``with`` block, one at each place of the network; each keeps what ``build`` gives it.

    Fork while this process has no thread that may hold a lock, and don't multiply on several threads before.
    """
    # The collector would write to pages that all share.
    gc.collect()
    gc.freeze()
    members: list[Member] = []
    ranks = Ranks(members)
    try:
        # Where rank 0 will have the store at which all meet. Had this process the store, it had a thread, and a process
        # with threads can't be forked safely.
        with socket.create_server((_HOST, 0), backlog=network.ranks) as listener:
            for rank in range(network.ranks):
                members.append(_fork(rank, network, listener, build, timeout_s))
        ranks.collect("its start", timeout_s)
        yield ranks
    finally:
        ranks.close()
        gc.unfreeze()


def _fork(
    rank: int, network: Loopback, listener: socket.socket, build: Callable[[int], Any], timeout_s: float
) -> Member:
    def start() -> Any:
        _join(rank, network, listener, timeout_s)
        return build(rank)

    ours, theirs = multiprocessing.Pipe()
    # Or the rank would print it once more.
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            # A rank ends when its parent does or wants it to; Ctrl-C, which reaches both, must not end it first.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            serve(start, theirs)
        finally:
            # Nothing that was inherited is this process's to tidy up.
            os._exit(0)
    theirs.close()
    return Member(psutil.Process(pid), ours)


def _join(rank: int, network: Loopback, listener: socket.socket, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    # The ranks don't meet over the network that is measured: a socket stays where it was made.
    store = dist.TCPStore(
        _HOST,
        listener.getsockname()[1],
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    listener.close()
    network.enter(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(network.ranks), LOCAL_RANK=str(rank))
    _share_one_device(network.interface)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.ranks, timeout=timeout)


def _share_one_device(interface: str) -> None:
    """Let all gloo process groups that this process makes from now on use one device, bound to an interface.

    Every gloo group has a thread of its own that looks for messages a hundred times a second. A rank on a mesh has ten
    groups and more; where 64 ranks share two cores, that took three quarters of both. PyTorch takes no options for
    gloo, so its class is replaced, in the rig's own processes alone.
    """
    # Connecting lazily, gloo knows peers by their rank alone, so that groups would take one another's connections.
    device = dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)

    class SharedDeviceGloo(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, _THREADS
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
