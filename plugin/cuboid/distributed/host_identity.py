"""Which processes are on one host: the same network, or the same process ids."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal


def host_identity(namespace: Literal["net", "pid"]) -> str:
    """Host and one namespace of this process, in which containers on one host may differ.

    Two processes with the same "net" communicate without a network; two with the same "pid" see the same process ids.
    """
    path = Path("/proc/self/ns") / namespace
    return f"{socket.gethostname()} {path.stat().st_ino if path.exists() else 0}"
