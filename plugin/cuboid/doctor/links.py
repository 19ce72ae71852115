"""How fast the links between ranks are, at the distances at which the axes of a mesh put them.

Ranks are numbered so that those along an axis are some number apart: neighbours of ``sequence`` are 1 apart, those of
``hidden`` as many as ``sequence`` has ranks, and so on. So pairs of ranks 1, 2, 4, … apart exchange messages, all pairs
of a distance at the same time, as they do along an axis.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from cuboid.doctor.finding import Finding, note, right

_CHECK = "links"
#: How long the ranks wait for each other to start, and how long each distance is measured.
_MEETING_S, _MEASURING_S = 60.0, 0.4
#: A pair is slow if its messages take this many times as long as those of the median pair at its distance.
_SLOW = 2.5
#: A long message, and the number of short ones that are timed together.
_BYTES, _SHORT = 4 << 20, 5


@dataclass(frozen=True)
class Link:
    """What two ranks measured, in the best of some rounds.

    Attributes:
        distance: between their numbers.
        ranks: both.
        hosts: both ranks' hosts.
        latency_s: of a short message.
        bytes_per_s: each way, of a long one in both directions at once.
    """

    distance: int
    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        places = [f"rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True)]
        return f"{' and '.join(places)}: {_figures(self.latency_s, self.bytes_per_s)}"


def between_ranks() -> Iterator[Finding]:
    """Start a process group of the launcher's ranks, and measure; only the first rank has findings."""
    import torch
    import torch.distributed as dist

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=_MEETING_S))
    try:
        links = measure("cuda" if is_cuda else "cpu")
        if dist.get_rank() == 0:
            yield from judge(links)
    finally:
        dist.destroy_process_group()


def measure(device: str) -> list[Link]:
    """The links of all ranks of the default process group, on each of them. Collective."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = []
    for distance in distances(world):
        # Ranks without a partner wait with the others, so that distances don't overlap.
        dist.barrier()
        peer = partner(rank, distance, world)
        if peer is not None:
            pairs.append((distance, peer, *_times(peer, device)))
    gathered: list[tuple[str, list[tuple[int, int, float, float]]]] = [("", [])] * world
    dist.all_gather_object(gathered, (socket.gethostname(), pairs))
    return [
        Link(distance, (number, peer), (host, gathered[peer][0]), latency_s, _BYTES / long_s)
        for number, (host, of_rank) in enumerate(gathered)
        for distance, peer, latency_s, long_s in of_rank
        if number < peer
    ]


def distances(world: int) -> list[int]:
    """1, 2, 4, … below the number of ranks."""
    return [1 << power for power in range((world - 1).bit_length())]


def partner(rank: int, distance: int, world: int) -> int | None:
    """The other rank of a rank's pair; None if that would be none of the world."""
    peer = rank ^ distance
    return peer if peer < world else None


def judge(links: Sequence[Link]) -> Iterator[Finding]:
    """A line for each distance, and one for each pair that is much slower than the others there."""
    if not links:
        yield note(_CHECK, "one rank has none; start as many ranks as the run will have")
    for distance in sorted({link.distance for link in links}):
        at_distance = [link for link in links if link.distance == distance]
        latency_s = statistics.median(link.latency_s for link in at_distance)
        rate = statistics.median(link.bytes_per_s for link in at_distance)
        across = sum(len(set(link.hosts)) > 1 for link in at_distance)
        where = "between hosts" if across == len(at_distance) else f"{across} of {len(at_distance)} pairs between hosts"
        where = where if across else "inside hosts"
        yield right(_CHECK, f"ranks {distance} apart, {where}: {_figures(latency_s, rate)}")
        for link in at_distance:
            if link.latency_s > _SLOW * latency_s or link.bytes_per_s * _SLOW < rate:
                yield note(
                    _CHECK,
                    f"{link}, where the median {distance} apart is {_figures(latency_s, rate)}",
                    "an axis is as fast as its slowest link: look at that host's interface (GLOO_SOCKET_IFNAME, "
                    "NCCL_SOCKET_IFNAME), its cable or PCIe slot, and what else runs there; or leave it out",
                )


def _figures(latency_s: float, bytes_per_s: float) -> str:
    return f"{1e6 * latency_s:.0f} µs, {bytes_per_s / 1e9:.2f} GB/s each way"


def _times(peer: int, device: str) -> tuple[float, float]:
    """Seconds of a short and of a long message to and from another rank: the least of some rounds."""
    import torch
    import torch.distributed as dist

    sent, received = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange(count: int, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            requests = [dist.P2POp(dist.isend, sent[:count], peer), dist.P2POp(dist.irecv, received[:count], peer)]
            for request in dist.batch_isend_irecv(requests):
                request.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    # The first messages connect the ranks. The second one's time decides, alike on both, how many fit.
    exchange(_BYTES, 1)
    slowest = torch.tensor([exchange(_BYTES, 1) + exchange(8, _SHORT) * _SHORT], dtype=torch.float64, device=device)
    theirs = torch.empty_like(slowest)
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, slowest, peer), dist.P2POp(dist.irecv, theirs, peer)]
    ):
        request.wait()
    rounds = max(2, min(50, int(_MEASURING_S / max(float(slowest), float(theirs)))))
    short, long = [], []
    for _ in range(rounds):
        short.append(exchange(8, _SHORT))
        long.append(exchange(_BYTES, 1))
    return min(short), min(long)
