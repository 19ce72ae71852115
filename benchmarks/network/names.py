"""What the shaped network is called and told: names, addresses, and the lines for ``ip`` and ``tc``. Pure text.

Every namespace is named ``cuboidnet-PID-TICKS-…`` after the process that made it and the clock tick at which that one
started, so that what a killed run left behind can be told from what a running one needs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "cuboidnet"
#: A rank's only interface beside its own loopback.
INTERFACE = "e0"
BRIDGE = "bridge"
#: Nobody outside ever sees these addresses: they are given to interfaces inside of namespaces only.
SUBNET = ipaddress.IPv4Network("10.231.0.0/16")
#: Jumbo frames: with 1500 bytes, headers and per-packet work cost several percent.
MTU_BYTES = 9000
#: What a token bucket lets through at once. Messages smaller than this are not slowed down.
_BURST_BYTES = 20 * 1024
#: On fast links: more than the 64 KiB that TCP hands to a network card in one piece. Less would make the kernel cut the
#: pieces and wait for each part, on the cores that compute, which no card asks of them.
_FAST_BURST_BYTES, _FAST_MBIT = 80 * 1024, 100.0
#: Enough for what all the other ranks may have under way to one of them: nothing is ever dropped.
_QUEUE_BYTES = 64 * 1024 * 1024
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(hub|\d+)$")


@dataclass(frozen=True)
class Names:
    """The names of one network.

    Args:
        pid: of the process that makes it.
        ticks: when that process started, in clock ticks since the machine did.
    """

    pid: int
    ticks: int

    @property
    def hub(self) -> str:
        """Namespace of the bridge that all ranks hang on."""
        return f"{PREFIX}-{self.pid}-{self.ticks}-hub"

    def rank(self, rank: int) -> str:
        """Namespace of a rank."""
        return f"{PREFIX}-{self.pid}-{self.ticks}-{rank}"

    def all(self, ranks: int) -> list[str]:
        """Every namespace of a network of so many ranks."""
        return [self.hub, *(self.rank(rank) for rank in range(ranks))]

    @classmethod
    def of(cls, namespace: str) -> Names | None:
        """Whose a namespace is; None for one that isn't from here."""
        found = _NAME.match(namespace)
        return cls(int(found[1]), int(found[2])) if found else None


def address(rank: int) -> str:
    """A rank's address on the bridge, of which there are enough for 65 000 ranks."""
    return str(SUBNET[rank + 1])


def hardware_address(rank: int) -> str:
    """A rank's Ethernet address, of the range that anybody may use at home."""
    return f"02:cb:00:00:{(rank >> 8) & 0xFF:02x}:{rank & 0xFF:02x}"


def port(rank: int) -> str:
    """The bridge's end of a rank's cable."""
    return f"p{rank}"


def hub_lines(names: Names, ranks: int) -> Iterator[str]:
    """What ``ip`` is told inside of the hub: a bridge, and a cable to each rank's namespace."""
    yield f"link add {BRIDGE} mtu {MTU_BYTES} type bridge stp_state 0 mcast_snooping 0"
    yield f"link set {BRIDGE} addrgenmode none up"
    for rank in range(ranks):
        peer = f"{INTERFACE} mtu {MTU_BYTES} address {hardware_address(rank)} netns {names.rank(rank)}"
        yield f"link add {port(rank)} mtu {MTU_BYTES} type veth peer name {peer}"
        # Without a link-local IPv6 address nothing but the ranks' own messages is sent.
        yield f"link set {port(rank)} addrgenmode none master {BRIDGE} up"


def rank_lines(rank: int, ranks: int) -> Iterator[str]:
    """What ``ip`` is told inside of a rank's namespace."""
    yield "link set lo up"
    yield f"link set {INTERFACE} addrgenmode none up"
    yield f"address add {address(rank)}/{SUBNET.prefixlen} dev {INTERFACE}"
    # All namespaces of a machine share one small table of what was asked for, too small for 64 ranks who ask about one
    # another; permanent entries don't count.
    for other in range(ranks):
        if other != rank:
            yield f"neighbour add {address(other)} lladdr {hardware_address(other)} nud permanent dev {INTERFACE}"


def burst_bytes(rate_mbit: float) -> int:
    """What a link of so many megabits (10⁶) a second lets through at once, unshaped."""
    return _FAST_BURST_BYTES if rate_mbit >= _FAST_MBIT else _BURST_BYTES


def rate_line(interface: str, rate_mbit: float | None) -> str:
    """What ``tc`` is told to let an interface send so many megabits (10⁶) a second, or as many as it can."""
    if rate_mbit is None:
        # Replaced by what an interface has by nature, for there may be nothing to delete.
        return f"qdisc replace dev {interface} root noqueue"
    bits, burst = round(rate_mbit * 1e6), burst_bytes(rate_mbit)
    return f"qdisc replace dev {interface} root tbf rate {bits}bit burst {burst}b limit {_QUEUE_BYTES}b"


def parse_namespaces(listing: str) -> list[str]:
    """Names out of what ``ip netns list`` prints: ``name (id: 3)`` or ``name``, one a line."""
    return [line.split()[0] for line in listing.splitlines() if line.strip()]


def parse_sent_bytes(table: str, interface: str) -> int:
    """What an interface has sent, headers included, by ``/proc/net/dev``."""
    for line in table.splitlines():
        name, found, numbers = line.partition(":")
        if found and name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"there is no interface {interface} in:\n{table}")


def parse_start_ticks(stat: str) -> int:
    """When a process started, by ``/proc/PID/stat``. (Its second field, the command, may have spaces in it.)"""
    return int(stat.rpartition(")")[2].split()[19])
