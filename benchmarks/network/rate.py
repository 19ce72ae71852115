"""Contestants on ranks: timed steps, and links whose rate is set and then found to be what was set."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import Record, Sample, run_rounds
from harness.tables import Row
from harness.watch import Watch

from network.networks import Loopback, NetworkError, burst_bytes
from network.ranks import Ranks
from network.serving import LEAD_S, Contestant, Host, Step, sleep_until

#: How far a measured rate may be from the set one: headers and acknowledgements take up to 3 % of it, the token
#: buckets' first burst gives a little.
LOWEST, HIGHEST = 0.9, 1.03
#: The burst, which passes unshaped, must be a small part of what is sent: so many of it are sent at least.
_LEAST_BURSTS = 100
_SECONDS = 1.5
#: A rank that gets a core too late measures too low a rate; the best of a few exchanges is the link's.
_ATTEMPTS = 6
_TIMEOUT_S = 120.0
#: Steps on links without a limit.
_FLOOR_STEPS = 3


class Link(Host):
    """What a rank of :func:`network.ranks.forked_ranks` keeps: its end of the network, and contestants."""

    def __init__(self, network: Loopback, build: Callable[[Any], Contestant]) -> None:
        super().__init__(build, network.sent_bytes)
        self.set_rate = network.set_rate

    def exchange(self, message_bytes: int, start_s: float) -> float:
        """Send to the next rank and receive from the one before, from a common start; the rate each way in Mbit/s."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sent, received = (torch.zeros(message_bytes, dtype=torch.uint8) for _ in range(2))
        sleep_until(start_s)
        receiving = dist.irecv(received, (rank - 1) % ranks)
        sending = dist.isend(sent, (rank + 1) % ranks)
        receiving.wait()
        sending.wait()
        duration_s = time.perf_counter() - start_s
        # Nobody computes while others still send.
        dist.barrier()
        return message_bytes * 8 / 1e6 / duration_s


def timed_step(ranks: Ranks, watch: Watch, record: Record, figures: Callable[[Record, Sequence[Step]], Row]) -> Sample:
    """Have all ranks do a step of a record's contestant; ``figures`` makes those of the sample."""
    watch.start()
    steps: list[Step] = ranks.call("step", record.entry, time.perf_counter() + LEAD_S)
    computing_s = sum(step.computing_s for step in steps)
    foreign = watch.share(computing_s)
    return Sample(max(step.duration_s for step in steps), computing_s, foreign, figures(record, steps))


def traffic(_: Record, steps: Sequence[Step]) -> Row:
    """Bytes that a rank sent in a step, the mean of all ranks: by the contestant's own counter, whose ``sent_bytes`` is
    among its figures, and by the interfaces."""
    carried = [step.interface_bytes for step in steps if step.interface_bytes is not None]
    return {
        "counted_bytes": statistics.fmean(step.figures["sent_bytes"] for step in steps),
        "interface_bytes": statistics.fmean(carried) if carried else None,
    }


def measure(
    ranks: Ranks, records: Sequence[Record], args: argparse.Namespace, result: Row, write_rows: Callable[[], None]
) -> None:
    """All rounds of a case; where links have a rate, first some on links without a limit, for what processors take."""
    watch = Watch(args.limit)
    step = partial(timed_step, ranks, watch, figures=traffic)
    if args.rate_mbit is not None:
        run_rounds(records, min(_FLOOR_STEPS, args.repeats), watch, step, floor=True)
        result["measured_mbit"] = set_rate(ranks, args.rate_mbit)
    run_rounds(records, args.repeats, watch, step, write_rows)


def set_rate(ranks: Ranks, rate_mbit: float) -> float:
    """Limit every link, either way, of ranks who keep a :class:`Link`, and see that it is: the median rank's rate in
    Mbit/s, sending and receiving at once. Another one than was set is a :class:`NetworkError`."""
    ranks.call("set_rate", rate_mbit)
    return verify_rate(ranks, rate_mbit)


def verify_rate(ranks: Ranks, rate_mbit: float) -> float:
    """As :func:`set_rate`, of links whose rate is set."""
    message_bytes = max(_LEAST_BURSTS * burst_bytes(rate_mbit), round(rate_mbit * 1e6 / 8 * _SECONDS))
    timeout_s = _TIMEOUT_S + 4 * message_bytes * 8 / (rate_mbit * 1e6)
    # The first exchange connects.
    rates = ranks.call("exchange", 1, time.perf_counter(), timeout_s=timeout_s)
    for _ in range(_ATTEMPTS):
        seen = ranks.call("exchange", message_bytes, time.perf_counter() + LEAD_S, timeout_s=timeout_s)
        rates = list(map(max, rates, seen))
        if min(rates) >= LOWEST * rate_mbit or max(rates) > HIGHEST * rate_mbit:
            break
    odd = [rate for rate in rates if not LOWEST * rate_mbit <= rate <= HIGHEST * rate_mbit]
    if odd:
        raise NetworkError(
            f"the links were set to {rate_mbit:g} Mbit/s, but {len(odd)} of {len(rates)} ranks send and receive at "
            f"{min(odd):.1f} to {max(odd):.1f} Mbit/s; where that is too slow, the machine is too busy: set a lower "
            "rate, or run when nothing else does"
        )
    return statistics.median(rates)
