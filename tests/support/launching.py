"""Start real processes as a user would, and end all of their children."""

import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil

from fork_server import VARIABLES, start_fork_server
from warm_python import run_as_main, run_path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Below the ports that Linux gives to a socket which asks for any, as gloo's do: a rank takes its port seconds later.
# Another process of the tests begins elsewhere.
_PORTS = itertools.islice(itertools.cycle(range(12_000, 32_000)), 613 * os.getpid() % 20_000, None)


def free_port():
    """A free port, which no socket gets by chance before it is used."""
    for port in _PORTS:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise AssertionError("the ports never end")


def start(*arguments, **variables):
    """A process in its own process group, without the launcher's variables that this process may have."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    environment.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", **variables)
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process, timeout_s):
    """The exit status and output of a process; its process group is ended too."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        end(process)
    return process.returncode, output


def end(process):
    """Kill a process and all its descendants; torchrun puts its ranks into separate process groups."""
    _end_tree(process.pid)
    process.wait()


def _end_tree(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(*arguments, timeout_s=480, **variables):
    """Start, wait, and give (status, output)."""
    return finish(start(*arguments, **variables), timeout_s)


def torchrun(ranks, script, *arguments, timeout_s=240, **variables):
    """Run a script on that many ranks."""
    launcher = (BIN / "torchrun", "--standalone", "--nproc-per-node", ranks)
    return run(*launcher, script, *arguments, timeout_s=timeout_s, **variables)


def as_ranks(ranks, script, *arguments, timeout_s=240, **variables):
    """Run a script as the ranks of one world, without a launcher, which would end the others when one fails.

    The processes are forked from a server that has imported torch, transformers, DeepSpeed and Cuboid, which takes four
    seconds of a core. So this is for scripts that import Cuboid anyway and whose launcher doesn't matter.

    Returns:
        (status, output) of each rank.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    by_rank = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables} for rank in range(ranks)]
    return _run_forked([script, *arguments], by_rank, timeout_s)


def alone(script, *arguments, timeout_s=240, **variables):
    """The status and output of a script, forked like :func:`as_ranks`, without any variable of a launcher."""
    return _run_forked([script, *arguments], [variables], timeout_s)[0]


def world(ranks, script, *arguments, timeout_s=240, **variables):
    """The status and output of :func:`as_ranks` together; the status is the first one that isn't 0."""
    endings = as_ranks(ranks, script, *arguments, timeout_s=timeout_s, **variables)
    return next((status for status, _ in endings if status), 0), "\n".join(output for _, output in endings)


def _run_forked(command, variables, timeout_s):
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    argv = [str(argument) for argument in command]
    with tempfile.TemporaryDirectory(prefix="cuboid-", ignore_cleanup_errors=True) as folder:
        outputs, processes = [Path(folder) / str(rank) for rank in range(len(variables))], []
        try:
            for environment, output in zip(variables, outputs, strict=True):
                arguments = (argv, {**VARIABLES, **environment}, str(output), timeout_s)
                process = context.Process(target=_run_script, args=arguments)
                process.start()
                processes.append(process)
            deadline = time.monotonic() + timeout_s
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                _end_tree(process.pid)
                process.join()
        texts = [output.read_text() for output in outputs]
    assert None not in statuses, (f"not ended after {timeout_s} s", statuses, texts)
    return list(zip(statuses, texts, strict=True))


def _run_script(argv, variables, output, timeout_s):
    """What ``python script …`` does, with its output in a file, and where it stands shortly before it is killed."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=file)
    os.environ.update(variables)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
    run_as_main(lambda: run_path(argv[0]))


def reports_of(ranks, script, root, launch=world):
    """Run the text of a script on so many ranks, with ``root`` as its argument, and give what they report.

    A rank reports by printing ``RESULT`` and a line of JSON.
    """
    (root / "script.py").write_text(textwrap.dedent(script))
    status, output = launch(ranks, root / "script.py", root)
    assert status == 0, output
    decoder, parts = json.JSONDecoder(), output.split("RESULT")[1:]
    return [decoder.raw_decode(part)[0] for part in parts]
