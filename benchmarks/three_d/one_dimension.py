"""Colossal-AI's own 1-D tensor parallelism, in an environment of its own: its versions exclude ours.

The environment is a folder of about 6 GB, made once. torch 2.5.1 comes from PyPI, whose Linux build is the one with
CUDA and doesn't start without NVIDIA's libraries; they aren't used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

from cuboid.errors import CuboidError
from three_d.instruments import Collective
from three_d.measuring import Figures, Sample
from three_d.ranks import RANKS

#: What pip installs, step by step: Colossal-AI 0.5.0 pins packages that it doesn't import here, hence --no-deps.
_STEPS = (
    ["torch==2.5.1", "numpy<2"],
    ["transformers==4.51.3", "safetensors", "einops", "psutil", "fabric", "rich", "click", "contexttimer", "pydantic"],
    ["ninja", "packaging", "tqdm"],
    ["--no-deps", "accelerate==1.5.2", "peft==0.13.2", "galore_torch==1.0", "bitsandbytes==0.45.3"],
    ["--no-deps", "colossalai==0.5.0"],
)
_INSTALL_TIMEOUT_S = 1800.0
_WORKER = Path(__file__).with_name("worker_1d.py")


def prepare(folder: Path) -> Path:
    """Make the environment unless it is there, and return its Python.

    Raises:
        CuboidError: pip failed, with what it said, or ran out of time.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    print(f"making an environment for Colossal-AI's 1-D in {folder}; about 3 GB are downloaded", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    for step in _STEPS:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", *step]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=True)
        except subprocess.CalledProcessError as error:
            raise CuboidError(f"{' '.join(command)} failed:\n{error.stderr[-2000:]}") from error
        except subprocess.TimeoutExpired as error:
            raise CuboidError(f"{' '.join(command)} took longer than {error.timeout:.0f} s") from error
    ready.touch()
    return python


def measure_1d(
    python: Path, part: str, *, quick: bool, repeats: int, limit_s: float, folder: Path, timeout_s: float
) -> list[Figures]:
    """The figures of every rank.

    Args:
        python: of the environment; see :func:`prepare`.
        part: of the case; see :class:`three_d.cases.Case`.
        quick: whether it is the small one.
        repeats, limit_s: as for :func:`three_d.measuring.compare`.
        folder: gets logs, and what the ranks computed.
        timeout_s: for everything.

    Raises:
        CuboidError: a rank failed or ran out of time; none of them is left running.
    """
    meeting_point = folder / "meeting_point"
    meeting_point.unlink(missing_ok=True)
    options = ["--part", part, "--repeats", str(repeats), "--limit", str(limit_s), "--out", str(folder)]
    command = [str(python), str(_WORKER), *options, *(["--quick"] if quick else [])]
    processes = []
    try:
        for rank in range(RANKS):
            log = (folder / f"worker_1d_{rank}.log").open("w", encoding="utf-8")
            with log:
                processes.append(
                    subprocess.Popen(command, env=_environment(rank), stdout=log, stderr=subprocess.STDOUT)
                )
        _wait(processes, folder, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_read_figures(folder / f"figures_1d_{rank}.json") for rank in range(RANKS)]


def _read_figures(path: Path) -> Figures:
    values = json.loads(path.read_text(encoding="utf-8"))
    values["collectives"] = {Collective(*collective): calls for *collective, calls in values["collectives"]}
    values["samples"] = [Sample(**sample) for sample in values["samples"]]
    return Figures(**values)


def _environment(rank: int) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": str(_WORKER.parents[1]), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **paths}


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            log = (folder / f"worker_1d_{failed[0]}.log").read_text(encoding="utf-8", errors="replace")
            raise CuboidError(f"rank {failed[0]} of Colossal-AI's 1-D failed:\n{log[-3000:]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            raise CuboidError(f"Colossal-AI's 1-D ran out of time after {timeout_s:.0f} s; logs are in {folder}")
        time.sleep(0.2)
