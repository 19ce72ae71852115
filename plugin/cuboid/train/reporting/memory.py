"""Memory use of this rank, on the accelerator that DeepSpeed uses."""

from __future__ import annotations

import resource
import sys

import psutil
from deepspeed.accelerator import get_accelerator


def kind() -> str:
    """What :func:`now_bytes` and :func:`peak_bytes` measure."""
    return "resident set of the process" if _on_cpu() else "allocated on the accelerator"


def now_bytes() -> int:
    """Memory in use."""
    return int(psutil.Process().memory_info().rss if _on_cpu() else get_accelerator().memory_allocated())


def peak_bytes() -> int:
    """Peak memory so far."""
    if not _on_cpu():
        return int(get_accelerator().max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _on_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")
