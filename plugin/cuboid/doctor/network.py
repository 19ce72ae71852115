"""This host in the network: its name, its interfaces, and ports."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator

import psutil

from cuboid.doctor.finding import Finding, note, problem, right, within

#: torchrun's and DeepSpeed's default.
_PORT = 29500
#: Resolvers ask several servers several times, for 5 s each.
_RESOLVE_S, _SLOW_S = 40.0, 2.0
_CONNECT_S = 5.0
_HOSTS = "add a line with its address and name to /etc/hosts"


def addresses_of(host: str) -> list[str]:
    """The addresses of a host, in bounded time.

    Raises:
        OSError: it has none.
        TimeoutError: the resolver doesn't answer.
    """
    answers = within(_RESOLVE_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))


def is_loopback(address: str) -> bool:
    """Whether other hosts can't reach an address."""
    return ipaddress.ip_address(address).is_loopback


def _local_addresses() -> dict[str, list[str]]:
    """By interface, its addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def host_name(*, has_peers: bool) -> Iterator[Finding]:
    """Whether this host's name leads to an address of its own, where gloo and torchrun expect it."""
    name, check = socket.gethostname(), "host name"
    began = time.monotonic()
    try:
        addresses = addresses_of(name)
    except TimeoutError:
        yield problem(check, f"the resolver gives no answer on {name} within {_RESOLVE_S:.0f} s", _HOSTS)
        return
    except OSError as error:
        yield problem(check, f"{name} doesn't resolve: {error.strerror or error}", _HOSTS)
        return
    took_s = time.monotonic() - began
    text = f"{name} resolves to {', '.join(addresses)}"
    local = {address for entries in _local_addresses().values() for address in entries}
    # All of 127.0.0.0/8 is this host's.
    others = [address for address in addresses if address not in local and not is_loopback(address)]
    if others:
        yield problem(check, f"{text}, but {', '.join(others)} is no address of this host", f"mend or {_HOSTS}")
    elif all(map(is_loopback, addresses)):
        cure = "set GLOO_SOCKET_IFNAME, and torchrun's --local-addr, on each host; or give the name a real address"
        if has_peers and not os.environ.get("GLOO_SOCKET_IFNAME"):
            yield problem(check, f"{text}, where other hosts can't reach it", cure)
        else:
            yield note(check, f"{text}, enough for runs on this host alone", f"for several hosts: {cure}")
    elif took_s > _SLOW_S:
        yield note(check, f"{text}, after {took_s:.0f} s", "mend the resolver (/etc/resolv.conf), or /etc/hosts")
    else:
        yield right(check, text)


def interfaces() -> Iterator[Finding]:
    """Whether the interfaces exist that variables choose for gloo and NCCL."""
    local, states = _local_addresses(), psutil.net_if_stats()
    usable = {name: addresses for name, addresses in local.items() if addresses and states[name].isup}
    there = ", ".join(f"{name} ({addresses[0]})" for name, addresses in usable.items())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if not value:
            continue
        chosen = _chosen(value, list(local), is_gloo=variable.startswith("GLOO"))
        missing = [name for name in chosen if name not in usable]
        if missing or not chosen:
            name = missing[0] if missing else value
            fault = "is down or has no address" if name in local else "is not there"
            cure = f"name one of {there}, or unset it"
            yield problem("interfaces", f"{variable}={value!r}, but {name!r} {fault}", cure)
        else:
            yield right(
                "interfaces", f"{variable} chooses {', '.join(f'{name} ({local[name][0]})' for name in chosen)}"
            )
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        yield right(
            "interfaces", f"GLOO_SOCKET_IFNAME isn't set: gloo takes the host name's address; there are {there}"
        )


def _chosen(value: str, names: list[str], *, is_gloo: bool) -> list[str]:
    """The interfaces that a value names: gloo's lists names; NCCL's prefixes, or after = names, after ^ others."""
    parts = [part.strip() for part in value.lstrip("^=").split(",") if part.strip()]
    if is_gloo or value.startswith("="):
        return parts
    if value.startswith("^"):
        return [name for name in names if not name.startswith((*parts, "lo"))]
    return [name for name in names if name.startswith(tuple(parts))]


def ports(port: int | None) -> Iterator[Finding]:
    """Whether a port of this host can be opened and reached by the host's name, and the port of the ranks is free."""
    text = os.environ.get("MASTER_PORT", "")
    wanted = port if port is not None else int(text) if text.isdigit() and 0 < int(text) < 65536 else _PORT
    yield from _is_free(wanted)
    name = socket.gethostname()
    with socket.socket() as server:
        try:
            server.bind(("", 0))
            server.listen(1)
            number = server.getsockname()[1]
        except OSError as error:
            yield problem("ports", f"no port can be opened: {error.strerror}", "leave the sandbox that forbids it")
            return
        try:
            within(_RESOLVE_S, lambda: socket.create_connection((name, number), _CONNECT_S).close())
        except (OSError, TimeoutError) as error:
            yield problem(
                "ports",
                f"a port that is open here can't be reached by the host's name, {name}: {error}",
                f"{_HOSTS}, or let the firewall pass what this host sends itself",
            )
        else:
            yield right("ports", f"an open port is reached as {name}:{number}")


def _is_free(port: int) -> Iterator[Finding]:
    with socket.socket() as server:
        # As torch's store does, so that what lingers of an ended run isn't in its way.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError as error:
            cure = "give the launcher another one: torchrun --master-port, deepspeed --master_port"
            yield problem("ports", f"port {port}, where ranks would meet: {error.strerror}", cure)
        else:
            yield right("ports", f"port {port}, where ranks meet, is free")
