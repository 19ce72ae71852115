"""The server from which the tests' ranks are forked; it has done before what each rank would do at its first load.

Reading the code of a model for its identity, compiling the patterns of weights' names and importing what transformers
imports late take a rank 0.8 s of a core, and the tests fork some thousand ranks.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import torch

from cuboid.verify.workers.worker import environment

#: The pool of :mod:`cuboid.verify` asks for the first one; what a server has been started with stays.
PRELOADED = ("cuboid.verify.workers.preload", "preloaded")
#: Read by torch and DeepSpeed when they are imported.
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def start_fork_server():
    """Start it, once for this process; it imports beside what follows. No state of a GPU survives a fork."""
    if torch.cuda.is_available():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    # The server has no other way to know where to import from.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with environment({**VARIABLES, "PYTHONPATH": path}):
        forkserver.ensure_running()
