"""From records to numbers: medians with their spread, ratios of paired rounds, and what theory and simulator say."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from network.names import burst_bytes
from summary import spread, times_as_fast, undisturbed

from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Timeline, peak_bytes, simulate
from emulated.entries import YARDSTICKS, Entry
from emulated.measuring import Record
from emulated.work import Work

#: The label that everything carries.
EMULATED = "computing emulated by sleeping"
#: Above this, processes wait for cores, which stages of their own wouldn't.
MOST_PROCESSOR_SHARE = 0.5
#: Below this, what a unit costs beyond its sleep weighs too much.
LEAST_UNIT_S = 0.010
#: By how much units may be late, as a part of their time, before it is told.
MOST_LATE = 0.01
#: How much longer than simulated a step may be before it is told.
MOST_EXCESS = 0.05


def rows(records: Sequence[Record], rate_mbit: float | None) -> list[dict[str, Any]]:
    """A row of numbers for each record; plain values only."""
    return [_row(record, records, rate_mbit) for record in records]


def _row(record: Record, records: Sequence[Record], rate_mbit: float | None) -> dict[str, Any]:
    entry, work = record.entry, record.work
    quiet = undisturbed(record.samples)
    cut, whole = (simulated(work, each, rate_mbit) for each in (entry, YARDSTICKS["own_1f1b"]))
    lengths = entry.lengths(work)
    step_s = spread([sample.step_s for sample in quiet])
    others = {other.entry: other for other in records if other.work == work}
    assert record.timeline is not None
    return {
        "name": entry.name,
        **asdict(entry),
        "stages": work.stages,
        "micro_batches": work.micro_batches,
        "lengths": list(lengths),
        "message_bytes": [work.message_bytes(length) for length in lengths],
        "shortest_forward_s": min(work.duration_s(lengths)(Action(Op.FORWARD, 0, 0, s)) for s in range(len(lengths))),
        "error": record.error,
        "step_s": step_s,
        "simulated_s": cut.makespan_s,
        "excess": step_s["median"] / cut.makespan_s - 1,
        "bubble": spread([sample.bubble for sample in quiet]),
        "bubble_simulated": cut.bubble,
        "bubble_theory": theory(entry, work),
        "ratios": {
            key: times_as_fast(record.samples, others[own].samples) for key, own in YARDSTICKS.items() if own in others
        },
        "ratio_simulated": whole.makespan_s / cut.makespan_s,
        "ratio_theory": (1 - theory(entry, work)) / (1 - theory(YARDSTICKS["own_1f1b"], work)),
        "sequences_in_flight": [
            peak_bytes([span.action for span in spans], lambda action: lengths[action.segment]) / work.length
            for spans in record.timeline.spans
        ],
        "sequences_in_flight_simulated": [peak / work.length for peak in cut.peak_bytes],
        "kept_bytes_estimated": [
            peak_bytes([span.action for span in spans], work.kept_bytes(lengths)) for spans in record.timeline.spans
        ],
        "late": statistics.median(sample.late for sample in quiet),
        "processor_share": statistics.median(
            sample.computing_s / (sample.step_s * (os.cpu_count() or 1)) for sample in quiet
        ),
        "undisturbed": sum(sample.is_quiet for sample in record.samples),
        "rejected": record.rejected,
        "samples": [asdict(sample) for sample in record.samples],
    }


def theory(entry: Entry, work: Work) -> float:
    """The bubble of equal units: (P − 1)/(kM + P − 1), for GPipe and 1F1B with k = 1."""
    others = work.stages - 1
    return others / (entry.segments * work.micro_batches + others)


def simulated(work: Work, entry: Entry, rate_mbit: float | None) -> Timeline:
    """The step as it would be without anything but the units' times and the links' rate. For bytes it has tokens."""
    shape = PipelineShape(work.stages, work.micro_batches, entry.segments)
    lengths = entry.lengths(work)

    def transfer_s(action: Action) -> float:
        assert rate_mbit is not None
        return work.message_bytes(lengths[action.segment]) * 8 / (rate_mbit * 1e6)

    return simulate(
        SCHEDULES[entry.schedule](shape),
        shape,
        work.duration_s(lengths),
        transfer_s=None if rate_mbit is None else transfer_s,
        kept_bytes=lambda action: lengths[action.segment],
    )


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    table = result["rows"]
    said = [
        "Computing is emulated: a unit sleeps for as long as its operations say. Schedules, messages and everything "
        "else between two units are real.",
        *(["A quick run, only to see that everything works."] if result["quick"] else []),
        *result["refusals"],
    ]
    if min(row["undisturbed"] for row in table) < result["repeats"]:
        said.append(
            f"Other processes took more than {result['quiet_below']:.0%} of the machine during some steps "
            f"({sum(row['rejected'] for row in table)} were measured again, until the time for that was over)."
        )
    shortest_s = min(row["shortest_forward_s"] for row in table)
    if shortest_s < LEAST_UNIT_S:
        said.append(
            f"The shortest unit takes {1e3 * shortest_s:.1f} ms forward, so that what it costs beyond its sleep weighs "
            "more than it would in practice."
        )
    busiest = max(table, key=lambda row: row["processor_share"])
    if busiest["processor_share"] > MOST_PROCESSOR_SHARE:
        said.append(
            f"The ranks kept the cores busy for {busiest['processor_share']:.0%} of the time ({_place(busiest)}): they "
            "may have waited for one another's cores, which ranks on machines of their own don't."
        )
    return said + _surprises(table) + _about_links(result)


def _surprises(table: list[dict[str, Any]]) -> list[str]:
    said = []
    latest = max(table, key=lambda row: row["late"])
    if latest["late"] > MOST_LATE:
        said.append(
            f"Units took up to {latest['late']:.1%} longer than they should ({_place(latest)}): they woke up late, or "
            "waited for a core."
        )
    longer = [row for row in table if row["excess"] > MOST_EXCESS]
    if longer:
        worst = max(longer, key=lambda row: row["excess"])
        said.append(
            f"Steps took more than {MOST_EXCESS:.0%} longer than simulated in {len(longer)} of {len(table)} rows, at "
            f"most {worst['excess']:.1%} ({_place(worst)})."
        )
    return said


def _about_links(result: dict[str, Any]) -> list[str]:
    if result["rate_mbit"] is None:
        return ["On loopback messages cost hardly any time."]
    least, burst = min(min(row["message_bytes"]) for row in result["rows"]), burst_bytes(result["rate_mbit"])
    if least < 4 * burst:
        return [
            f"The smallest message has {least} bytes, of which the links let {burst} pass at once: it isn't "
            "slowed as the simulation assumes; give more --width."
        ]
    return []


def _place(row: dict[str, Any]) -> str:
    return f"{row['name']} on {row['stages']} stages, M = {row['micro_batches']}"
