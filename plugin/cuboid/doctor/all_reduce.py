"""Two processes of this host add numbers over gloo: what a run on CPUs, and every saving, does first."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from cuboid.doctor.child import Child
from cuboid.doctor.finding import Finding, problem, right

_CHECK = "all-reduce"
#: For the imports of both processes on a slow machine, and for their meeting.
_PATIENCE_S, _MEETING_S = 120.0, 30.0


def two_processes() -> Iterator[Finding]:
    """Whether two processes of this host add their numbers over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with Child("pair", ["0", port, str(_MEETING_S)]) as first, Child("pair", ["1", port, str(_MEETING_S)]) as second:
        endings = [first.finish(_PATIENCE_S), second.finish(_MEETING_S)]
    cause = next((ending.cause for ending in endings if ending.cause), "")
    sums = [report["sum"] for ending in endings for report in ending.reports]
    if cause or sums != [3, 3]:
        yield problem(
            _CHECK,
            f"two processes over gloo: {cause or f'the sums of 1 and 2 are {sums}'}",
            "mend what the lines on host name and interface say; GLOO_SOCKET_IFNAME=lo is enough for one host",
        )
    else:
        yield right(_CHECK, f"two processes over gloo, in {endings[0].reports[0]['seconds']:.2f} s after they had met")
