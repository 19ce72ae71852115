"""The rig of the benchmarks: real namespaces that hold their rate and are gone with who made them, and their ranks."""

import json
import os
import signal
import socket
import sys
import textwrap
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from network.networks import Loopback, NetworkError, _rate_line, burst_bytes, open_network, why_not_shaped

TIMEOUT_S = 120
HEADING = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"


def script(folder, text):
    path = folder / "script.py"
    path.write_text(HEADING + textwrap.dedent(text))
    return path


def namespaces(pids):
    """Network namespaces that processes are in, without this one's."""
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids} - {os.readlink("/proc/self/ns/net")}


def wait_for_line(process, wanted):
    """Read a process's output up to a line."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.strip() == wanted:
            return
    raise AssertionError("".join(seen))


def wait_until_gone(pids):
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"some of {pids} are still there"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def _namespaces_work():
    reason = why_not_shaped()
    if reason is None:
        try:
            with open_network("shaped", 2):
                pass
        except (NetworkError, OSError) as error:
            reason = str(error)
    if reason is not None:
        pytest.skip(reason)


@given(st.floats(0.1, 100_000))
def test_a_rate_is_told_in_bits(rate_mbit):
    words = _rate_line("e0", rate_mbit).split()
    bits = words[words.index("rate") + 1]
    assert float(bits.removesuffix("bit")) == pytest.approx(rate_mbit * 1e6, abs=0.5)
    burst = int(words[words.index("burst") + 1].removesuffix("b"))
    # Fast links take what TCP hands to a card in one piece, headers included, without cutting it.
    assert burst == burst_bytes(rate_mbit)
    assert burst > (65536 + 1000 if rate_mbit >= 100 else 2 * 9000)


def test_no_rate_is_no_queue():
    assert _rate_line("e0", None) == "qdisc replace dev e0 root noqueue"


def test_loopback_has_no_rate():
    network = Loopback(2)
    network.set_rate(None)
    with pytest.raises(NetworkError, match="no rate"):
        network.set_rate(10.0)


FAILING = """
    import json, os, torch.distributed as dist
    from network.networks import Loopback
    from network.ranks import RankError, forked_ranks

    class Kept:
        def __init__(self, rank):
            self.rank = rank
        def double(self, number):
            return self.rank, 2 * number
        def fail(self):
            if self.rank == 1:
                raise ValueError("on purpose")
            dist.barrier()
        def die(self):
            if self.rank == 2:
                os._exit(7)
            dist.barrier()
        def hang(self):
            dist.barrier() if self.rank else None

    said = {}
    for method, timeout_s in (("double", 60.0), ("fail", 60.0), ("die", 60.0), ("hang", 1.0)):
        with forked_ranks(Loopback(3), Kept, timeout_s=60.0) as ranks:
            try:
                said[method] = ranks.call(method, *([21] if method == "double" else []), timeout_s=timeout_s)
            except RankError as error:
                said[method] = str(error)
    print("RESULT", json.dumps(said))
"""


@pytest.mark.slow
def test_ranks_answer_and_their_failures_are_told(tmp_path):
    status, output = finish(start(sys.executable, script(tmp_path, FAILING)), TIMEOUT_S)
    assert status == 0, output
    said = json.loads(output.rpartition("RESULT")[2])
    assert said["double"] == [[0, 42], [1, 42], [2, 42]]
    assert "rank 1 of 3 failed in fail" in said["fail"]
    assert "ValueError: on purpose" in said["fail"]
    assert "rank 2 of 3 failed in die" in said["die"]
    assert "exit code 7" in said["die"]
    assert "no answer from rank 1, 2 of 3 within 1 s" in said["hang"]


MEASURING = """
    import json, socket, time
    from network.networks import NetworkError, open_network
    from network.ranks import forked_ranks
    from network.rate import Link, set_rate, verify_rate
    from network.serving import Contestant

    class Sending(Contestant):
        def __init__(self, link):
            self.step = lambda: link.exchange(1_000_000, time.perf_counter())

    def keep(rank):
        link = Link(network, lambda entry: Sending(link))
        return link

    before = socket.if_nameindex()
    with open_network("shaped", 4) as network:
        with forked_ranks(network, keep, timeout_s=60.0) as ranks:
            inside = socket.if_nameindex()
            rate = set_rate(ranks, 20.0)
            ranks.call("prepare", "sending")
            steps = ranks.call("step", "sending", time.perf_counter(), timeout_s=60.0)
            try:
                refused = verify_rate(ranks, 10.0)  # which it isn't
            except NetworkError as error:
                refused = str(error)
    sent = [step.interface_bytes for step in steps]
    print("RESULT", json.dumps([before == inside, rate, sent, refused]))
"""


@pytest.mark.usefixtures("_namespaces_work")
@pytest.mark.slow
def test_the_rate_holds_and_the_bytes_agree(tmp_path):
    status, output = finish(start(sys.executable, script(tmp_path, MEASURING)), TIMEOUT_S)
    assert status == 0, output
    untouched, rate, sent, refused = json.loads(output.rpartition("RESULT")[2])
    assert untouched
    assert 0.9 * 20 <= rate <= 1.03 * 20
    assert len(sent) == 4
    assert all(1_000_000 < bytes_of_rank < 1.02 * 1_000_000 for bytes_of_rank in sent)
    assert "were set to 10 Mbit/s, but 4 of 4 ranks" in refused


#: Started by something that runs in the background, a process ignores SIGINT until it says otherwise.
WAITING = """
    import signal
    import time
    from network.networks import open_network
    from network.ranks import forked_ranks
    from network.rate import Link

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open_network("shaped", 4) as network:
        with forked_ranks(network, lambda rank: Link(network, None), timeout_s=60.0) as ranks:
            ranks.call("set_rate", 10.0)
            print("ready", flush=True)
            ranks.call("exchange", 100_000_000, time.perf_counter(), timeout_s=60.0)
"""


@pytest.mark.usefixtures("_namespaces_work")
@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_or_killed_leaves_nothing(tmp_path, number):
    before = socket.if_nameindex()
    process = start(sys.executable, script(tmp_path, WAITING))
    try:
        wait_for_line(process, "ready")
        children = [child.pid for child in psutil.Process(process.pid).children()]
        # Four ranks, and who holds the bridge.
        assert len(children) == len(namespaces(children)) == 5
        assert socket.if_nameindex() == before
        os.kill(process.pid, number)
        process.wait(TIMEOUT_S)
    finally:
        finish(process, TIMEOUT_S)
    # A namespace without a process is no more.
    wait_until_gone(children)
