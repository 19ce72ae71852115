"""The GPUs: whether torch sees those that the driver has, and can use them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from cuboid.doctor.finding import Finding, note, problem, right, within
from cuboid.doctor.packages import Installation

_CHECK = "devices"
#: nvidia-smi waits for a driver that hangs.
_DRIVER_S = 20.0
_BUILD = "install the build of torch for your CUDA: https://pytorch.org/get-started/locally"


def visible(installation: Installation) -> Iterator[Finding]:
    """Whether the GPUs of this host can be used, and NCCL with them."""
    present, driver = _driver()
    if driver:
        yield problem("driver", driver, "a restart of the host, or a new installation of the driver, may mend it")
    seen = installation.devices
    if seen is None:
        yield note(_CHECK, "not looked at, since torch can't be imported")
        return
    if not seen.get("gloo"):
        yield problem("gloo", "this build of torch has no gloo, over which ranks agree and save", _BUILD)
    usable = seen.get("found", ())
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present and not (seen.get("cuda") or seen.get("hip")):
        yield problem(_CHECK, f"the driver has {present} GPU(s), but this torch is built without CUDA", _BUILD)
    elif present and not usable and hidden is not None and not seen.get("failure"):
        yield problem(_CHECK, f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {present} GPU(s)", "unset it, or name some")
    elif seen.get("failure") and (present or hidden):
        built = f"torch is built for CUDA {seen.get('cuda')}"
        yield problem(_CHECK, f"{seen['failure']} ({built})", f"update the driver, or {_BUILD}")
    elif not usable:
        yield from _without_gpu()
    for number, device in enumerate(usable):
        if device["failure"]:
            yield problem(_CHECK, f"GPU {number}, {device['name']}: {device['failure']}", _BUILD)
        else:
            gib = f"{device['free'] / 2**30:.1f} of {device['total'] / 2**30:.1f} GiB free"
            yield right(_CHECK, f"GPU {number}, {device['name']}: {gib}")
    if usable:
        if seen.get("nccl"):
            yield right("nccl", seen["nccl"])
        else:
            yield problem("nccl", "this build of torch has no NCCL, over which GPUs communicate", _BUILD)
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            yield note(_CHECK, "DS_ACCELERATOR=cpu makes DeepSpeed use no GPU", "unset DS_ACCELERATOR to use them")


def _without_gpu() -> Iterator[Finding]:
    if os.environ.get("DS_ACCELERATOR") in (None, "", "cpu"):
        yield right(_CHECK, "no GPU; ranks are CPU processes")
    else:
        wanted = os.environ["DS_ACCELERATOR"]
        yield problem(_CHECK, f"DS_ACCELERATOR={wanted!r}, but torch sees no GPU", "export DS_ACCELERATOR=cpu")


def _driver() -> tuple[int, str]:
    """How many GPUs the driver of NVIDIA has, and what is wrong with it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0, ""
    try:
        # A process that hangs in the driver can't be killed, and so not waited for.
        answer = within(_DRIVER_S + 5.0, lambda: _ask(command))
    except (subprocess.TimeoutExpired, TimeoutError):
        return 0, f"nvidia-smi doesn't answer within {_DRIVER_S:.0f} s"
    except OSError as error:
        return 0, f"{command}: {error.strerror}"
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        return 0, f"nvidia-smi: {lines[0] if lines else f'ended with status {answer.returncode}'}"
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()), ""


def _ask(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_S, check=False)
