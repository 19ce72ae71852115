"""One process of a pool: what it is told, what it answers, and its life."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
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
from cuboid.library_warnings import quiet

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """One rank's part of a job.

    Args:
        function, arguments: what to call.
        rank, world_size: of the process group that exists meanwhile.
        meeting_point: URL at which its ranks find each other.
        port: of a store of the parent's, for code that goes by MASTER_PORT.
        backend: ``"nccl"`` or ``"gloo"``.
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
    """What the function returned."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """Why there is no result.

    Args:
        kind: name of the exception's class.
        text: its traceback.
        explanation: its message, where it is a user's to mend.
        at_s: when it was raised, on a clock that all processes share.
    """

    kind: str
    text: str
    explanation: str | None = None
    at_s: float = field(default_factory=time.monotonic)


def serve(connection: Connection) -> None:
    """Say that the process is ready, then do one job after another until the parent hangs up or a job fails."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    quiet()
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
                # Report first: once its sockets close, the other ranks fail too, of something less telling.
                explanation = str(error) if isinstance(error, CuboidError) else None
                connection.send(Failure(type(error).__name__, traceback.format_exc(), explanation))
                return


def _leave_with_parent() -> None:
    """End the process, whatever it is at, when the one with the pool is gone without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Job) -> Any:
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    dist.init_process_group(
        job.backend,
        init_method=job.meeting_point,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )
    result = job.function(*job.arguments)
    if dist.is_initialized():
        dist.barrier()  # a rank with little to do would hang up on ranks that are still connecting
        dist.destroy_process_group()
    return result


def _launcher_variables(job: Job) -> dict[str, str]:
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's; no rank hosts one
    }


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These environment variables inside, the old ones after."""
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
