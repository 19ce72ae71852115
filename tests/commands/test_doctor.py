"""``cuboid doctor``: each of its findings is provoked, and comes with a cure."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import typer

from cuboid.checkpoint import run_lock
from cuboid.cli import app
from cuboid.cli.doctor import doctor
from cuboid.doctor import all_reduce, devices, examination, launchers, network, packages, resources, run_folder
from cuboid.doctor.finding import State, note, problem, right, within
from cuboid.doctor.hostfile import hosts
from cuboid.doctor.links import Link, judge, measure
from launching import run
from warm_python import warm_python


def texts(findings, state=State.PROBLEM):
    """What is said of one state; each problem has a cure."""
    findings = list(findings)
    assert all(finding.cure for finding in findings if finding.state is State.PROBLEM)
    return [finding.text for finding in findings if finding.state is state]


# --- packages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_packages(tmp_path, monkeypatch):
    """Packages that take the place of torch and the others: one fails, one ends the process, one is fine."""
    for name, code in {
        "broken_one": "raise OSError('libcudart.so.12: no such file')",
        "deadly_one": "import os, signal; print('noise'); os.kill(os.getpid(), signal.SIGKILL)",
        "fine_one": "print('noise')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    names = dict.fromkeys(["broken_one", "deadly_one", "fine_one"], ">=1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(packages, "RANGES", names)
    monkeypatch.setattr(packages, "OPTIONAL", {})
    monkeypatch.setattr(packages, "_is_installed", names.__contains__)
    monkeypatch.setattr(packages, "check_version", lambda name: None)
    monkeypatch.setattr(packages, "version", lambda name: "1.0")


def test_a_broken_package_is_named_and_the_others_are_tried(three_packages):
    installation = packages.Installation()
    findings = list(packages.installed(installation))
    assert texts(findings) == [
        "1.0 can't be imported: OSError: libcudart.so.12: no such file",
        "1.0 can't be imported: its import was killed by signal 9: noise",
    ]
    assert [finding.check for finding in findings if finding.state is State.RIGHT] == ["fine_one"]
    assert not installation.has_torch
    assert texts(devices.visible(installation), State.NOTE) == ["not looked at, since torch can't be imported"]
    assert texts(examination._all_reduce(installation), State.NOTE)


def test_an_import_that_hangs_is_ended(three_packages, tmp_path, monkeypatch):
    (tmp_path / "deadly_one" / "__init__.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(packages, "_PATIENCE_S", 2.0)
    assert packages.Installation().errors["deadly_one"] == "its import didn't end within 2 s"


def test_versions_that_are_missing_or_unsupported(monkeypatch):
    def installed(name):
        if name in ("accelerate", "peft"):
            raise packages.PackageNotFoundError(name)
        return {"torch": "2.5.1"}.get(name) or version(name)

    version = packages.version
    for module in ("cuboid.requirements", "cuboid.doctor.packages"):
        monkeypatch.setattr(f"{module}.version", installed)
    known = SimpleNamespace(errors=dict.fromkeys([*packages.RANGES, *packages.OPTIONAL], ""))
    findings = list(packages.installed(known))
    old, missing = texts(findings)
    assert old == f"cuboid works with torch {packages.RANGES['torch']}, but 2.5.1 is installed"
    assert "accelerate" in missing
    assert "which is not installed" in missing
    assert "not installed; needed for LoRA alone" in texts(findings, State.RIGHT)
    assert findings[0].cure == f"pip install 'torch{packages.RANGES['torch']}'"


@pytest.mark.parametrize(
    ("number", "state"), [("3.10.9", State.PROBLEM), ("3.11.7", State.RIGHT), ("3.13.1", State.NOTE)]
)
def test_python(monkeypatch, number, state):
    monkeypatch.setattr(packages.platform, "python_version", lambda: number)
    assert [finding.state for finding in packages.python()] == [state]


# --- devices and launchers -----------------------------------------------------------------------------------------

CPU_BUILD = {"cuda": None, "hip": None, "gloo": True, "nccl": None, "failure": "", "found": []}
CUDA_BUILD = {**CPU_BUILD, "cuda": "12.8", "nccl": "2.27.3"}
GPU = {"name": "NVIDIA H100", "free": 70 << 30, "total": 80 << 30, "failure": ""}
DEVICES = {
    "no GPU": (CPU_BUILD, "", {}, []),
    "a CPU build": (CPU_BUILD, "echo 'GPU 0: NVIDIA H100'", {}, ["has 1 GPU(s), but this torch is built without CUDA"]),
    "hidden": (CUDA_BUILD, "echo 'GPU 0: A'; echo 'GPU 1: B'", {"CUDA_VISIBLE_DEVICES": ""}, ["hides all 2 GPU(s)"]),
    "an old driver": ({**CUDA_BUILD, "failure": "driver too old"}, "echo 'GPU 0: A'", {}, ["old (torch is built for"]),
    "a broken driver": (CUDA_BUILD, "echo 'Failed to initialize NVML'; exit 9", {}, ["nvidia-smi: Failed to init"]),
    "a hanging driver": (CUDA_BUILD, "exec sleep 60", {}, ["nvidia-smi doesn't answer within 1 s"]),
    "no kernels": (
        {**CUDA_BUILD, "found": [{**GPU, "failure": "no kernel image"}]},
        "",
        {},
        ["GPU 0, NVIDIA H100: no"],
    ),
    "no NCCL": ({**CUDA_BUILD, "nccl": None, "found": [GPU]}, "", {}, ["has no NCCL"]),
    "no gloo": ({**CPU_BUILD, "gloo": False}, "", {}, ["has no gloo"]),
    "another accelerator": (
        CPU_BUILD,
        "",
        {"DS_ACCELERATOR": "cuda"},
        ["DS_ACCELERATOR='cuda', but torch sees no GPU"],
    ),
    "right": ({**CUDA_BUILD, "found": [GPU]}, "echo 'GPU 0: NVIDIA H100'", {"DS_ACCELERATOR": ""}, []),
}


def command(folder, name, code):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("case", DEVICES)
def test_devices(tmp_path, monkeypatch, case):
    seen, driver, variables, expected = DEVICES[case]
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if driver:
        command(tmp_path / "bin", "nvidia-smi", driver)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(devices, "_DRIVER_S", 1.0)
    findings = list(devices.visible(SimpleNamespace(devices=seen)))
    problems = texts(findings)
    assert len(problems) == len(expected), problems
    assert all(word in text for word, text in zip(expected, problems, strict=True)), problems
    if case == "right":
        assert texts(findings, State.RIGHT) == ["GPU 0, NVIDIA H100: 70.0 of 80.0 GiB free", "2.27.3"]


def test_launchers(tmp_path, monkeypatch):
    for name in ("torchrun", "deepspeed"):
        command(tmp_path / "ours", name, "")
    command(tmp_path / "theirs", "torchrun", "")
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "ours" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "theirs"))
    findings = list(launchers.on_path())
    foreign, missing = texts(findings)
    assert f"{tmp_path}/theirs/torchrun, of another environment than {tmp_path}/ours/python" in foreign
    assert "accelerate is neither on PATH nor in" in missing
    assert texts(findings, State.NOTE) == ["deepspeed isn't on PATH"]
    command(tmp_path / "ours", "accelerate", "")
    monkeypatch.setenv("PATH", str(tmp_path / "ours"))
    assert [finding.state for finding in launchers.on_path()] == [State.RIGHT]


# --- network -------------------------------------------------------------------------------------------------------


def resolving_to(monkeypatch, answer):
    def getaddrinfo(host, *_, **__):
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("answer", "has_peers", "state", "word"),
    [
        (socket.gaierror(-2, "Name or service not known"), False, State.PROBLEM, "doesn't resolve: Name or service"),
        ("198.51.100.7", False, State.PROBLEM, "198.51.100.7 is no address of this host"),
        ("127.0.1.1", True, State.PROBLEM, "where other hosts can't reach it"),
        ("127.0.1.1", False, State.NOTE, "enough for runs on this host alone"),
        ("10.1.2.3", True, State.RIGHT, "resolves to 10.1.2.3"),
    ],
)
def test_host_name(monkeypatch, answer, has_peers, state, word):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    resolving_to(monkeypatch, answer)
    monkeypatch.setattr(network, "_local_addresses", lambda: {"eth0": ["10.1.2.3"]})
    (finding,) = network.host_name(has_peers=has_peers)
    assert (finding.state, word in finding.text) == (state, True), finding


def test_a_resolver_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(network, "_RESOLVE_S", 0.1)
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: time.sleep(5))
    assert "gives no answer" in texts(network.host_name(has_peers=False))[0]
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(5))


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("GLOO_SOCKET_IFNAME", "nowhere0", "'nowhere0' is not there"),
        ("GLOO_SOCKET_IFNAME", "down0", "'down0' is down or has no address"),
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("NCCL_SOCKET_IFNAME", "ib", "'ib' is not there"),
        ("NCCL_SOCKET_IFNAME", "=eth", "'eth' is not there"),
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "^down", None),
    ],
)
def test_interfaces(monkeypatch, variable, value, word):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(network, "_local_addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.1.2.3"], "down0": []})
    states = {name: SimpleNamespace(isup=name != "down0") for name in ("lo", "eth0", "down0")}
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: states)
    findings = list(network.interfaces())
    assert texts(findings) == ([] if word is None else [f"{variable}={value!r}, but {word}"])
    assert word is not None or f"{variable} chooses eth0 (10.1.2.3)" in texts(findings, State.RIGHT)


def test_ports(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        monkeypatch.setattr(network.socket, "gethostname", lambda: "127.0.0.1")
        assert texts(network.ports(number)) == [f"port {number}, where ranks would meet: Address already in use"]
        monkeypatch.setenv("MASTER_PORT", str(number))
        assert len(texts(network.ports(None))) == 1

    def refused(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(network.socket, "create_connection", refused)
    (text,) = texts(network.ports(number))
    assert text.startswith("a port that is open here can't be reached by the host's name, 127.0.0.1: ")


def test_hostfiles(tmp_path, monkeypatch):
    path = tmp_path / "hostfile"
    monkeypatch.setenv("PATH", "")
    resolving_to(monkeypatch, "10.1.2.3")
    path.write_text("# two\none slots=8\ntwo   slots=4 # spare\n\n")
    findings = list(hosts(path))
    assert texts(findings, State.RIGHT) == [f"{path}: 2 host(s) with 12 slots, all names resolve"]
    assert texts(findings, State.NOTE) == ["pdsh isn't on PATH; deepspeed starts other hosts by it"]
    path.write_text("one slots=8\none slots=8\ntwo\nthree slots=0\n")
    assert texts(hosts(path)) == [
        f"{path}, line 2: one is there twice",
        f"{path}, line 3: 'two'",
        f"{path}, line 4: 'three slots=0'",
    ]
    path.write_text("one slots=1\ntwo slots=1\n")
    resolving_to(monkeypatch, socket.gaierror(-2, "Name or service not known"))
    assert texts(hosts(path))[1] == f"{path}: two doesn't resolve: Name or service not known"
    resolving_to(monkeypatch, "127.0.0.1")
    assert texts(hosts(path))[0] == f"{path}: one is 127.0.0.1, which is another host on each host"
    path.write_text("# nothing\n")
    assert texts(hosts(path)) == [f"{path}: names no host"]
    assert "No such file" in texts(hosts(tmp_path / "nowhere"))[0]
    assert "is a folder" in texts(hosts(tmp_path))[0]


# --- resources -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_file_system(folder):
    """A tmpfs of 64 KiB and ten files, where this process may mount one."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k,nr_inodes=10", "tiny", folder]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_and_small_shared_memory(tmp_path, monkeypatch):
    with tiny_file_system(tmp_path / "tiny") as folder:
        assert texts(resources.disk(folder / "run")) == [f"{folder}/run: 0.0 GiB free"]
        monkeypatch.setattr(resources, "_LEAST_DISK", 1)
        assert texts(resources.disk(folder)) == [f"{folder}: room for 9 more files"]
        monkeypatch.setattr(resources, "_SHARED", folder)
        assert texts(resources.shared_memory()) == [f"{folder}: 0.00 of 0.00 GiB free, too few"]
        monkeypatch.setattr(resources, "_LEAST_SHARED", 0)
        (finding,) = resources.shared_memory()
        assert "remove what killed processes have left" in finding.cure
    monkeypatch.setattr(resources, "_SHARED", tmp_path / "nowhere")
    assert texts(resources.shared_memory()) == [f"{tmp_path}/nowhere is not there"]


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert texts(resources.disk(tmp_path / "file" / "run")) == [f"{tmp_path}/file/run: {tmp_path}/file is a file"]
    monkeypatch.setattr(resources.os, "access", lambda *_: False)
    assert texts(resources.disk(tmp_path / "run")) == [f"{tmp_path}/run: {tmp_path} may not be written by this user"]
    monkeypatch.setattr(resources.os, "statvfs", lambda _: time.sleep(5))
    monkeypatch.setattr(resources, "_FILE_SYSTEM_S", 0.1)
    assert texts(resources.disk(tmp_path)) == [f"{tmp_path}: its file system doesn't answer"]


def test_limits(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    limits[resource.RLIMIT_FSIZE] = (1 << 20, resource.RLIM_INFINITY)
    monkeypatch.setattr(resources.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resources, "_has_infiniband", lambda: True)
    findings = list(resources.limits())
    assert texts(findings) == [
        "256 open files",
        "65,536 bytes of locked memory, too few for InfiniBand's buffers",
        "files end at 1,048,576 bytes: a checkpoint's may be larger",
    ]
    assert findings[0].cure == "ulimit -n 4096 before the launcher"
    limits |= dict.fromkeys(limits, (2048, 4096))
    assert texts(resources.limits(), State.NOTE) == ["2048 open files, few for many ranks"]
    limits |= dict.fromkeys(limits, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert {finding.state for finding in resources.limits()} == {State.RIGHT}


# --- a run's folder ------------------------------------------------------------------------------------------------


def test_locks(tmp_path):
    def look():
        return list(run_folder.run_folder(tmp_path, said.append))

    said = []
    assert texts(look(), State.RIGHT)[0] == f"{tmp_path} belongs to no run"
    with run_lock.held(tmp_path, "cuboid train", said.append):
        assert texts(look())[0].startswith(f"{tmp_path} is in use by `cuboid train`, process {os.getpid()} on host ")
    path = tmp_path / run_lock.LOCK
    holder = run_lock.Holder.here("cuboid train")
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait()
    path.write_text(holder.model_copy(update={"pid": ended.pid}).model_dump_json())
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert any(
        text.startswith(f"{path} is stale, of `cuboid train`, process {ended.pid}")
        for text in texts(look(), State.RIGHT)
    )
    path.write_text("mine")
    assert texts(look()) == [f"{path}: isn't the lock of a run of Cuboid's; move it away"]
    assert before[1] <= path.stat().st_mtime_ns
    assert not said


def test_a_lock_of_another_host_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_WATCH_S", 0.2)
    monkeypatch.setattr(run_lock, "_LOOK_S", 0.05)
    said, path = [], tmp_path / run_lock.LOCK
    holder = run_lock.Holder.here("cuboid train").model_copy(update={"processes": "another", "host": "far"})
    path.write_text(holder.model_dump_json())
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert "is stale" in texts(run_folder.run_folder(tmp_path, said.append), State.RIGHT)[0]
    assert "on host far" in said[0]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_there_has_to_be_room_for_the_next_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "global_step1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", 8 << 40)
    assert "but the newest checkpoint there takes 8192.0" in texts(run_folder.run_folder(tmp_path, print))[0]


# --- all of it -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_cannot_meet_are_a_problem(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    (text,) = texts(all_reduce.two_processes())
    assert "two processes over gloo: ended with status 1: " in text
    assert "nowhere0" in text


@pytest.mark.parametrize(("lines", "has_peers"), [("one slots=8\n", False), ("one slots=8\ntwo slots=8\n", True)])
def test_a_host_alone_in_its_hostfile_has_no_peers(tmp_path, monkeypatch, lines, has_peers):
    for module, name in ((packages, "installed"), (devices, "visible"), (examination, "_all_reduce")):
        monkeypatch.setattr(module, name, lambda _: [right("a", "b")])
    monkeypatch.setattr(network, "host_name", lambda *, has_peers: [note("host name", f"peers: {has_peers}", "")])
    resolving_to(monkeypatch, "10.1.2.3")
    path = tmp_path / "hostfile"
    path.write_text(lines)
    findings = list(examination.examine(out=None, hostfile=path, port=None, say=print))
    assert f"peers: {has_peers}" in texts(findings, State.NOTE)


def test_a_look_that_fails_hides_nothing(monkeypatch):
    def fail(**_):
        raise RuntimeError("no such thing")

    for module, name in ((packages, "installed"), (devices, "visible"), (examination, "_all_reduce")):
        monkeypatch.setattr(module, name, lambda _: [right("a", "b")])
    monkeypatch.setattr(network, "host_name", fail)
    findings = list(examination.examine(out=None, hostfile=None, port=None, say=print))
    assert "couldn't be looked at: RuntimeError: no such thing" in texts(findings)
    assert findings[-1].check == "disk"


@pytest.mark.parametrize("is_json", [True, False])
def test_exit_status_and_form(monkeypatch, capsys, is_json):
    findings = [right("a", "is there"), note("b", "is slow", "wait")]
    monkeypatch.setattr("cuboid.doctor.examination.examine", lambda **_: iter(findings))
    monkeypatch.setattr("cuboid.requirements.RANGES", {"torch": ">=99"})
    for status in (0, 1):
        monkeypatch.setattr("sys.argv", ["cuboid", "doctor", *["--json"] * is_json])
        with pytest.raises(SystemExit) as ended:
            app()
        assert ended.value.code == status
        output = capsys.readouterr().out
        if is_json:
            report = json.loads(output)
            assert report["passed"] == (status == 0)
            assert report["findings"][1] == {"check": "b", "state": "note", "text": "is slow", "cure": "wait"}
        else:
            expected = "right    a: is there\nnote     b: is slow\n         cure: wait\n"
            last = "problem  c: is gone\n         cure: buy\n1 problem found\n" if status else "0 problems found\n"
            assert output == expected + last
        findings.append(problem("c", "is gone", "buy"))


@pytest.mark.ci
def test_a_real_look_at_this_machine_changes_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        arguments = ["doctor", "--json", "--out", tmp_path / "run", "--port", port]
        status, output = run(warm_python(), "-m", "cuboid.cli", *arguments)
    assert status == 1, output
    findings = json.loads(output)["findings"]
    assert any(f"port {port}, where ranks would meet" in finding["text"] for finding in findings)
    by_check = {finding["check"]: finding for finding in findings}
    for package in packages.RANGES:
        assert (by_check[package]["state"], by_check[package]["text"]) == ("right", packages.version(package))
    assert by_check["all-reduce"]["state"] == "right", by_check
    assert by_check["lock"]["state"] == "right"
    assert not list(tmp_path.iterdir())


def link(ranks, distance, latency_s=1e-4, bytes_per_s=1e9):
    return Link(distance, ranks, tuple(f"host-{rank // 2}" for rank in ranks), latency_s, bytes_per_s)


def test_a_link_that_is_much_slower_than_the_others_is_named():
    near = [link((rank, rank + 1), 1) for rank in (0, 2, 4)]
    far = [link((0, 2), 2), link((1, 3), 2, bytes_per_s=1e8), link((4, 6), 2), link((5, 7), 2, latency_s=1e-3)]
    findings = list(judge([*near, *far]))
    assert [finding.state for finding in findings] == ["right", "right", "note", "note"]
    assert findings[0].text == "ranks 1 apart, inside hosts: 100 µs, 1.00 GB/s each way"
    assert "between hosts" in findings[1].text
    assert findings[2].text.startswith("rank 1 on host-0 and rank 3 on host-1: 100 µs, 0.10 GB/s")
    assert "rank 7 on host-3: 1000 µs" in findings[3].text
    assert all("slowest link" in finding.cure for finding in findings[2:])


def measured(_):
    return measure("cpu")


def test_links_are_measured_between_the_ranks_of_a_launcher(pool):
    for links in pool.run(3, measured, None):
        assert [(x.distance, x.ranks) for x in links] == [(1, (0, 1)), (2, (0, 2))]
        assert all(x.latency_s > 0 and x.bytes_per_s > 0 for x in links)


def test_links_need_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.BadParameter, match="torchrun"):
        doctor(links=True)
