"""A pool of local processes, each of which runs one rank of a small ``torch.distributed`` world.

Importing torch, transformers and DeepSpeed takes seconds. The processes do it once and then run many jobs, each in a
new world of the job's size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from cuboid.errors import CuboidError
from cuboid.verify.workers.staged_group import STAGED
from cuboid.verify.workers.worker import HOST, Failure, Job, Success, environment, serve

#: After a rank has failed, how long the others have to report before they are killed.
_GRACE_S = 0.5
#: Timeout of a worker's start. Imports on a slow disk may take a minute.
_START_S = 300.0


class WorkerError(CuboidError):
    """A rank raised, died or timed out. The message begins with that rank's own traceback.

    Attributes:
        rank: the rank that failed first.
        kind: name of its exception's class, ``"Died"`` or ``"Timeout"``.
        explanation: the message of a :class:`~cuboid.errors.CuboidError`, which is meant for users; None for other
            exceptions.
    """

    def __init__(self, message: str, rank: int, kind: str, explanation: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.explanation = explanation


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@dataclass
class WorkerPool:
    """Up to ``max_size`` processes on this machine, started when first needed and kept until the pool closes.

    If there are ``max_size`` GPUs, each rank has one, with NCCL. If there are fewer, ranks share them, and messages go
    through the host (:mod:`.staged_group`). Without GPUs, or with ``DS_ACCELERATOR=cpu`` in the environment, all ranks
    are on the CPU, with gloo. Use it as a context manager, or call :meth:`close`.
    """

    max_size: int
    _workers: list[_Worker] = field(default_factory=list, init=False)

    @property
    def backend(self) -> str:
        """``"nccl"``, ``"staged"`` or ``"gloo"``."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus or os.environ.get("DS_ACCELERATOR") == "cpu":
            return "gloo"
        return "nccl" if gpus >= self.max_size else STAGED

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ranks 0 … ``world_size - 1`` of a fresh world.

        The process group exists when the function is called and is destroyed after it. RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as a launcher would set them.

        Args:
            function: must be at the top level of a module, because it is pickled by reference.
            arguments: the same for every rank.
            timeout_s: for the call as a whole, without the start of missing processes.

        Returns:
            The ranks' return values, by rank.

        Raises:
            WorkerError: a rank raised, died or timed out. The job's processes are killed; the next call starts others.
        """
        if not 1 <= world_size <= self.max_size:
            raise CuboidError(f"world_size is {world_size}, but this pool has 1 to {self.max_size} workers")
        self._start(world_size)
        # The ranks rendezvous in a file, because clients of a TCPStore may wait seconds for a name server. The store is
        # for code that uses MASTER_PORT.
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            # Children of a killed rank may still write into the folder while it is removed, which must not be an error.
            with tempfile.TemporaryDirectory(prefix="cuboid-", ignore_cleanup_errors=True) as directory:
                for rank, worker in enumerate(self._workers[:world_size]):
                    job = Job(
                        function=function,
                        arguments=arguments,
                        rank=rank,
                        world_size=world_size,
                        meeting_point=f"file://{directory}/store",
                        port=store.port,
                        backend=self.backend,
                        timeout_s=timeout_s,
                    )
                    worker.connection.send(job)
                replies = collect_replies(
                    self._workers[:world_size], timeout_s, _receive, lambda reply: isinstance(reply, Failure)
                )
            results = [reply.result for _, reply in sorted(replies.items()) if isinstance(reply, Success)]
            if len(results) < world_size:
                raise _error(replies, world_size, f"{function.__module__}.{function.__qualname__}")
        except BaseException:  # including an interrupt, which leaves the workers in the middle of the job
            self._discard(world_size)
            raise
        return results

    def fresh(self) -> WorkerPool:
        """A new pool of the same size, with its own processes."""
        return dataclasses.replace(self)

    def close(self) -> None:
        """End all processes of the pool. Idle ones exit when their connection closes; others are killed."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._discard(len(self._workers))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, count: int) -> None:
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._workers.remove(worker)
            worker.kill()
        started = [_start_worker(self.backend) for _ in range(count - len(self._workers))]
        self._workers += started
        for worker in started:
            if not worker.connection.poll(_START_S) or isinstance(_receive(worker), Failure):
                self.close()
                raise CuboidError(
                    "a worker process ended or hung while it started. A script that starts workers needs its own "
                    "code under `if __name__ == '__main__':`, for every worker imports it"
                )

    def _discard(self, count: int) -> None:
        failed, self._workers = self._workers[:count], self._workers[count:]
        for worker in failed:
            worker.kill()


def _start_worker(backend: str) -> _Worker:
    # A fork server imports everything once for all workers, so that starting another one takes a fraction of a second.
    # It can't be used with CUDA, whose state doesn't survive a fork.
    context: Any
    if torch.cuda.is_available():
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cuboid.verify.workers.preload"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    # Set before the process starts, because torch and DeepSpeed read them when they are imported.
    variables = {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with environment(variables), _without_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Context whose processes start with SIGINT blocked, so that a terminal's Ctrl-C interrupts only the parent.

    The parent ends the processes itself. It receives a Ctrl-C of the meantime at the end of the context.
    """
    # Before SIGINT is blocked, because the tracker's start unblocks it.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class PoolMember(Protocol):
    """A process that replies over a connection."""

    @property
    def connection(self) -> Connection:
        """The connection for its replies."""
        ...


M = TypeVar("M", bound=PoolMember)
R = TypeVar("R")


def collect_replies(
    members: Sequence[M], timeout_s: float, receive: Callable[[M], R], has_failed: Callable[[R], bool]
) -> dict[int, R]:
    """Wait for one reply of each process; once one has failed, the others have half a second left.

    Args:
        members: the processes, by rank.
        timeout_s: for the slowest of them.
        receive: reads a reply that has arrived.
        has_failed: whether a reply reports a failure.

    Returns:
        Replies by rank; ranks without one hadn't replied in time.
    """
    replies: dict[int, R] = {}
    deadline = time.monotonic() + timeout_s
    while len(replies) < len(members):
        waiting = {member.connection: rank for rank, member in enumerate(members) if rank not in replies}
        arrived = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not arrived:
            break
        for connection in arrived:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            replies[rank] = receive(members[rank])
            if has_failed(replies[rank]):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return replies


def _receive(worker: _Worker) -> Success | Failure:
    try:
        reply = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(timeout=5)
        # Sorted before all other failures, which are consequences of this one.
        text = f"the process ended with exit code {worker.process.exitcode}"
        return Failure("Died", text, at_s=-math.inf)
    assert isinstance(reply, Success | Failure)
    return reply


def _error(replies: Mapping[int, Success | Failure], world_size: int, name: str) -> WorkerError:
    failures = [(rank, reply) for rank, reply in replies.items() if isinstance(reply, Failure)]
    failures.sort(key=lambda failure: failure[1].at_s)
    silent = [rank for rank in range(world_size) if rank not in replies]
    if not failures:
        text = f"{name} ran out of time: no answer from rank {', '.join(map(str, silent))} of {world_size}"
        return WorkerError(text, silent[0], "Timeout")
    rank, first = failures[0]
    lines = [f"rank {rank} of {world_size} failed in {name}:", first.text.rstrip()]
    lines += [
        f"then rank {other} failed too: {failure.text.rstrip().splitlines()[-1]}" for other, failure in failures[1:]
    ]
    if silent:
        lines.append(f"killed while waiting: rank {', '.join(map(str, silent))}")
    return WorkerError("\n".join(lines), rank, first.kind, first.explanation)
