"""From records to numbers: what of the communication takes no time of its own, and what there is to hide it behind."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from summary import is_quiet_round, spread, undisturbed, undisturbed_rounds

from network.hidden_rank import COMPUTING, KINDS, SENDING
from network.layer_measuring import Record, Sample
from network.layer_results import allowed_excess

#: How far apart computing and communication may be for "the same time".
_BALANCE = 1.25
#: Collectives that do nothing send next to nothing: what keeps connections alive.
_SILENCE = 0.01


@dataclass
class Trio:
    """All about one mesh.

    Args:
        step: forward and backward over the links.
        computing: the same with collectives that do nothing.
        communication: the step's collectives, one after another.
        formula_bytes: that a rank sends in a step.
        wanted_mbit: rate at which they take as long as computing; None on loopback.
        rate_mbit: what was set.
        measured_mbit: what was found.
    """

    step: Record
    computing: Record
    communication: Record
    formula_bytes: int
    wanted_mbit: float | None = None
    rate_mbit: float | None = None
    measured_mbit: float | None = None

    @property
    def records(self) -> list[Record]:
        """All three, in the order of :data:`KINDS`."""
        return [self.step, self.computing, self.communication]

    def rounds(self) -> list[tuple[Sample, ...]]:
        """The samples of each round, in the same order."""
        return list(zip(*(record.samples for record in self.records), strict=True))


def row(trio: Trio, mesh: str, ranks: int) -> dict[str, Any]:
    """A mesh's numbers; plain values only."""
    return {
        "mesh": mesh,
        "shape": trio.step.shape,
        "error": trio.step.error,
        **_sent(trio),
        **_times(trio, min(ranks, os.cpu_count() or 1)),
        "undisturbed": sum(map(is_quiet_round, trio.rounds())),
        "rejected": sum(record.rejected for record in trio.records),
        "samples": {
            kind: [asdict(sample) for sample in own.samples] for kind, own in zip(KINDS, trio.records, strict=True)
        },
        "first_computing": [asdict(sample) for sample in trio.computing.floor],
    }


def _sent(trio: Trio) -> dict[str, Any]:
    """Bytes of the last round, and how long the links need for them."""
    step, silent, replayed = trio.rounds()[-1]
    carried = step.interface_bytes
    return {
        "calls": trio.step.calls,
        "formula_bytes": trio.formula_bytes,
        "counted_bytes": step.counted_bytes,
        "replayed_bytes": replayed.counted_bytes,
        "silent_bytes": silent.interface_bytes,
        "interface_bytes": carried,
        "interface_excess": None if carried is None else carried / step.counted_bytes - 1,
        "excess_allowed": allowed_excess(trio.step, step.counted_bytes),
        "wanted_mbit": trio.wanted_mbit,
        "rate_mbit": trio.rate_mbit,
        "measured_mbit": trio.measured_mbit,
        "link_s": None if trio.rate_mbit is None else trio.formula_bytes * 8 / (trio.rate_mbit * 1e6),
    }


def _times(trio: Trio, cores: int) -> dict[str, Any]:
    """Times, and what they make round by round; over the rounds in which all three were undisturbed.

    With T, C and M for a step, its computing and its communication, ``exposed`` is (T - C) / M, and ``waited`` the part
    of M in which a rank's computing stood still for messages; what else is exposed are cores that carry messages where
    they could compute. The other ratios say
    how many times as long as it could the step takes: with perfect overlap, max(C, M); with none, C + M; and with what
    overlap is possible where the cores that compute carry the messages too, which makes the processor time of both, a
    core's share of it, a third thing that no step is shorter than.
    """
    rounds = undisturbed_rounds(trio.rounds())
    took: dict[str, dict[str, Any]] = {"seconds": {}, "processor_s": {}}
    for kind, samples in zip(KINDS, zip(*rounds, strict=True), strict=True):
        took["seconds"][kind] = spread([sample.step_s for sample in samples])
        took["processor_s"][kind] = statistics.median(sample.computing_s for sample in samples)

    def over_rounds(value: Callable[[Sample, Sample, Sample], float]) -> dict[str, float]:
        return spread([value(*samples) for samples in rounds])

    return {
        **took,
        "exposed": over_rounds(lambda t, c, m: (t.step_s - c.step_s) / m.step_s),
        "waited": over_rounds(lambda t, _, m: (t.waited_s or 0.0) / m.step_s),
        "to_perfect": over_rounds(lambda t, c, m: t.step_s / max(c.step_s, m.step_s)),
        "to_none": over_rounds(lambda t, c, m: t.step_s / (c.step_s + m.step_s)),
        "to_possible": over_rounds(
            lambda t, c, m: t.step_s / max(c.step_s, m.step_s, (c.computing_s + m.computing_s) / cores)
        ),
    }


def computing_alone_s(trio: Trio) -> float:
    """Shortest time of a step without communication, measured before there was a rate: noise only adds to it."""
    return min(sample.step_s for sample in undisturbed(trio.computing.floor))


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    table, repeats = result["rows"], result["repeats"]
    said = []
    if min(row["undisturbed"] for row in table) < repeats:
        said.append(
            f"Other processes took more than {result['quiet_below']:.0%} of the machine during some of the {repeats} "
            f"rounds ({sum(row['rejected'] for row in table)} steps were measured again)."
        )
    if result["ranks"] > result["machine"]["cores"]:
        said.append(
            f"{result['ranks']} ranks share {result['machine']['cores']} cores: while one of them waits, others "
            "compute, so even a step that hides nothing of its own may seem to."
        )
    if result["network"] == "loopback":
        said.append("On loopback communication is work of the processors, which computing needs: little can be hidden.")
    return said + [sentence for row in table for sentence in _doubts(row)]


def _doubts(row: dict[str, Any]) -> list[str]:
    said = []
    balance = row["seconds"][SENDING]["median"] / row["seconds"][COMPUTING]["median"]
    if row["rate_mbit"] is not None and row["rate_mbit"] < row["wanted_mbit"]:
        said.append(
            f"{row['shape']}: {row['wanted_mbit']:.0f} Mbit/s would be the rate for as much communication as "
            f"computing, but the links were set to the most that was allowed, {row['rate_mbit']:.0f}."
        )
    elif row["rate_mbit"] is not None and not 1 / _BALANCE <= balance <= _BALANCE:
        said.append(f"{row['shape']}: communication takes {balance:.2f} times as long as computing, not as long.")
    excess = row["interface_excess"]
    if excess is not None and not 0 <= excess <= row["excess_allowed"]:
        said.append(
            f"{row['shape']}: the interfaces sent {excess:+.1%} against what Cuboid counted, but headers explain no "
            f"more than {row['excess_allowed']:.1%}: don't trust the bytes."
        )
    if row["silent_bytes"] is not None and row["silent_bytes"] > _SILENCE * row["counted_bytes"]:
        said.append(f"{row['shape']}: {row['silent_bytes']:.0f} bytes were sent by collectives that should do nothing.")
    return said
