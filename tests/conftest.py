"""Fixtures that several test modules share: a pool of processes, and small checkpoints.

Cuboid is imported where it is used: under xdist, the process that only hands tests out reads this file before it starts
the others, and needs no torch.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tiers import mark_tiers

if TYPE_CHECKING:
    from cuboid.verify import SmallModel, WorkerPool
    from threaded import ThreadWorld

# No deadline per example: machines are shared and slow at times.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
# A shell's jobs in the background ignore Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, and for what is started from here. Small models gain nothing from more; where ranks are
# threads, and two processes of tests share the cores, OpenMP's waited for each other for longer than they worked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
#: Timeout of a job of the pool, which takes a second or two; generous for slow machines.
TIMEOUT_S = 120.0
#: Files that take longest, in ``make test`` or ``make test-ci``. They begin first, so that its processes end together:
#: each takes a whole file at a time.
_LONGEST_FILES = (
    *("planner/test_planner.py", "trainer/test_fine_tuning.py", "models/test_fp8.py", "adapters/test_lora_engine.py"),
    *("seq1f1b/test_pipeline_parity.py", "tensor3d/test_parity.py", "tensor3d/test_compiled_types.py"),
    *("tensor3d/test_compile.py", "scripts/test_script_idioms.py", "train/test_train_launch.py"),
    *("models/test_sharded_model.py", "scripts/test_user_changes.py", "checkpoint/test_checkpoints.py"),
    *("seq1f1b/test_head_schedules.py", "adapters/test_lora_fp8.py", "tensor3d/test_whole_tensors.py"),
    *("tensor3d/test_host_sync.py", "planner/test_automatic.py", "models/certification/test_certification.py"),
    *("models/certification/test_mesh_certification.py", "booster/test_colossalai.py", "adapters/test_other_kinds.py"),
    *("kinds/test_encoder_decoders.py", "adapters/test_lora_ends.py", "failures/test_failing_together.py"),
    *("trainer/test_accelerate.py", "tensor3d/test_optimizers.py", "frameworks/test_import_orders.py"),
    *("frameworks/test_parity_engine.py", "frameworks/test_deterministic.py", "docs/test_readme.py"),
)
#: Of fixtures, and of what the modules import, where they start processes.
_NAMES_OF_RANKS = frozenset(
    {"pool", "alone", "WorkerPool", "as_ranks", "world", "reports_of", "endings_of", "warm_python"}
)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the server from which the ranks of all of xdist's processes are forked, beside what these import."""
    from fork_server import start_server_to_share

    node.workerinput["fork_server"] = start_server_to_share()


def pytest_configure(config: pytest.Config) -> None:
    """In one of xdist's processes, use that server."""
    address = getattr(config, "workerinput", {}).get("fork_server")
    if address is not None:
        from fork_server import share_server

        share_server(address)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each case its tier, and let the longest files come first."""
    mark_tiers(items)
    place_of = {TESTS / name: place for place, name in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: place_of.get(item.path, len(place_of)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where a test has ranks, start what they are forked from, beside the first tests."""
    # What has been imported stays. Each full collection would go through its 600,000 objects, in 0.3 s.
    gc.freeze()
    if not session.config.option.collectonly and any(map(_has_ranks, session.items)):
        from fork_server import start_fork_server

        start_fork_server()


def _has_ranks(item: pytest.Item) -> bool:
    named = vars(getattr(item, "module", item)).keys() | {*getattr(item, "fixturenames", ())}
    return not named.isdisjoint(_NAMES_OF_RANKS)


@pytest.fixture(scope="module")
def warm_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes of the module's tests are forked from one that has imported it."""
    from fork_server import forked_with

    with forked_with(request.module):
        yield


@pytest.fixture(scope="module")
def pool(warm_ranks: None) -> Iterator[WorkerPool]:
    """Eight processes, started when first used."""
    from cuboid.verify import WorkerPool

    with WorkerPool(8) as workers:
        yield workers


@pytest.fixture(scope="session")
def threads() -> ThreadWorld:
    """In the place of ``pool``, ranks that are threads of this process; see there for what may run on them."""
    from threaded import ThreadWorld

    return ThreadWorld()


@pytest.fixture
def alone(warm_ranks: None) -> Iterator[WorkerPool]:
    """A process that has had no engine yet: DeepSpeed keeps the groups of the first one."""
    from cuboid.verify import WorkerPool

    with WorkerPool(1) as workers:
        yield workers


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SmallModel], str]:
    """Writes a small model's checkpoint once; returns its path."""
    written: dict[SmallModel, Path] = {}

    def path_of(small: SmallModel) -> str:
        if small not in written:
            written[small] = tmp_path_factory.mktemp(small.architecture)
            small.write(written[small])
        return str(written[small])

    return path_of
