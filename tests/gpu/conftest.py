"""What the checks share: the device, the figures that they measure, and the page that is made of them.

With ``CUBOID_GPU_TESTS_DEVICE=cpu`` those that make sense there run on a CPU, with smaller sizes, to try themselves.
"""

import os
import platform
from pathlib import Path

import pytest
import torch
import transformers

from cuboid.verify import WorkerPool
from gpu.page import Result, page

FOLDER = Path(__file__).parent
DEVICE = torch.device(os.environ.get("CUBOID_GPU_TESTS_DEVICE", "cuda"))
#: Where to write the page; nowhere by default.
PAGE = os.environ.get("CUBOID_GPU_PAGE")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(count): a check that makes sense only on so many GPUs")


def pytest_collection_modifyitems(items):
    # `make test` has it set where there are fewer GPUs than ranks.
    is_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and not is_cpu else 0
    for item in items:
        if FOLDER not in item.path.parents:
            continue
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
    """A process that is a world of one: with NCCL, where there is a GPU."""
    with WorkerPool(1) as workers:
        yield workers


def machine():
    """What the run is on, by name."""
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = {
            "GPU": f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            **found,
        }
    return found


def pytest_terminal_summary(terminalreporter):
    if PAGE is None:
        return
    results = []
    for kind, outcome in {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}.items():
        for report in terminalreporter.stats.get(kind, []):
            if report.when == "call" or kind != "passed":
                name = report.nodeid.rpartition("gpu/")[2]
                figures = tuple(value for key, value in report.user_properties if key == "figure")
                results.append(Result(name, outcome, report.duration, figures))
    Path(PAGE).write_text(page(machine(), results) + "\n", encoding="utf-8")
