"""Memory use of this rank, on the accelerator that DeepSpeed uses."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
from deepspeed.accelerator import get_accelerator


def kind() -> str:
    """What :func:`now_bytes` and :func:`peak_bytes` measure."""
    return "resident set of the process" if _on_cpu() else "allocated on the accelerator"


def now_bytes() -> int:
    """Memory in use."""
    return int(psutil.Process().memory_info().rss if _on_cpu() else get_accelerator().memory_allocated())


def peak_bytes() -> int:
    """Peak memory so far, or since :func:`reset_peak`."""
    if not _on_cpu():
        return int(get_accelerator().max_memory_allocated())
    # Not affected by reset_peak, unlike the line of /proc.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in _lines_of_status():
        if line.startswith("VmHWM:"):
            peak = int(line.split()[1])
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def reset_peak() -> bool:
    """Let :func:`peak_bytes` count from now on.

    Returns:
        Whether that is possible; if not, it goes on to count from the start of the process.
    """
    if not _on_cpu():
        get_accelerator().reset_peak_memory_stats()
        return True
    try:
        # Resets VmHWM; see proc_pid_clear_refs(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return any(line.startswith("VmHWM:") for line in _lines_of_status())


def _lines_of_status() -> list[str]:
    try:
        return Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _on_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")
