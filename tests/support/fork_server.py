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
from multiprocessing import connection, forkserver
from pathlib import Path

import torch

from cuboid.verify.workers.worker import environment

#: The pool of :mod:`cuboid.verify` asks for the first one; what a server has been started with stays.
PRELOADED = ("cuboid.verify.workers.preload", "preloaded")
#: Read by torch and DeepSpeed when they are imported.
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def start_fork_server():
    """Start it, once for this process, and give its address; it imports beside what follows.

    No state of a GPU survives a fork, so that there is none with one.
    """
    if torch.cuda.is_available():
        return None
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    # The server has no other way to know where to import from.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with environment({**VARIABLES, "PYTHONPATH": path}):
        forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address


@contextlib.contextmanager
def forked_with(module):
    """Context whose processes are forked from one that has imported a module of tests, as each of them would.

    Some modules import frameworks, which takes seconds, and the processes of a file are many.
    """
    # Python's fork server wants to know who asks since 3.14.
    if torch.cuda.is_available() or sys.version_info >= (3, 14):
        yield
        return
    start_fork_server()
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
