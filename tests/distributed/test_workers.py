"""The pool of local processes: results by rank, new worlds, and failures, after which no process hangs."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from conftest import TIMEOUT_S
from cuboid import ConfigError, CuboidError
from cuboid.verify import WorkerError, WorkerPool
from launching import end, finish, run, start
from warm_python import warm_python


def describe(factor: int) -> tuple[int, int, int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank() * factor, dist.get_world_size(), os.getpid(), total.item()


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def threads() -> int:
    return torch.get_num_threads()


def store_of_environment() -> str:
    # As a library does that uses the launcher's variables for its own rendezvous.
    store, rank, size = next(iter(dist.rendezvous("env://")))
    store.set(f"key-{rank}", str(rank))
    return ",".join(store.get(f"key-{other}").decode() for other in range(size))


def leave_the_group() -> int:
    dist.destroy_process_group()
    return 1


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("this rank's own reason")
    dist.barrier()


def reject() -> None:
    raise ConfigError("the key is wrong")


def end_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def not_sendable() -> object:
    return lambda: None


def test_results_are_in_rank_order(pool: WorkerPool) -> None:
    results = pool.run(3, describe, 10, timeout_s=TIMEOUT_S)
    assert [result[0] for result in results] == [0, 10, 20]
    assert {result[1] for result in results} == {3}
    assert {result[3] for result in results} == {3.0}
    assert len({result[2] for result in results}) == 3


def test_processes_are_reused_for_worlds_of_other_sizes(pool: WorkerPool) -> None:
    pids = {size: [result[2] for result in pool.run(size, describe, 1, timeout_s=TIMEOUT_S)] for size in (2, 8, 1, 5)}
    for size in (2, 1, 5):
        assert pids[size] == pids[8][:size]


def test_the_environment_is_a_launchers(pool: WorkerPool) -> None:
    seen = pool.run(2, environment, timeout_s=TIMEOUT_S)
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in seen] == [("0", "0", "2"), ("1", "1", "2")]
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in seen}) == 1
    assert pool.run(2, store_of_environment, timeout_s=TIMEOUT_S) == ["0,1", "0,1"]
    assert pool.run(1, threads, timeout_s=TIMEOUT_S) == [1]


def test_a_job_may_end_the_process_group_itself(pool: WorkerPool) -> None:
    assert pool.run(2, leave_the_group, timeout_s=TIMEOUT_S) == [1, 1]


def test_the_rank_that_failed_is_named_first(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(4, fail_on, 2, timeout_s=TIMEOUT_S)
    assert (caught.value.rank, caught.value.kind, caught.value.explanation) == (2, "ZeroDivisionError", None)
    first, _, rest = str(caught.value).partition("\n")
    assert first == "rank 2 of 4 failed in test_workers.fail_on:"
    assert 'raise ZeroDivisionError("this rank\'s own reason")' in rest.split("then rank")[0]
    assert len(pool.run(4, describe, 1, timeout_s=TIMEOUT_S)) == 4


def test_a_users_error_has_an_explanation(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, reject, timeout_s=TIMEOUT_S)
    assert (caught.value.kind, caught.value.explanation) == ("ConfigError", "the key is wrong")


def test_a_rank_that_dies_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="the process ended with exit code 7") as caught:
        pool.run(2, end_on, 1, timeout_s=TIMEOUT_S)
    assert caught.value.rank == 1


def test_a_rank_that_hangs_is_killed(pool: WorkerPool) -> None:
    before = {result[2] for result in pool.run(3, describe, 1, timeout_s=TIMEOUT_S)}
    with pytest.raises(WorkerError, match="no answer from rank") as caught:
        pool.run(3, sleep_on, 1, timeout_s=3)
    assert caught.value.kind == "Timeout"
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert before.isdisjoint(result[2] for result in pool.run(3, describe, 1, timeout_s=TIMEOUT_S))


def test_a_result_that_cannot_be_pickled_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="not_sendable"):
        pool.run(1, not_sendable, timeout_s=TIMEOUT_S)


def test_a_world_larger_than_the_pool_is_rejected(pool: WorkerPool) -> None:
    with pytest.raises(CuboidError, match="1 to 8 workers"):
        pool.run(9, describe, 1)


def test_a_closed_pool_leaves_no_process() -> None:
    with WorkerPool(2) as workers:
        pids = [result[2] for result in workers.run(2, describe, 1, timeout_s=TIMEOUT_S)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def report_and_sleep(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600)


OWNER = """
import sys
sys.path[:0] = sys.argv[2:]
from cuboid.verify import WorkerPool
from test_workers import report_and_sleep

if __name__ == "__main__":
    with WorkerPool(2) as pool:
        pool.run(2, report_and_sleep, sys.argv[1], timeout_s=600)
"""


@pytest.mark.slow
def test_workers_exit_when_their_parent_dies(tmp_path: Path) -> None:
    script, pids = tmp_path / "owner.py", tmp_path / "pids"
    script.write_text(OWNER)
    pids.mkdir()
    here = Path(__file__).parent
    owner = start(sys.executable, script, pids, here, here.parent, here.parent / "support")
    try:
        wait_until(lambda: len(list(pids.iterdir())) == 2 or owner.poll() is not None)
        workers = [int(path.name) for path in pids.iterdir()]
        assert len(workers) == 2
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        wait_until(lambda: not any(map(psutil.pid_exists, workers)))
    finally:
        end(owner)


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


def _blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_is_the_parents_affair(pool):
    assert pool.run(1, _blocked, timeout_s=TIMEOUT_S) == [True]
    assert not _blocked()


WAITING = """
import os, sys, time
print(os.getpid(), *sys.argv[1:], os.environ["RANK"], "cuboid" in sys.modules, flush=True)
if len(sys.argv) == 2:
    sys.exit(int(sys.argv[1]))
time.sleep(600)
"""


def test_a_warm_python_is_a_python(tmp_path: Path) -> None:
    """Arguments, environment, output, exit status, signals and the end of what it does are those of its script."""
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    status, output = run(warm_python(), "-u", script, 3, RANK="5")
    assert (status, output.split()[1:]) == (3, ["3", "5", "True"])
    assert run(warm_python(), "-c", "import sys; print('cuboid' in sys.modules)") == (0, "False\n")
    for number, expected in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(warm_python(), script, RANK="5")
        assert process.stdout is not None
        forked = int(process.stdout.readline().split()[0])
        process.send_signal(number)
        status, output = finish(process, TIMEOUT_S)
        assert status == expected
        assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)
        wait_until(lambda: not psutil.pid_exists(forked))  # noqa: B023
