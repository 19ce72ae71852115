"""What the checks share: the device, the time that they have, the figures that they measure, and the record of them.

The record is written anew after each check, so that a run that is killed leaves what it has found; it then names the
check that didn't end. With ``CUBOID_GPU_TESTS_DEVICE=cpu`` those checks that make sense there run on a CPU,
with smaller sizes, to try themselves.
"""

import faulthandler
import os
import platform
import signal
import subprocess
import time
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from cuboid.verify import WorkerPool
from gpu.page import Record, Result

FOLDER = Path(__file__).parent
DEVICE = torch.device(os.environ.get("CUBOID_GPU_TESTS_DEVICE", "cuda"))
#: Where to write the record; nowhere by default.
RECORD = os.environ.get("CUBOID_GPU_RECORD")
#: What begins later than this is skipped, so that a run on a rented GPU ends in time.
SECONDS = float(os.environ.get("CUBOID_GPU_SECONDS", "540"))
#: Of one check, unless it is marked with another number.
LIMIT_S = 90.0
#: After the limit, in which a check that can be interrupted says where it was, and its processes are ended.
GRACE_S = 20.0
#: In this order: what everything else rests on comes first, and what takes long or may disturb what follows last.
ORDER = (
    *("kernels", "experts", "stage", "layer", "compile", "fp8", "adapters"),
    *("ranks", "memory", "frameworks", "deterministic", "cold"),
)
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "bitsandbytes", "colossalai", "triton")
#: Variables that change what CUDA, NCCL and torch do.
PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "CUBOID_")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(count): a check that makes sense only on so many GPUs")
    config.addinivalue_line("markers", "limit(seconds): the longest that a check may take")
    config.stash[RUN] = Run()
    # As long as nothing is captured yet, so that a process that ends itself says why.
    config.stash[STACKS] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config):
    config.stash[STACKS].close()


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if FOLDER in item.path.parents]
    places = {f"test_gpu_{name}.py": place for place, name in enumerate(ORDER)}
    if len(gpu_items) == len(items):
        items.sort(key=lambda item: places.get(item.path.name, len(places)))
    # `make test` has it set where there are fewer GPUs than ranks.
    is_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and not is_cpu else 0
    for item in gpu_items:
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else int(DEVICE.type == "cuda")
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}, and there are {gpus}"))


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture
def figure(request):
    """Notes a figure for the page: table, row, column, and its value as text."""

    def note(table, row, column, value):
        request.node.user_properties.append(("figure", (table, row, column, value)))

    return note


@pytest.fixture(scope="module")
def alone():
    """A process that is a world of one: with NCCL, where there is a GPU. It ends with its file, for it keeps memory."""
    with WorkerPool(1) as workers:
        yield workers


@pytest.fixture
def fresh():
    """The same, of this check alone: for what changes the process, or has to be its first."""
    with WorkerPool(1) as workers:
        yield workers


class Run:
    """The results so far, and when the first check began."""

    def __init__(self):
        self._start = None
        self._date = date.today().isoformat()
        self._results = {}

    def begin(self, item):
        self._start = self._start or time.monotonic()
        self._write(Result(_name(item), "running", 0.0))

    def spent_s(self):
        return time.monotonic() - self._start

    def note(self, item, report):
        text = ""
        if report.failed:
            text = report.longreprtext + "".join(f"\n{title}\n{content}" for title, content in report.sections)
        elif report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        figures = tuple(value for key, value in report.user_properties if key == "figure")
        self._write(Result(_name(item), report.outcome, report.duration, figures, text))

    def _write(self, result):
        self._results[result.name] = result
        if RECORD is not None:
            Record.of(self._date, _commit(), machine(), list(self._results.values())).write(Path(RECORD))


RUN = pytest.StashKey[Run]()
STACKS = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # Unlike other hooks of a conftest, this one is called for all tests of a session.
    if FOLDER not in item.path.parents:
        return (yield)
    marker = item.get_closest_marker("limit")
    limit_s = marker.args[0] if marker else LIMIT_S
    item.config.stash[RUN].begin(item)
    # A process that is stuck in a call of CUDA takes no signal: then it ends, with the stack of each thread.
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[STACKS])
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took longer than {limit_s:g} s"))
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_setup(item):
    if item.config.stash[RUN].spent_s() > SECONDS:
        pytest.skip(f"no time was left of the {SECONDS:g} s of a run (CUBOID_GPU_SECONDS)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or not report.passed:
        item.config.stash[RUN].note(item, report)
    return report


def _name(item):
    return item.nodeid.rpartition("gpu/")[2]


@cache
def machine():
    """What the run is on, by name."""
    facts = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "GPU": f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"sm_{properties.major}{properties.minor}",
            "driver": _driver(),
            "CUDA, cuDNN": f"{torch.version.cuda}, {torch.backends.cudnn.version()}",
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            **facts,
        }
    facts["environment"] = " ".join(
        f"`{name}={value}`"
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and name != "CUBOID_GPU_RECORD"
    )
    return facts


@cache
def _commit():
    try:
        query = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
