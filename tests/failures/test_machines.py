"""The launch lines of docs/machines.md, on two hosts of two ranks each."""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import time

import psutil
import pytest

from cuboid.train.resume import find_run
from launching import BIN, ROOT, end, finish, run, start
from tiny_text import write_model_and_text
from two_hosts import ADDRESSES, INTERFACE, cut_link, hosts_in_namespaces, take_away  # noqa: F401  a fixture

pytestmark = pytest.mark.slow

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 2, "hidden": 1}},
    "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2},
}
HOST = (sys.executable, ROOT / "tests" / "support" / "two_hosts.py")
MEETING = ("--master-addr", ADDRESSES[0], "--master-port", "29400")


def torchrun(host, folder):
    return (BIN / "torchrun", "--nnodes", 2, "--nproc-per-node", 2, "--node-rank", host, *MEETING, "-m", "cuboid.cli")


def rendezvous(host, folder):
    endpoint = ("--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-conf", f"is_host={int(host == 0)}")
    options = (*endpoint, "--local-addr", ADDRESSES[host], "--max-restarts", 2)
    backend = ("--rdzv-backend", "c10d", "--rdzv-id", "run1")
    return (BIN / "torchrun", "--nnodes", 2, "--nproc-per-node", 2, *backend, *options, "-m", "cuboid.cli")


def accelerate(host, folder):
    options = ("--multi_gpu", "--num_machines", 2, "--num_processes", 4, "--machine_rank", host)
    meeting = ("--main_process_ip", ADDRESSES[0], "--main_process_port", 29400)
    return (BIN / "accelerate", "launch", *options, *meeting, "-m", "cuboid.cli")


def deepspeed(host, folder):
    (folder / "hostfile").write_text("host-a slots=2\nhost-b slots=2\n")
    options = ("--hostfile", folder / "hostfile", "--no_ssh", "--node_rank", host)
    meeting = ("--master_addr", ADDRESSES[0], "--master_port", 29400)
    return (BIN / "deepspeed", *options, *meeting, "--module", "cuboid.cli")


#: Of runs that are disturbed, which have to last until they are.
LONG = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny checkpoint, text and a config, and the losses of a run on one host."""
    folder = tmp_path_factory.mktemp("job")
    write_model_and_text(folder, layers=2)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alone = (BIN / "torchrun", "--standalone", "--nproc-per-node", 4, "-m", "cuboid.cli")
    status, output = run(*alone, *train(folder, folder / "alone"))
    assert status == 0, output
    assert "hosts:" not in output
    return folder


def train(job, out, steps=6):
    files = ("--model", job / "model", "--data", job / "text", "--config", job / "config.json", "--out", out)
    return ("train", *files, "--sequence-length", 32, "--steps", steps, "--save-every", 2, "--resume", "auto")


def losses_of(out):
    return json.loads((out / "report.json").read_text())["train_losses"]


@pytest.fixture(scope="module")
def losses_of_a_long_run(job):
    """On one host, without a disturbance."""
    out = job / "long"
    status, output = run(
        BIN / "torchrun", "--standalone", "--nproc-per-node", 4, "-m", "cuboid.cli", *train(job, out, LONG)
    )
    assert status == 0, output
    return losses_of(out)


def start_on(host, way, hub, job, out, steps=6, **variables):
    command = (*way(host, out.parent), *train(job, out, steps))
    return start(*HOST, host, hub, *command, GLOO_SOCKET_IFNAME=INTERFACE, **variables)


def start_on_both(way, hub, job, out, steps=6, **variables):
    return [start_on(host, way, hub, job, out, steps, **variables) for host in range(2)]


def await_checkpoint(out):
    deadline = time.monotonic() + 240
    while not (out / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("way", [torchrun, rendezvous, accelerate, deepspeed])
def test_a_launch_line_trains_as_one_host_does(two_hosts, job, tmp_path, way):
    hosts = start_on_both(way, two_hosts, job, tmp_path / "out")
    endings = [finish(host, timeout_s=240) for host in hosts]
    assert [status for status, _ in endings] == [0, 0], endings
    said = "".join(output for _, output in endings)
    assert said.count("2 hosts: stages cross them; sequence stay inside") == 1, said
    assert losses_of(tmp_path / "out") == losses_of(job / "alone")


def test_all_ranks_start_again_where_one_was_killed(two_hosts, job, tmp_path):
    out = tmp_path / "out"
    hosts = start_on_both(rendezvous, two_hosts, job, out, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        await_checkpoint(out)
        os.kill(max(ranks_of(hosts[1])), signal.SIGKILL)
        endings = [finish(host, timeout_s=300) for host in hosts]
    finally:
        for host in hosts:
            end(host)
    assert [status for status, _ in endings] == [0, 0], endings
    assert find_run(out).state.resumed_after
    assert losses_of(out) == losses_of(job / "alone")


@pytest.mark.parametrize("way", ["killed", "cut off"])
def test_where_a_host_is_lost_both_end_and_the_same_lines_go_on(two_hosts, job, losses_of_a_long_run, tmp_path, way):
    out = tmp_path / "out"
    hosts = start_on_both(torchrun, two_hosts, job, out, LONG, DEEPSPEED_TIMEOUT="1")
    try:
        await_checkpoint(out)
        end(hosts[1]) if way == "killed" else cut_link(two_hosts, 1)
        endings = [finish(host, timeout_s=300) for host in hosts]
    finally:
        for number, host in enumerate(hosts):
            end(host)
            take_away(two_hosts, number)
    for status, output in endings if way == "cut off" else endings[:1]:
        assert status == 1, output
        # It may be lost in a step or in a save.
        told = r"^cuboid: .*(waited for it in|didn't come to|the process group doesn't answer)"
        assert re.search(told, output, re.MULTILINE), output
    assert not (out / "report.json").exists()
    hosts = start_on_both(torchrun, two_hosts, job, out, LONG, DEEPSPEED_TIMEOUT="1")
    endings = [finish(host, timeout_s=300) for host in hosts]
    assert [status for status, _ in endings] == [0, 0], endings
    assert find_run(out).state.resumed_after
    assert losses_of(out) == losses_of_a_long_run


def test_a_host_that_was_lost_is_started_again_beside_the_other_which_waits_for_it(
    two_hosts, job, losses_of_a_long_run, tmp_path
):
    out = tmp_path / "out"
    run_on = functools.partial(
        start_on,
        way=rendezvous,
        hub=two_hosts,
        job=job,
        out=out,
        steps=LONG,
        DEEPSPEED_TIMEOUT="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    hosts = [run_on(host) for host in range(2)]
    try:
        await_checkpoint(out)
        end(hosts[1])
        take_away(two_hosts, 1)
        hosts[1] = run_on(1)
        endings = [finish(host, timeout_s=300) for host in hosts]
    finally:
        for host in hosts:
            end(host)
    assert [status for status, _ in endings] == [0, 0], endings
    assert find_run(out).state.resumed_after
    assert losses_of(out) == losses_of_a_long_run


def ranks_of(launcher):
    """Process ids of the ranks that a launcher has started."""
    pids = []
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "LOCAL_RANK" in child.environ():
                pids.append(child.pid)
    return pids


def test_the_slurm_template_queues_the_job_again_until_it_is_done(job, tmp_path):
    """With stand-ins for Slurm's commands, and one node."""
    commands = {
        "srun": 'shift; exec "$@"',
        "scontrol": f'[ "$1" = requeue ] && echo "$2" >> {tmp_path}/queued; [ "$1" = show ] && echo localhost; true',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "scheduler": schedule}))
    out = tmp_path / "out"
    slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    files = {"MODEL": job / "model", "DATA": job / "text", "CONFIG": tmp_path / "config.json", "OUT": out}
    names = {name: str(path) for name, path in files.items()}
    variables = {
        **slurm,
        **names,
        "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        "RANKS_PER_NODE": "4",
        "SEQUENCE": "32",
    }
    template = ROOT / "configs" / "slurm" / "train.sbatch"
    status, output = run("bash", template, **variables, MAX_TIME="1")
    assert status == 1, output
    assert "stopped by --max-time after step 1" in output
    assert (tmp_path / "queued").read_text() == "7\n"
    assert find_run(out).state.step == 1
    # Started again, it goes on. Once it has been started often enough, it isn't queued any more.
    status, output = run("bash", template, **variables, MAX_TIME="1", SLURM_RESTART_COUNT="20")
    assert status == 1, output
    assert find_run(out).state.step == 2
    assert (tmp_path / "queued").read_text() == "7\n"
