"""The rig of the benchmarks: its names and lines, and real namespaces that hold their rate and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from network.names import (
    MTU_BYTES,
    PREFIX,
    SUBNET,
    Names,
    address,
    burst_bytes,
    hardware_address,
    hub_lines,
    parse_namespaces,
    parse_sent_bytes,
    parse_start_ticks,
    port,
    rank_lines,
    rate_line,
)
from network.networks import Loopback, NetworkError, remove_stale, shaped_network, why_not_shaped

TIMEOUT_S = 120
HEADING = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
#: Longest name of an interface in Linux.
INTERFACE_NAME = 15

names = st.builds(Names, pid=st.integers(1, 2**22), ticks=st.integers(0, 2**40))


def script(folder, text):
    path = folder / "script.py"
    path.write_text(HEADING + textwrap.dedent(text))
    return path


def namespaces(pid):
    """Namespaces that a process of that number has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = [(name, Names.of(name)) for name in parse_namespaces(listed.stdout)]
    return [name for name, owner in found if owner is not None and owner.pid == pid]


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
            with shaped_network(2) as network:
                network.set_rate(10.0)
        except (NetworkError, OSError) as error:
            reason = str(error)
    if reason is not None:
        pytest.skip(reason)


@given(names, st.integers(0, 65_000))
def test_a_namespace_tells_whose_it_is(owner, rank):
    assert Names.of(owner.rank(rank)) == owner
    assert Names.of(owner.hub) == owner


@given(st.text())
def test_namespaces_of_others_are_nobody_s(text):
    assert Names.of(text) is None
    assert Names.of(f"{PREFIX}-{text}x") is None


@given(st.sets(st.integers(0, 65_000), min_size=2, max_size=2))
def test_ranks_have_addresses_of_their_own(ranks):
    one, other = ranks
    assert address(one) != address(other)
    assert hardware_address(one) != hardware_address(other)
    assert port(one) != port(other)
    assert len(port(one)) <= INTERFACE_NAME
    assert address(one) not in (str(SUBNET.network_address), str(SUBNET.broadcast_address))


@given(names, st.integers(1, 20))
def test_each_rank_hangs_on_the_bridge_and_knows_all_others(owner, ranks):
    cables = [line for line in hub_lines(owner, ranks) if " type veth " in line]
    assert len(cables) == ranks
    assert len(owner.all(ranks)) == len(set(owner.all(ranks))) == ranks + 1
    for rank, cable in enumerate(cables):
        assert cable.endswith(f"netns {owner.rank(rank)}")
        known = [line for line in rank_lines(rank, ranks) if line.startswith("neighbour")]
        assert len(known) == ranks - 1
        assert not any(f" {address(rank)} " in line for line in known)


@given(st.floats(0.1, 100_000))
def test_a_rate_is_told_in_bits(rate_mbit):
    words = rate_line("e0", rate_mbit).split()
    bits = words[words.index("rate") + 1]
    assert float(bits.removesuffix("bit")) == pytest.approx(rate_mbit * 1e6, abs=0.5)
    burst = int(words[words.index("burst") + 1].removesuffix("b"))
    # Fast links take what TCP hands to a card in one piece, headers included, without cutting it.
    assert burst == burst_bytes(rate_mbit)
    assert burst > (65536 + 1000 if rate_mbit >= 100 else 2 * MTU_BYTES)


def test_no_rate_is_no_queue():
    assert rate_line("e0", None) == "qdisc replace dev e0 root noqueue"


def test_listed_namespaces_are_read_with_and_without_numbers():
    assert parse_namespaces("one (id: 3)\ntwo\n\n") == ["one", "two"]


def test_sent_bytes_are_those_of_the_interface():
    table = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo:     111 1 0 0 0 0 0 0      222 1 0 0 0 0 0 0\n"
        "    e0: 3333333 2 0 0 0 0 0 0  4444444 2 0 0 0 0 0 0\n"
    )
    assert parse_sent_bytes(table, "e0") == 4444444
    assert parse_sent_bytes(table, "lo") == 222
    with pytest.raises(ValueError, match="no interface e1"):
        parse_sent_bytes(table, "e1")


@pytest.mark.parametrize("command", ["python", "two words", "with ) in it", "7 (8) 9"])
def test_the_start_of_a_process_is_read_whatever_it_is_called(command):
    fields = " ".join(str(number) for number in range(4, 53))
    assert parse_start_ticks(f"17 ({command}) S {fields}") == 22


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
    import json, os, socket, time
    from network.networks import NetworkError, shaped_network
    from network.ranks import forked_ranks
    from network.rate import Link, verify_rate

    before = [name for _, name in socket.if_nameindex()]
    with shaped_network(4) as network:
        inside = [name for _, name in socket.if_nameindex()]
        with forked_ranks(network, lambda rank: Link(network), timeout_s=60.0) as ranks:
            network.set_rate(20.0)
            rate = verify_rate(network, ranks)
            seen = ranks.call("exchange", 1_000_000, time.perf_counter(), timeout_s=60.0)
            network.rate_mbit = 10.0  # which it isn't
            try:
                refused = verify_rate(network, ranks)
            except NetworkError as error:
                refused = str(error)
    sent = [each.interface_bytes for each in seen]
    print("RESULT", json.dumps([os.getpid(), before == inside, rate, sent, refused]))
"""


@pytest.mark.usefixtures("_namespaces_work")
def test_the_rate_holds_the_bytes_agree_and_nothing_is_left(tmp_path):
    status, output = finish(start(sys.executable, script(tmp_path, MEASURING)), TIMEOUT_S)
    assert status == 0, output
    pid, untouched, rate, sent, refused = json.loads(output.rpartition("RESULT")[2])
    assert untouched
    assert 0.9 * 20 <= rate <= 1.03 * 20
    assert len(sent) == 4
    assert all(1_000_000 < each < 1.02 * 1_000_000 for each in sent)
    assert "were set to 10 Mbit/s, but 4 of 4 ranks" in refused
    assert namespaces(pid) == []


#: Started by something that runs in the background, a process ignores SIGINT until it says otherwise.
WAITING = """
    import signal
    import time
    from network.interrupts import signals_as_exceptions
    from network.networks import shaped_network
    from network.ranks import forked_ranks
    from network.rate import Link

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with signals_as_exceptions(), shaped_network(4) as network:
        network.set_rate(10.0)
        with forked_ranks(network, lambda rank: Link(network), timeout_s=60.0) as ranks:
            print("ready", flush=True)
            ranks.call("exchange", 100_000_000, time.perf_counter(), timeout_s=60.0)
"""


@pytest.mark.usefixtures("_namespaces_work")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_nothing_and_a_killed_one_nothing_for_long(tmp_path, number):
    process = start(sys.executable, script(tmp_path, WAITING))
    try:
        wait_for_line(process, "ready")
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        made = namespaces(process.pid)
        assert len(ranks) == 4
        assert len(made) == 5
        os.kill(process.pid, number)
        process.wait(TIMEOUT_S)
    finally:
        _, output = finish(process, TIMEOUT_S)
    wait_until_gone(ranks)
    if number == signal.SIGKILL:
        assert set(made) <= set(remove_stale())
    else:
        assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), output
    assert namespaces(process.pid) == []


@pytest.mark.usefixtures("_namespaces_work")
def test_what_a_running_process_needs_is_not_stale():
    with shaped_network(1) as network:
        assert not set(network.names.all(1)) & set(remove_stale())
        assert set(namespaces(os.getpid())) == set(network.names.all(1))
    assert namespaces(os.getpid()) == []
