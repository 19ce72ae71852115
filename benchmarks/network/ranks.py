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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist

from cuboid.errors import CuboidError
from cuboid.verify.workers.pool import collect_replies
from network.device import share_one_device
from network.interrupts import undisturbed
from network.networks import Network
from network.serving import Reply, serve

_HOST = "127.0.0.1"
#: How long to wait for a process whose connection has closed.
_GRACE_S = 0.5
_PR_SET_PDEATHSIG = 1
#: For one call that the slowest contestant may take.
TIMEOUT_S = 900.0


class RankError(CuboidError):
    """A rank raised, died or ran out of time."""


class Process(Protocol):
    """What is needed of a rank's process."""

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Member:
    """A rank as its parent sees it.

    Args:
        process: which :meth:`Ranks.close` ends.
        connection: for calls and replies.
        wait: for the end of the process, at most so many seconds; gives its exit code, if there is one.
    """

    process: Process
    connection: Connection
    wait: Callable[[float | None], int | None]


class Ranks:
    """The ranks of one ``torch.distributed`` world, each with an object that it keeps and whose methods it is told to
    call. Made by :func:`forked_ranks`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def call(self, method: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Have every rank call a method of its object.

        Args:
            method: its name.
            arguments: the same for every rank.
            timeout_s: for the slowest of them.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: with the traceback of the rank that failed first. The ranks can't be used any more.
        """
        for member in self._members:
            # One that has died is told of by its silence.
            with contextlib.suppress(BrokenPipeError):
                member.connection.send((method, arguments))
        return self.collect(method, timeout_s)

    def collect(self, what: str, timeout_s: float) -> list[Any]:
        """What each rank answers; as :meth:`call`."""
        replies = collect_replies(self._members, timeout_s, _receive, lambda reply: reply.failure is not None)
        failed = {rank: reply for rank, reply in replies.items() if reply.failure is not None}
        if failed:
            # A death has no time: whatever the others ran into came of it.
            rank = min(failed, key=lambda rank: failed[rank].at_s)
            raise RankError(f"rank {rank} of {len(self._members)} failed in {what}:\n{failed[rank].failure}")
        silent = [rank for rank in range(len(self._members)) if rank not in replies]
        if silent:
            listed = ", ".join(map(str, silent[:8])) + (", …" if len(silent) > 8 else "")
            raise RankError(f"{what}: no answer from rank {listed} of {len(self._members)} within {timeout_s:g} s")
        return [replies[rank].result for rank in range(len(self._members))]

    def close(self) -> None:
        """End every rank, by force: what they hold is of no use to anybody."""
        for member in self._members:
            member.connection.close()
            member.process.kill()
        for member in self._members:
            member.wait(None)


def _receive(member: Member) -> Reply:
    try:
        return member.connection.recv()
    except (EOFError, ConnectionResetError):
        return Reply(failure=f"the process ended with exit code {member.wait(_GRACE_S)}")


@contextlib.contextmanager
def forked_ranks(network: Network, build: Callable[[int], Any], *, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Ranks for the time of a ``with`` block, one at each place of the network.

    Fork while this process has no thread that may hold a lock, and don't multiply on several threads before.

    Args:
        network: where they are.
        build: called with the rank, in the rank, once the process group exists; gives the object that it keeps.
        timeout_s: for all of them to start, and for each of their collectives later.

    Raises:
        RankError: one of them couldn't start.
    """
    # The collector would write to pages that all share.
    gc.collect()
    gc.freeze()
    members: list[Member] = []
    try:
        # Where rank 0 will have the store at which all meet. Had this process the store, it had a thread, and a process
        # with threads can't be forked safely.
        with socket.create_server((_HOST, 0), backlog=network.ranks) as listener:
            for rank in range(network.ranks):
                members.append(_fork(rank, network, listener, build, timeout_s))
        ranks = Ranks(members)
        ranks.collect("its start", timeout_s)
        yield ranks
    finally:
        with undisturbed():
            Ranks(members).close()
        gc.unfreeze()


def _fork(
    rank: int, network: Network, listener: socket.socket, build: Callable[[int], Any], timeout_s: float
) -> Member:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    arguments = (rank, network, listener, build, theirs, timeout_s)
    process = context.Process(target=_live, args=arguments, daemon=True)
    # Or a signal could find a process that isn't known yet.
    with undisturbed():
        process.start()
    theirs.close()

    def wait(seconds: float | None) -> int | None:
        process.join(seconds)
        return process.exitcode

    return Member(process, ours, wait)


def _live(
    rank: int,
    network: Network,
    listener: socket.socket,
    build: Callable[[int], Any],
    connection: Connection,
    timeout_s: float,
) -> None:
    def start() -> Any:
        _leave_signals_to_the_parent()
        _join(rank, network, listener, timeout_s)
        return build(rank)

    try:
        serve(start, connection)
    finally:
        # Nothing that was inherited is this process's to tidy up.
        os._exit(0)


def _leave_signals_to_the_parent() -> None:
    """A rank ends when its parent does or wants it to; Ctrl-C, which reaches both, must not end it first."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def _join(rank: int, network: Network, listener: socket.socket, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    # The ranks don't meet over the network that is measured: a socket stays where it was made.
    store = dist.TCPStore(  # type: ignore[attr-defined]
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
    share_one_device(network.interface)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.ranks, timeout=timeout)
