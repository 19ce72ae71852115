"""The server from which the tests' ranks are forked; it has done before what each rank would do at its first load.

Reading the code of a model for its identity, compiling the patterns of weights' names and importing what transformers
imports late take a rank 0.8 s of a core, and the tests fork some thousand ranks.
"""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import socket
import sys
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from unittest import mock

#: The pool of :mod:`cuboid.verify` asks for the first one; what a server has been started with stays.
PRELOADED = ("cuboid.verify.workers.preload", "preloaded")
#: Read by torch and DeepSpeed when they are imported.
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def start_fork_server():
    """Start it, once for this process, or know the one that is shared; it imports beside what follows.

    Returns:
        Its address; None with a GPU, whose state doesn't survive a fork.
    """
    if not _can_fork():
        return None
    server = forkserver._forkserver
    if server._forkserver_address is None:
        start_server_to_share()
    return server._forkserver_address


def start_server_to_share():
    """Start the server for the processes of xdist, by the one that hands tests out, which needs no torch.

    Returns:
        What the others give to :func:`share_server`; None where Python's fork server wants to know who asks.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    # The server has no other way to know where to import from.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {**VARIABLES, "PYTHONPATH": path}):
        forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address if sys.version_info < (3, 14) else None


def share_server(address):
    """Use a server that another process has started, and that ends with that process."""
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    # It would look whether its child is alive.
    server.ensure_running = resource_tracker.ensure_running


def _can_fork():
    import torch

    return not torch.cuda.is_available()


@contextlib.contextmanager
def forked_with(module):
    """Context whose processes are forked from one that has imported a module of tests, as each of them would.

    Some modules import frameworks, which takes seconds, and the processes of a file are many.
    """
    # Python's fork server wants to know who asks since 3.14.
    if sys.version_info >= (3, 14) or start_fork_server() is None:
        yield
        return
    server = forkserver._forkserver
    before = server._forkserver_address, server._forkserver_alive_fd
    context = multiprocessing.get_context("forkserver")
    ends, ended = context.Pipe(duplex=False)
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        process = context.Process(target=_serve, args=(listener, ends, module.__name__), daemon=True)
        process.start()
    ends.close()
    server._forkserver_address, server._forkserver_alive_fd = address, ended.fileno()
    try:
        yield
    finally:
        server._forkserver_address, server._forkserver_alive_fd = before
        ended.close()
        process.kill()
        process.join()


def _serve(listener, ends, name):
    """Be a fork server that has imported a module."""
    importlib.import_module(name)
    # Each full collection in a forked process would go through all of this, and copy the pages it is on.
    gc.collect()
    gc.freeze()
    forkserver.main(listener.detach(), ends.fileno(), [])
