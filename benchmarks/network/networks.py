"""The two networks: loopback, and one network namespace for each rank on a bridge of a set rate (root, Linux).

The namespaces have no names: each belongs to the process that made it, a rank or the one that holds the bridge, and is
gone with it, whatever ends that. No interface, address or rule of the machine is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from cuboid.errors import CuboidError

_CLONE_NEWNET = 0x40000000
#: For one call of ``ip`` or ``tc``.
_TOOL_TIMEOUT_S = 60.0
#: A rank's only interface beside its own loopback.
_INTERFACE = "e0"
#: Jumbo frames: with 1500 bytes, headers and per-packet work cost several percent.
_MTU_BYTES = 9000
#: What a token bucket lets through at once. Messages smaller than this are not slowed down.
_BURST_BYTES = 20 * 1024
#: On fast links: more than the 64 KiB that TCP hands to a network card in one piece. Less would make the kernel cut the
#: pieces and wait for each part, on the cores that compute, which no card asks of them.
_FAST_BURST_BYTES, _FAST_MBIT = 80 * 1024, 100.0
#: Enough for what all the other ranks may have under way to one of them: nothing is ever dropped.
_QUEUE_BYTES = 64 * 1024 * 1024
#: The kernel's default, cubic, takes seconds to find a steady rate behind a token bucket.
_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
#: Without link-local IPv6 addresses nothing but the ranks' own messages is sent. `cat` ends when its input does.
_HUB = f"""
ip link add bridge mtu {_MTU_BYTES} type bridge stp_state 0 mcast_snooping 0 &&
ip link set bridge addrgenmode none up && echo ready && exec cat
"""


class NetworkError(CuboidError):
    """The network can't be made here, or isn't what it was set to be."""


class Loopback:
    """What ranks communicate over: here all at one place, as fast as the machine can. gloo binds to ``interface``."""

    interface = "lo"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def enter(self, rank: int) -> None:
        """Move the calling process to the rank's place."""

    def sent_bytes(self) -> int | None:
        """What the calling rank's interface has sent; None where it shares the interface with others."""
        return None

    def set_rate(self, rate_mbit: float | None) -> None:
        """Limit the calling rank's link, either way, to so many megabits (10⁶) a second; None for no limit."""
        if rate_mbit is not None:
            raise NetworkError("loopback has no rate that could be set; use the shaped network")


class Shaped(Loopback):
    """A namespace for each rank, on a bridge in that of the process ``hub``; no link has a limit at first."""

    interface = _INTERFACE

    def __init__(self, ranks: int, hub: int) -> None:
        super().__init__(ranks)
        self._hub = ["nsenter", f"--net=/proc/{hub}/ns/net"]
        self._hub_pid = hub

    def enter(self, rank: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise NetworkError(f"no network namespace for rank {rank}: {os.strerror(ctypes.get_errno())}")
        self._port = f"p{rank}"
        lines = [
            "link set lo up",
            f"link add {_INTERFACE} mtu {_MTU_BYTES} address {_hardware_address(rank)} "
            f"type veth peer name {self._port} mtu {_MTU_BYTES} netns {self._hub_pid}",
            f"link set {_INTERFACE} addrgenmode none up",
            f"address add {_address(rank)}/16 dev {_INTERFACE}",
            # All namespaces of a machine share one small table of what was asked for, too small for 64 ranks who ask
            # about one another; permanent entries don't count.
            *(
                f"neighbour add {_address(other)} lladdr {_hardware_address(other)} nud permanent dev {_INTERFACE}"
                for other in range(self.ranks)
                if other != rank
            ),
        ]
        _tell(["ip", "-batch", "-"], "\n".join(lines))
        _tell([*self._hub, "ip", "-batch", "-"], f"link set {self._port} addrgenmode none master bridge up")
        for name, value in _SETTINGS.items():
            Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")

    def sent_bytes(self) -> int | None:
        return psutil.net_io_counters(pernic=True, nowrap=False)[_INTERFACE].bytes_sent

    def set_rate(self, rate_mbit: float | None) -> None:
        # Both ends of the cable are limited: what the rank sends, and what it receives.
        _tell(["tc", "-batch", "-"], _rate_line(_INTERFACE, rate_mbit))
        _tell([*self._hub, "tc", "-batch", "-"], _rate_line(self._port, rate_mbit))


@contextlib.contextmanager
def open_network(kind: str, ranks: int) -> Iterator[Loopback]:
    """``"loopback"`` or ``"shaped"``, which is refused with a :class:`NetworkError` where it can't be had."""
    if kind == "loopback":
        yield Loopback(ranks)
        return
    reason = why_not_shaped()
    if reason:
        raise NetworkError(reason)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["unshare", "--net", "sh", "-c", _HUB], **pipes, text=True) as hub:
        try:
            if hub.stdout.readline().strip() != "ready":
                raise NetworkError(f"the bridge of the shaped network can't be made: {hub.stderr.read().strip()}")
            yield Shaped(ranks, hub.pid)
        finally:
            hub.kill()


def why_not_shaped() -> str | None:
    """In one sentence, why this machine or user can't have a shaped network; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"the shaped network needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "the shaped network needs root, for it makes network namespaces; run it as root, or use loopback"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"the shaped network needs {', '.join(missing)} (iproute2, util-linux), not installed here"
    return None


def burst_bytes(rate_mbit: float) -> int:
    """What a link of that rate lets through at once, unshaped."""
    return _FAST_BURST_BYTES if rate_mbit >= _FAST_MBIT else _BURST_BYTES


def _address(rank: int) -> str:
    return f"10.231.0.{rank + 1}"


def _hardware_address(rank: int) -> str:
    """Of the range that anybody may use at home."""
    return f"02:cb:00:00:00:{rank:02x}"


def _rate_line(interface: str, rate_mbit: float | None) -> str:
    if rate_mbit is None:
        # Replaced by what an interface has by nature, for there may be nothing to delete.
        return f"qdisc replace dev {interface} root noqueue"
    bits, burst = round(rate_mbit * 1e6), burst_bytes(rate_mbit)
    return f"qdisc replace dev {interface} root tbf rate {bits}bit burst {burst}b limit {_QUEUE_BYTES}b"


def _tell(command: list[str], lines: str) -> None:
    ended = subprocess.run(
        command, input=f"{lines}\n", capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
    )
    if ended.returncode:
        raise NetworkError(f"{' '.join(command)} failed: {ended.stderr.strip() or ended.stdout.strip()}")
