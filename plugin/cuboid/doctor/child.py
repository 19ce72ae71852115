"""Scripts that run in a process of their own, for a bounded time. They report in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

#: Of a child's other output, as much as its last error.
_LAST_CHARACTERS = 2000
#: How long a killed process is waited for.
_END_S = 5.0


@dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
        reports: the lines that it wrote, parsed.
        cause: why it ended early, in words; "" if it ended with status 0.
    """

    reports: list[dict[str, Any]]
    cause: str


class Child:
    """A script of this package, in a new interpreter with this one's packages.

    It is started by its path, since ``-m`` would import Cuboid, whose import fails with versions that it doesn't know.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name(f"{script}.py")), *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        # One that hangs in a driver can't be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def finish(self, seconds: float) -> Ending:
        """Wait for the end, and kill the process if it takes longer."""
        try:
            output, errors = self._process.communicate(timeout=seconds)
            cause = "" if self._process.returncode == 0 else _cause(self._process.returncode, errors)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # Children of the child may hold the pipe.
            try:
                output, errors = self._process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                output = ""
            cause = f"didn't end within {seconds:.0f} s"
        return Ending([json.loads(line) for line in output.splitlines() if line.startswith("{")], cause)


def run_script(script: str, *arguments: str, seconds: float) -> Ending:
    """Run a script of this package to its end."""
    with Child(script, arguments) as child:
        return child.finish(seconds)


def _cause(status: int, errors: str) -> str:
    lines = errors[-_LAST_CHARACTERS:].strip().splitlines()
    ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{ending}: {lines[-1].strip()}" if lines else ending
