"""Ranks in separate processes without a launcher, which would end the others: how and when each one ended."""

import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

from cuboid.verify.workers.worker import environment
from fork_server import VARIABLES, start_fork_server
from launching import free_port


@dataclass(frozen=True)
class Ending:
    """How a rank's function ended.

    Attributes:
        kind: of the exception, or None where it returned.
        text: of the exception, or what the function returned.
        rank: where the exception says it arose.
        cause: the class of what it was raised from.
        after_s: when, after the start of all ranks.
    """

    kind: str | None
    text: Any
    rank: int | None
    cause: str | None
    after_s: float


def endings_of(ranks, function, *arguments, timeout_s=90.0):
    """Run ``function(*arguments)`` on so many ranks, and give each rank's ending, None for one that left no word.

    A rank's process ends as soon as its function has. Time counts from when all processes are there.
    """
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes, endings = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        environment = {**VARIABLES, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments_ = (theirs, environment, function, arguments)
        process = context.Process(target=_serve, args=arguments_, daemon=True)
        process.start()
        theirs.close()
        processes.append((process, ours))
    for _, ours in processes:
        ours.recv()
    started = time.monotonic()
    for _, ours in processes:
        ours.send(started)
    for _, ours in processes:
        try:
            arrived = ours.poll(max(0.0, started + timeout_s - time.monotonic()))
            endings.append(ours.recv() if arrived else None)
        except EOFError:
            endings.append(None)
    for process, _ in processes:
        process.kill()
        process.join()
    return endings


def _serve(connection, variables, function, arguments):
    import torch

    torch.set_num_threads(1)
    connection.send("there")
    started = connection.recv()
    with environment(variables):
        try:
            ending = (None, function(*arguments), None, None)
        except BaseException as error:
            cause = None if error.__cause__ is None else type(error.__cause__).__name__
            ending = (type(error).__name__, str(error), getattr(error, "rank", None), cause)
        connection.send(Ending(*ending, time.monotonic() - started))
        connection.close()
        os._exit(0)
