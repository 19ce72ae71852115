"""Hosts that lose one another: a link that is cut, a process that is stopped. Each host is a network namespace."""

import os
import re
import signal
import socket
import textwrap
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, PeerLostError
from cuboid.failures import bounded_store, rendezvous, startup
from cuboid.failures.bounded_store import BoundedStore, StoreTimeoutError, answers_within
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.failures.startup import Launch, await_all_ranks
from cuboid.verify import SmallModel
from fresh_ranks import endings_of
from launching import finish, start
from two_hosts import cut_link, hosts_in_namespaces  # noqa: F401  the fixture two_hosts
from warm_python import warm_python

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)
#: Of the process group; its ranks have this and half a minute to end.
GROUP_TIMEOUT_S, SPARE_S = 5.0, 30.0
#: Less than torch's own client waits, which is five minutes, and far more than any machine takes.
HANG_S = 200.0


# --- two hosts -----------------------------------------------------------------------------------------------------

_TRAINING = """
    import os, sys
    from datetime import timedelta

    sys.path[:0] = ["benchmarks", "tests/support"]
    from network.networks import Shaped

    rank, hub, path, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    Shaped(2, hub).enter(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", GLOO_SOCKET_IFNAME="e0")
    os.environ.update(MASTER_ADDR="10.231.0.1", MASTER_PORT="29500")

    import torch
    import torch.distributed as dist
    from training import make_engine, settings

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    engine = make_engine(path, settings("1x2x1"))
    ids = torch.arange(48).view(4, 12)
    while True:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if engine.global_steps == 1:
            print("training", flush=True)
"""


@pytest.mark.ci
def test_both_hosts_end_when_their_link_is_cut_in_a_step(two_hosts, checkpoint, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_TRAINING))
    ranks = [start(warm_python(), script, rank, two_hosts, checkpoint(SMALL), GROUP_TIMEOUT_S) for rank in range(2)]
    try:
        for rank in ranks:
            assert any(line.strip() == "training" for line in rank.stdout)
        cut_link(two_hosts, 1)
        cut = time.monotonic()
        endings = [finish(rank, GROUP_TIMEOUT_S + SPARE_S + 30) for rank in ranks]
        took_s = time.monotonic() - cut
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (status, output) in enumerate(endings):
        assert status == 1, output
        said = [line for line in output.splitlines() if "cuboid: rank" in line]
        assert len(said) == 1, output
        assert re.search(rf"PeerLostError: another rank .*answer in time while rank {rank} waited for it in ", said[0])
        assert ("the store of the process group doesn't answer" in said[0]) == (rank == 1)
    assert took_s < GROUP_TIMEOUT_S + SPARE_S


def _meet_after_the_cut(hub, folder, way):
    from network.networks import Shaped

    rank = int(os.environ["RANK"])
    Shaped(2, hub).enter(rank)
    # By the process ids, which two hosts don't share, it would be known that nobody ended.
    rendezvous.host_identity = lambda _: f"host {rank}"
    variables = {"MASTER_ADDR": "10.231.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "e0"}
    os.environ.update(variables)
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    mesh = Mesh(MeshShape(1, 2, 1))
    run_on_all_ranks(lambda: None, mesh, what="a first meeting")
    if rank == 1:
        pid = int((folder / "pid").read_text())
        os.kill(pid, signal.SIGSTOP) if way == "stop" else cut_link(hub, 1)
    cut = time.monotonic()
    try:
        run_on_all_ranks(lambda: time.sleep(1 - rank), mesh, what="a second meeting")
    except PeerLostError as error:
        # A further failure isn't kept back by the store either.
        with suppress(ValueError, CuboidError):
            run_on_all_ranks(lambda: _raise(ValueError("also")), mesh, what="a third meeting")
        dist.destroy_process_group()
        return str(error), time.monotonic() - cut
    finally:
        if way == "stop" and rank == 1:
            os.kill(pid, signal.SIGKILL)
    return "met", cut


def _raise(error):
    raise error


@pytest.mark.ci
@pytest.mark.parametrize("way", ["cut", "stop"])
def test_a_meeting_with_a_host_that_is_gone_ends(two_hosts, tmp_path, way):
    first, second = endings_of(2, _meet_after_the_cut, two_hosts, tmp_path, way, timeout_s=120.0)
    assert second.kind is None, second
    text, took_s = second.text
    assert "a second meeting: the store of the process group doesn't answer: rank 0 or the launcher" in text
    assert took_s < GROUP_TIMEOUT_S + SPARE_S
    if way == "cut":
        text, took_s = first.text
        assert "rank 1 of 2 didn't come to a second meeting within 5 s" in text
        assert took_s < GROUP_TIMEOUT_S + SPARE_S


# --- a store that doesn't answer -----------------------------------------------------------------------------------


@pytest.fixture
def silent_port():
    """A port where connections are accepted and nothing is ever answered, as of a process that is stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


def test_a_start_whose_store_is_silent_ends(silent_port):
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"the store at 127\.0\.0\.1:{silent_port} didn't answer while the ranks"):
        await_all_ranks(Launch(1, 2, "127.0.0.1", silent_port), timeout_s=1.5)
    assert time.monotonic() - started < HANG_S


def test_an_early_failure_is_not_kept_back_by_a_silent_store(silent_port, monkeypatch):
    monkeypatch.setattr(startup, "_LINGER_S", 1.0)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent_port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    assert not startup.report_early_failure("anything")
    assert time.monotonic() - started < HANG_S


class _Stuck:
    """A store whose requests wait until they are let go."""

    def __init__(self):
        self.free, self.seen = threading.Event(), []

    def __getattr__(self, name):
        def request(*arguments):
            self.free.wait()
            self.seen.append((name, *arguments))
            return 7

        return request


def test_after_one_request_without_an_answer_all_fail_at_once():
    stuck = _Stuck()
    store = BoundedStore(lambda: stuck, 2 * HANG_S)
    store.post("a", "1")  # doesn't wait
    with answers_within(0.3), pytest.raises(StoreTimeoutError, match="didn't answer within"):
        store.add("b", 1)
    started = time.monotonic()
    for request in (lambda: store.check("c"), lambda: store.set("c", "d"), lambda: store.compare_set("c", "", "d")):
        with pytest.raises(StoreTimeoutError, match="an earlier request"):
            request()
    assert time.monotonic() - started < HANG_S
    stuck.free.set()


def test_a_bound_covers_all_requests_inside_and_the_shortest_counts(monkeypatch):
    real = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(lambda: real, 60.0)
    late_s = 0.0
    monkeypatch.setattr(bounded_store, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    with answers_within(30.0), answers_within(60.0):
        assert store.add("n", 2) == 2
        late_s = 45.0
        with pytest.raises(StoreTimeoutError, match="no time left"):
            store.add("n", 1)
    # The store itself is as well as before.
    store.post("n", "5")
    assert store.get("n") == b"5"
    assert store.compare_set("m", "", "first") == b"first"
    assert (store.check("m"), store.check("k")) == (True, False)
    store.delete_key("m")
    assert not store.check("m")


@pytest.mark.parametrize("appends", [True, False], ids=["TCPStore", "FileStore"])
def test_what_many_ranks_have_written_is_one_list(tmp_path, appends):
    make = {
        True: lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        False: lambda: dist.FileStore(str(tmp_path / "store"), -1),
    }
    store = BoundedStore(lambda: dist.PrefixStore("some", make[appends]()), 60.0)
    assert store.lines("list") == []
    store.delete_lines("list")
    lines = ["0 a", "1 a b \\n", "0 a"]
    store.post_line("list", lines[0])
    for line in lines[1:]:
        store.enter("list", line)
    store.enter("another", "x")
    assert store.lines("list") == lines
    store.delete_lines("list")
    assert (store.lines("list"), store.lines("another")) == ([], ["x"])


def test_a_stores_own_error_is_raised_and_its_thread_ends_with_it():
    def refuse():
        raise dist.DistNetworkError("no such host")

    with pytest.raises(dist.DistNetworkError, match="no such host"):
        BoundedStore(refuse, 60.0)
    real = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Those of other tests may be about to end.
    before = {*threading.enumerate()}
    store = BoundedStore(lambda: real, 60.0)
    (thread,) = {*threading.enumerate()} - before
    del store
    assert not thread.is_alive()
    assert issubclass(bounded_store.StoreTimeoutError, dist.DistError)
    assert not issubclass(bounded_store.StoreTimeoutError, CuboidError)
