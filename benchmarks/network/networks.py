"""The two networks: loopback, and one network namespace for each rank on a bridge of a set rate (root, Linux).

The shaped one is wholly its own: bridge, cables and addresses are inside of namespaces that nobody else uses, so that
no interface, address or rule of the machine is touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cuboid.errors import CuboidError
from network.interrupts import undisturbed
from network.names import (
    INTERFACE,
    Names,
    hub_lines,
    parse_namespaces,
    parse_sent_bytes,
    parse_start_ticks,
    port,
    rank_lines,
    rate_line,
)

_CLONE_NEWNET = 0x40000000
#: For one call of ``ip`` or ``tc``.
_TOOL_TIMEOUT_S = 60.0
#: Where ``ip netns`` keeps namespaces.
_FOLDER = Path("/run/netns")
#: The kernel's default, cubic, takes seconds to find a steady rate behind a token bucket.
_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}


class NetworkError(CuboidError):
    """The network can't be made here, or isn't what it was set to be."""


class Network:
    """What ranks communicate over.

    Attributes:
        interface: what gloo binds to.
        rate_mbit: of each rank's link, either way; None where nothing limits it.
    """

    interface: str
    rate_mbit: float | None = None

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def enter(self, rank: int) -> None:
        """Move the calling process, which has one thread, to the rank's place."""

    def sent_bytes(self) -> int | None:
        """What the calling process's interface has sent; None where it shares the interface with others."""
        return None

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every link; None for as fast as the machine can.

        Raises:
            NetworkError: there is no rate that could be set.
        """
        if rate_mbit is not None:
            raise NetworkError("loopback has no rate that could be set; use the shaped network")


class Loopback(Network):
    """All ranks at one place, as fast as the machine can."""

    interface = "lo"


class Shaped(Network):
    """A namespace for each rank, all on one bridge. Made by :func:`shaped_network`."""

    interface = INTERFACE

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.names = Names(os.getpid(), _start_ticks(os.getpid()) or 0)

    def create(self) -> None:
        """Make everything, without any limit to the rate."""
        names = self.names
        _batch(["ip"], (f"netns add {name}" for name in names.all(self.ranks)))
        _batch(["ip", "-n", names.hub], hub_lines(names, self.ranks))
        for rank in range(self.ranks):
            _batch(["ip", "-n", names.rank(rank)], rank_lines(rank, self.ranks))

    def remove(self) -> None:
        """Take everything away that is there of it; whoever is still inside loses the connection."""
        _remove(name for name in _existing() if Names.of(name) == self.names)

    def set_rate(self, rate_mbit: float | None) -> None:
        # Both ends of each cable are limited: what a rank sends, and what it receives.
        ports = (rate_line(port(rank), rate_mbit) for rank in range(self.ranks))
        _batch(["tc", "-n", self.names.hub], ports)
        for rank in range(self.ranks):
            _batch(["tc", "-n", self.names.rank(rank)], [rate_line(INTERFACE, rate_mbit)])
        self.rate_mbit = rate_mbit

    def enter(self, rank: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        place = os.open(_FOLDER / self.names.rank(rank), os.O_RDONLY)
        try:
            if libc.setns(place, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns into {self.names.rank(rank)} failed")
        finally:
            os.close(place)
        for name, value in _SETTINGS.items():
            Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")

    def sent_bytes(self) -> int | None:
        # Not from /sys, which shows the namespace in which it was mounted.
        return parse_sent_bytes(Path("/proc/self/net/dev").read_text(encoding="ascii"), INTERFACE)


@contextmanager
def open_network(kind: str, ranks: int) -> Iterator[Network]:
    """``"loopback"`` or ``"shaped"``, without any limit to its rate.

    Raises:
        NetworkError: a shaped one can't be had here.
    """
    if kind == "loopback":
        yield Loopback(ranks)
    else:
        with shaped_network(ranks) as shaped:
            yield shaped


@contextmanager
def shaped_network(ranks: int) -> Iterator[Shaped]:
    """A shaped network for the time of a ``with`` block, after which nothing is left of it.

    Leftovers of runs that were killed are removed first.

    Raises:
        NetworkError: it can't be made here; says why.
    """
    reason = why_not_shaped()
    if reason:
        raise NetworkError(reason)
    remove_stale()
    network = Shaped(ranks)
    try:
        network.create()
        yield network
    finally:
        with undisturbed():
            network.remove()


def why_not_shaped() -> str | None:
    """In one sentence, why this machine or user can't have a shaped network; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"the shaped network needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "the shaped network needs root, for it makes network namespaces; run it as root, or use loopback"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the shaped network needs {' and '.join(missing)}, of the package iproute2, which isn't installed"
    return None


def remove_stale() -> list[str]:
    """Remove namespaces of runs that are no more; their names."""
    stale = [name for name in _existing() if _is_stale(name)]
    _remove(stale)
    return stale


def _is_stale(namespace: str) -> bool:
    names = Names.of(namespace)
    return names is not None and _start_ticks(names.pid) != names.ticks


def _start_ticks(pid: int) -> int | None:
    """When a process started; None if there is none of that number."""
    try:
        return parse_start_ticks(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _existing() -> list[str]:
    listed = _tool(["ip", "netns", "list"])
    return parse_namespaces(listed)


def _remove(namespaces: Iterable[str]) -> None:
    names = list(namespaces)
    if names:
        # One that is gone already, removed by another run that found it stale, doesn't keep the others.
        _batch(["ip", "-force"], (f"netns delete {name}" for name in names), may_fail=True)
    left = set(names) & set(_existing())
    if left:
        raise NetworkError(f"{len(left)} network namespaces couldn't be removed: {', '.join(sorted(left))}")


def _batch(command: list[str], lines: Iterable[str], *, may_fail: bool = False) -> None:
    _tool([*command, "-batch", "-"], "\n".join(lines) + "\n", may_fail=may_fail)


def _tool(command: list[str], text: str = "", *, may_fail: bool = False) -> str:
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    if ended.returncode and not may_fail:
        raise NetworkError(f"{' '.join(command)} failed: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout
