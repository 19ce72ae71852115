"""A pool's worker process: its main loop, and the messages between it and the pool."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from cuboid.errors import CuboidError
from cuboid.failures.startup import bound_device
from cuboid.library_warnings import quiet
from cuboid.verify.workers.staged_group import register_staged

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """One rank's part of a job.

    Args:
        function, arguments: the call to make.
        rank, world_size: of the process group in which it runs.
        meeting_point: URL at which its ranks rendezvous.
        port: of a store in the parent process, for code that uses MASTER_PORT.
        backend: ``"nccl"``, ``"staged"`` or ``"gloo"``.
        timeout_s: for every collective.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    meeting_point: str
    port: int
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class Success:
    """The function's return value."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """The function raised, or the process died.

    Args:
        kind: name of the exception's class.
        text: its traceback.
        explanation: its message, if it is an error that the user can fix.
        at_s: when it was raised, on a clock that all processes share.
    """

    kind: str
    text: str
    explanation: str | None = None
    at_s: float = field(default_factory=time.monotonic)


def serve(connection: Connection) -> None:
    """Report that the process is ready, then run jobs until the parent closes the connection or a job fails."""
    # The pool blocks SIGINT while it starts workers, but a fork server that ran before that doesn't inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    quiet()
    # Exclude what was imported from garbage collection, so that a collection takes milliseconds.
    gc.freeze()
    connection.send(Success(None))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        with environment(_launcher_variables(job)):
            try:
                connection.send(Success(_work(job)))
            except Exception as error:
                # Reported before the process exits: once its sockets close, the other ranks fail too, with less
                # useful errors.
                explanation = str(error) if isinstance(error, CuboidError) else None
                connection.send(Failure(type(error).__name__, traceback.format_exc(), explanation))
                return
        # Engines and models are in reference cycles, so only the collector frees their process groups, each of which
        # has threads that wake up a hundred times a second.
        gc.collect()


def _exit_with_parent() -> None:
    """Exit, in the middle of a job too, when the parent process has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Job) -> Any:
    register_staged()
    bound: torch.device | None = None
    if job.backend != "gloo" and torch.cuda.is_available():
        device = torch.device("cuda", job.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Only with NCCL: torch makes further groups of a bound group by splitting its communicator, which the staged
        # backend can't do.
        bound = bound_device(device, job.world_size) if job.backend == "nccl" else None
    dist.init_process_group(
        job.backend,
        init_method=job.meeting_point,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout_s),
        device_id=bound,
    )
    # A rank whose job ends the group at once would otherwise close its connections while others are still connecting.
    dist.barrier()
    result = job.function(*job.arguments)
    if dist.is_initialized():
        # Likewise for groups that the job has made.
        dist.barrier()
        dist.destroy_process_group()
    return result


def _launcher_variables(job: Job) -> dict[str, str]:
    """The environment that ``torchrun`` would give to the rank."""
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store, not rank 0
    }


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with these environment variables; the old values are restored at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
