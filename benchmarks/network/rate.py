"""Contestants on ranks: timed steps, and links whose rate is set and then found to be what was set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import Record, Sample, run_rounds
from harness.watch import Watch

from network.names import burst_bytes
from network.networks import Network, NetworkError
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


@dataclass(frozen=True)
class Exchange:
    """What one rank saw of sending and receiving.

    Args:
        duration_s: since the start that all ranks were told.
        message_bytes: sent, and as many received.
        interface_bytes: sent by the interface meanwhile; None where it isn't the rank's own.
    """

    duration_s: float
    message_bytes: int
    interface_bytes: int | None

    @property
    def rate_mbit(self) -> float:
        """Megabits a second, each way."""
        return self.message_bytes * 8 / 1e6 / self.duration_s


class Link(Host):
    """What a rank of :func:`network.ranks.forked_ranks` keeps: its end of the network, and contestants."""

    def __init__(self, network: Network, build: Callable[[Any], Contestant] | None = None) -> None:
        super().__init__(build or _nobody, network.sent_bytes)
        self.network = network

    def exchange(self, message_bytes: int, start_s: float) -> Exchange:
        """Send to the next rank and receive from the one before, beginning at a time that all ranks are told."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sent, received = (torch.zeros(message_bytes, dtype=torch.uint8) for _ in range(2))
        before = self.network.sent_bytes()
        sleep_until(start_s)
        receiving = dist.irecv(received, (rank - 1) % ranks)
        sending = dist.isend(sent, (rank + 1) % ranks)
        for work in (receiving, sending):
            assert work is not None
            work.wait()
        duration_s = time.perf_counter() - start_s
        # What is on its way from here, the next rank has only when it has said so.
        dist.barrier()
        after = self.network.sent_bytes()
        return Exchange(duration_s, message_bytes, None if before is None or after is None else after - before)


def _nobody(entry: Any) -> Contestant:
    raise KeyError(f"nobody here knows how to build {entry}")


def timed_step(
    ranks: Ranks, watch: Watch, record: Record, figures: Callable[[Record, Sequence[Step]], dict[str, Any]]
) -> Sample:
    """Have all ranks do a step of a contestant.

    Args:
        ranks: who keep a :class:`network.serving.Host`.
        watch: tells what others computed meanwhile.
        record: of the contestant.
        figures: makes those of the sample from all ranks' steps.
    """
    watch.start()
    steps: list[Step] = ranks.call("step", record.entry, time.perf_counter() + LEAD_S)
    computing_s = sum(step.computing_s for step in steps)
    foreign = watch.share(computing_s)
    return Sample(max(step.duration_s for step in steps), computing_s, foreign, figures(record, steps))


def traffic(record: Record, steps: Sequence[Step]) -> dict[str, Any]:
    """Bytes that a rank sent in a step, the mean of all ranks: by the contestant's own counter and by the interfaces;
    the contestants tell ``sent_bytes`` and ``calls``."""
    record.facts["calls"] = steps[0].figures["calls"]
    carried = [step.interface_bytes for step in steps if step.interface_bytes is not None]
    return {
        "counted_bytes": sum(step.figures["sent_bytes"] for step in steps) / len(steps),
        "interface_bytes": sum(carried) / len(steps) if carried else None,
    }


def limit_rate(
    network: Network,
    ranks: Ranks,
    records: Sequence[Record],
    rate_mbit: float | None,
    repeats: int,
    watch: Watch,
    measure: Callable[[Record], Sample],
) -> float | None:
    """Measure what the processors take alone, with steps on links without a limit; then set the rate.

    Returns:
        The rate that was found, in Mbit/s; None where there is to be no limit.
    """
    if rate_mbit is None:
        return None
    run_rounds(records, min(_FLOOR_STEPS, repeats), watch, measure, floor=True)
    network.set_rate(rate_mbit)
    return verify_rate(network, ranks)


def verify_rate(network: Network, ranks: Ranks) -> float:
    """The median rank's rate in Mbit/s, sending and receiving at once, found to be what was set.

    Args:
        network: whose ``rate_mbit`` is set.
        ranks: who keep a :class:`Link`.

    Raises:
        NetworkError: a rank's rate is another one.
    """
    wanted = network.rate_mbit
    assert wanted is not None, "no rate was set"
    message_bytes = max(_LEAST_BURSTS * burst_bytes(wanted), round(wanted * 1e6 / 8 * _SECONDS))
    timeout_s = _TIMEOUT_S + 4 * message_bytes * 8 / (wanted * 1e6)
    # The first exchange connects.
    ranks.call("exchange", 1, time.perf_counter(), timeout_s=timeout_s)
    rates = [0.0] * network.ranks
    for _ in range(_ATTEMPTS):
        seen = ranks.call("exchange", message_bytes, time.perf_counter() + LEAD_S, timeout_s=timeout_s)
        rates = [max(rate, each.rate_mbit) for rate, each in zip(rates, seen, strict=True)]
        if min(rates) >= LOWEST * wanted or max(rates) > HIGHEST * wanted:
            break
    odd = [rate for rate in rates if not LOWEST * wanted <= rate <= HIGHEST * wanted]
    if odd:
        raise NetworkError(
            f"the links were set to {wanted:g} Mbit/s, but {len(odd)} of {len(rates)} ranks send and receive at "
            f"{min(odd):.1f} to {max(odd):.1f} Mbit/s; where that is too slow, the machine is too busy: set a lower "
            "rate, or run when nothing else does"
        )
    return statistics.median(rates)
