"""A Python that has imported everything: what it runs is forked from the tests' fork server.

Launchers start ranks by ``sys.executable``, and each rank imports torch, transformers and DeepSpeed for six seconds of
a core. Where a test is about a launcher and not about imports, it starts the launcher by :func:`warm_python`. The
launcher and its ranks are then what they are otherwise, processes with their own arguments, environment, output and
exit status; a small one in the place of each hands signals on to it and ends as it does. If the small one is killed, so
is the other.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch

from fork_server import VARIABLES, start_fork_server

#: The small process: the standard library alone, and of it what starts in a fiftieth of a second.
_SOURCE = """#!{python} -IS
import array, json, os, signal, socket, struct, sys

options = []
arguments = sys.argv[1:]
while arguments and arguments[0] == "-u":
    options.append(arguments.pop(0))
if not arguments or arguments[0].startswith("-") and arguments[0] != "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

ignored = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN]
call = dict(arguments=arguments, executable=__file__, folder=os.getcwd(), variables=dict(os.environ), ignored=ignored)
(child_r, parent_w), (parent_r, child_w), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
life_r, life_w = os.pipe()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    # As multiprocessing's ForkServer.connect_to_new_process does.
    descriptors = array.array("i", [child_r, child_w, nothing, nothing, 0, 1, 2, life_r])
    server.sendmsg([bytes([len(descriptors)])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    if sys.platform == "darwin":
        server.recv(1)
for descriptor in (child_r, child_w, nothing, life_r):
    os.close(descriptor)
# Two pickles: that there is nothing to prepare, and a call.
os.write(parent_w, b"}}.cwarm_python\\nrun\\n(V")
message = json.dumps(call).encode().hex().encode() + b"\\ntR."
while message:
    message = message[os.write(parent_w, message):]


def number():
    return struct.unpack("q", os.read(parent_r, 8))[0]


process = number()
for each in {{signal.SIGINT, signal.SIGTERM}} - {{*ignored}}:
    signal.signal(each, lambda received, _: os.kill(process, received))
status = number()
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python():
    """The path of its executable, which is given the name of a script or ``-m`` and a module, and arguments.

    On a machine with a GPU, whose state doesn't survive a fork, and with a Python whose fork server wants to know who
    asks (3.14), it is Python itself.
    """
    if torch.cuda.is_available() or sys.version_info >= (3, 14):
        return Path(sys.executable)
    address = start_fork_server()
    folder = tempfile.mkdtemp(prefix="cuboid-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "python")
    path.write_text(_SOURCE.format(python=sys.executable, address=address))
    path.chmod(0o700)
    return path


def run(call):
    """In the process that the fork server made: be the interpreter that was asked for."""
    call = json.loads(bytes.fromhex(call))
    *streams, life = forkserver._forkserver._inherited_fds
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in call["ignored"] else usual)
    resource_tracker._resource_tracker._fd = None
    forkserver._forkserver._forkserver_alive_fd = None
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update({**call["variables"], **VARIABLES})
    sys.executable = call["executable"]
    sys.stdin = os.fdopen(0, closefd=False)
    is_module = call["arguments"][0] == "-m"
    name, *rest = call["arguments"][is_module:]
    sys.argv, sys.path[0] = [name, *rest], call["folder"] if is_module else str(Path(name).parent)
    run_as_main(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True) if is_module else run_path(name))


def run_path(script):
    """What ``python script`` does."""
    runpy.run_path(script, run_name="__main__")


def run_as_main(action):
    """Do what a program does, and end as the interpreter would; the descriptors 1 and 2 are its output."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    options = {"buffering": 1, "closefd": False, "encoding": encoding or None}
    sys.stdout = os.fdopen(1, "w", errors=errors or "strict", **options)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", **options)
    # A data loader's workers would be forked from the server too, which would run the script in each of them.
    multiprocessing.set_start_method(None, force=True)
    status = 0
    try:
        action()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # What the interpreter does at its end, and a process of multiprocessing doesn't.
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_with(descriptor):
    """Be killed when the process in whose place this one runs is."""
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGKILL)
