"""Start real processes as a user would, and end all of their children."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def free_port():
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(*arguments, timeout_s=240, **variables):
    """Start, wait, and give (status, output)."""
    return finish(start(*arguments, **variables), timeout_s)


def torchrun(ranks, script, *arguments, timeout_s=240, **variables):
    """Run a script on that many ranks."""
    launcher = (BIN / "torchrun", "--standalone", "--nproc-per-node", ranks)
    return run(*launcher, script, *arguments, timeout_s=timeout_s, **variables)


def reports_of(ranks, script, root):
    """Run the text of a script on so many ranks, with ``root`` as its argument, and give what they report.

    A rank reports by printing ``RESULT`` and a line of JSON.
    """
    (root / "script.py").write_text(textwrap.dedent(script))
    status, output = torchrun(ranks, root / "script.py", root)
    assert status == 0, output
    # Ranks may print at the same time, so that their outputs are on one line.
    decoder, found = json.JSONDecoder(), output.split("RESULT")[1:]
    return [decoder.raw_decode(part)[0] for part in found]


def as_ranks(ranks, script, *arguments, timeout_s=120):
    """Run a script as the ranks of one world without any launcher, which would end the others when one fails.

    Returns:
        (status, output) of each rank.
    """
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = (sys.executable, script, *arguments)
    processes = [start(*command, RANK=str(rank), LOCAL_RANK=str(rank), **world) for rank in range(ranks)]
    return [finish(process, timeout_s) for process in processes]
