"""From records to numbers: medians with their spread, ratios of paired rounds, and what theory says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from contestants import Entry
from measuring import Record
from summary import spread, times_as_fast, undisturbed
from workload import Workload

from cuboid.models.stages.model_costs import model_sizes
from cuboid.seq1f1b.schedule.partition import cut_sequence, even_cut, segment_cost
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import unit_flops

#: Whom every contestant is compared with.
YARDSTICKS = {"torch": Entry("torch"), "deepspeed": Entry("deepspeed"), "own_1f1b": Entry("cuboid")}


def rows(records: Sequence[Record], workload: Workload) -> list[dict[str, Any]]:
    """A row of numbers for each record; plain values only."""
    by_name = {(record.micro_batches, record.entry.name): record for record in records}
    return [_row(record, by_name, workload) for record in records]


def _row(record: Record, by_name: dict[tuple[int, str], Record], workload: Workload) -> dict[str, Any]:
    entry, count, others = record.entry, record.micro_batches, workload.stages - 1
    quiet = undisturbed(record.samples)
    whole, cut = simulated(workload, Entry("cuboid"), count), simulated(workload, entry, count)
    yardsticks = {key: by_name.get((count, other.name)) for key, other in YARDSTICKS.items()}
    return {
        "name": entry.name,
        **asdict(entry),
        "micro_batches": count,
        "lengths": list(lengths_of(workload, entry)),
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "peak_bytes": record.peak_bytes,
        "step_s": spread([sample.step_s for sample in quiet]),
        "bubble": statistics.median(sum(sample.idle) / len(sample.idle) for sample in quiet),
        "bubble_traced": None if record.timeline is None else record.timeline.bubble,
        "bubble_theory": others / (entry.segments * count + others),
        "bubble_simulated": cut.bubble,
        "ratios": {
            key: times_as_fast(record.samples, other.samples) for key, other in yardsticks.items() if other is not None
        },
        "undisturbed": sum(sample.is_quiet for sample in record.samples),
        "rejected": record.rejected,
        "ratio_theory": (count + others) / (count + others / entry.segments),
        "ratio_simulated": whole.makespan_s / cut.makespan_s,
        "samples": [asdict(sample) for sample in record.samples],
    }


def memory_rows(records: Sequence[Record], workload: Workload) -> list[dict[str, Any]]:
    """A row for each record: what each stage keeps, and how many sequences it has in flight by the schedule."""
    return [
        {
            "name": record.entry.name,
            **asdict(record.entry),
            "micro_batches": record.micro_batches,
            "peak_bytes": record.peak_bytes,
            "sequences_in_flight": [
                tokens / workload.length
                for tokens in simulated(workload, record.entry, record.micro_batches).peak_bytes
            ],
        }
        for record in records
    ]


def lengths_of(workload: Workload, entry: Entry) -> tuple[int, ...]:
    """Tokens of each segment."""
    if entry.partition == "even":
        return even_cut(workload.length, entry.segments)
    return cut_sequence(workload.length, entry.segments, cost=segment_cost(model_sizes(workload.config())))


def simulated(workload: Workload, entry: Entry, micro_batches: int) -> Timeline:
    """The step by the count of operations, in a time of which only ratios mean something. For bytes it has tokens."""
    shape = PipelineShape(workload.stages, micro_batches, entry.segments)
    lengths = lengths_of(workload, entry)
    cost = unit_flops(model_sizes(workload.config()), workload.balance, lengths)
    return simulate(SCHEDULES["seq1f1b"](shape), shape, cost, kept_bytes=lambda action: lengths[action.segment])
