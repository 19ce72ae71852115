"""Colossal-AI's own 1-D tensor parallelism, in an environment of its own: its versions exclude ours.

The environment is a folder of about 6 GB, made once. torch 2.5.1's ordinary Linux build is the one with CUDA and
doesn't start without NVIDIA's libraries; they aren't used.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from network.ranks import TIMEOUT_S, Member, Ranks

from cuboid.errors import CuboidError

#: What pip installs, step by step: Colossal-AI 0.5.0 pins packages that it doesn't import here, hence --no-deps.
_STEPS = (
    ["torch==2.5.1", "numpy<2"],
    ["transformers==4.51.3", "safetensors", "einops", "psutil", "fabric", "rich", "click", "contexttimer", "pydantic"],
    ["ninja", "packaging", "tqdm"],
    ["--no-deps", "accelerate==1.5.2", "peft==0.13.2", "galore_torch==1.0", "bitsandbytes==0.45.3"],
    ["--no-deps", "colossalai==0.5.0"],
)
_WORKER = Path(__file__).with_name("worker_1d.py")


def prepare(folder: Path) -> Path:
    """Make the environment unless it is there; its Python."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    print(f"making an environment for Colossal-AI's 1-D in {folder}; about 3 GB are downloaded", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    for step in _STEPS:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", *step]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise CuboidError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
    ready.touch()
    return python


class PausedRanks(Ranks):
    """Ranks that stand still between two calls, for in a world of their own their network threads would wake up a
    thousand times a second while others are measured."""

    def call(self, method: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> list[Any]:
        for member in self.members:
            member.process.resume()
        answers = super().call(method, *arguments, timeout_s=timeout_s)
        for member in self.members:
            member.process.suspend()
        return answers


@contextlib.contextmanager
def ranks_1d(python: Path, ranks: int, worker: Path = _WORKER) -> Iterator[Ranks]:
    """Ranks of an environment's Python for the time of a ``with`` block, each with a :class:`network.serving.Host`."""
    members: list[Member] = []
    found = PausedRanks(members)
    with tempfile.TemporaryDirectory(prefix="cuboid-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = multiprocessing.Pipe()
                world = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                paths = {"PYTHONPATH": str(_WORKER.parents[1]), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
                process = psutil.Popen(
                    [str(python), str(worker), str(theirs.fileno()), f"file://{folder}/meeting_point"],
                    env={**os.environ, **world, **paths},
                    pass_fds=[theirs.fileno()],
                )
                theirs.close()
                members.append(Member(process, ours))
            found.collect("its start", TIMEOUT_S)
            yield found
        finally:
            found.close()
