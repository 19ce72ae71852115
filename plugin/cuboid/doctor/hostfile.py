"""A hostfile of the ``deepspeed`` launcher: its syntax, as that launcher reads it, and its hosts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cuboid.checkpoint.format.bounded_files import open_regular
from cuboid.doctor.finding import Finding, note, problem, right
from cuboid.doctor.network import addresses_of, is_loopback
from cuboid.errors import CheckpointError

_CHECK = "hostfile"
#: A line for each of many thousand hosts.
_MOST_CHARACTERS = 1 << 20
_AT_ONCE = 32


@dataclass(frozen=True)
class Hostfile:
    """What a hostfile says: how many ranks each host takes (``slots``), and its mistakes (``problems``)."""

    slots: Mapping[str, int]
    problems: tuple[Finding, ...]

    @classmethod
    def read(cls, path: Path) -> Hostfile:
        """Read a hostfile as the launcher does; nothing is raised."""
        try:
            with open(open_regular(path), encoding="utf-8") as file:
                text = file.read(_MOST_CHARACTERS)
        except (OSError, UnicodeDecodeError, CheckpointError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            fault = f"{path}: can't be read: {reason}"
            return cls({}, (problem(_CHECK, fault, "give --hostfile a file with lines `HOST slots=N`"),))
        slots: dict[str, int] = {}
        problems = []
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            entry = re.match(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?$", line)
            if not line or line.startswith("#"):
                continue
            where = f"{path}, line {number}"
            if entry is None or int(entry[2]) == 0:
                problems.append(problem(_CHECK, f"{where}: {line[:80]!r}", "write `HOST slots=N`, N of at least 1"))
            elif entry[1] in slots:
                problems.append(problem(_CHECK, f"{where}: {entry[1]} is there twice", "write one line for each host"))
            else:
                slots[entry[1]] = int(entry[2])
        if not slots:
            problems.append(problem(_CHECK, f"{path}: names no host", "write a line `HOST slots=N` for each"))
        return cls(slots, tuple(problems))


def hosts(path: Path) -> Iterator[Finding]:
    """Whether a hostfile can be read, and each host in it has an address."""
    hostfile = Hostfile.read(path)
    slots = hostfile.slots
    yield from hostfile.problems
    if not slots:
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        troubles = dict(zip(slots, threads.map(lambda host: _trouble(host, len(slots)), slots), strict=True))
    for host, trouble in troubles.items():
        if trouble:
            yield problem(
                _CHECK, f"{path}: {host} {trouble}", "mend the name, the resolver, or /etc/hosts on each host"
            )
    if not any(troubles.values()):
        yield right(_CHECK, f"{path}: {len(slots)} host(s) with {sum(slots.values())} slots, all names resolve")
    if len(slots) > 1 and shutil.which("pdsh") is None:
        yield note(_CHECK, "pdsh isn't on PATH; deepspeed starts other hosts by it", "install pdsh, or use torchrun")


def _trouble(host: str, count: int) -> str:
    """What is wrong with a host's name; "" if it resolves."""
    try:
        addresses = addresses_of(host)
    except TimeoutError:
        return "has no answer from the resolver"
    except OSError as error:
        return f"doesn't resolve: {error.strerror or error}"
    except UnicodeError:
        return "can't be the name of a host"
    if count > 1 and all(map(is_loopback, addresses)):
        return f"is {addresses[0]}, which is another host on each host"
    return ""
