"""From records to numbers: medians with their spread, ratios of paired rounds, and what would be ideal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from summary import spread, undisturbed, undisturbed_rounds

from loading_parts.measuring import Record, Sample

#: What each sample is asked, for the table.
_FIGURES: dict[str, Callable[[Sample], float]] = {
    "load_s": lambda sample: sample.load_s,
    "computing_s": lambda sample: sample.computing_s,
    # The most of any rank, and the sum over all of them.
    "peak_bytes": lambda sample: max(each.peak_bytes - each.floor_bytes for each in sample.footprints),
    "peak_sum_bytes": lambda sample: sum(each.peak_bytes - each.floor_bytes for each in sample.footprints),
    "own_bytes": lambda sample: max(each.peak_own_bytes for each in sample.footprints),
    "touched_bytes": lambda sample: max(each.peak_files_bytes for each in sample.footprints),
    "touched_sum_bytes": lambda sample: sum(each.peak_files_bytes for each in sample.footprints),
    "read_sum_bytes": lambda sample: sum(each.read_bytes for each in sample.footprints),
    "proportional_sum_bytes": lambda sample: sum(each.proportional_bytes for each in sample.footprints),
    "floor_bytes": lambda sample: max(each.floor_bytes for each in sample.footprints),
}


def rows(records: Sequence[Record], files_bytes: int, weights_bytes: int) -> list[dict[str, Any]]:
    """A row of numbers for each record; plain values only."""
    return [_row(record, records, files_bytes, weights_bytes) for record in records]


def _row(record: Record, records: Sequence[Record], files_bytes: int, weights_bytes: int) -> dict[str, Any]:
    row = {
        "name": record.way.name,
        "ranks": record.ranks,
        "left_out": record.left_out,
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "undisturbed": sum(sample.is_quiet for sample in record.samples),
        "rejected": record.rejected,
        "samples": [asdict(sample) for sample in record.samples],
        "ideal_file_bytes": files_bytes / record.ranks,
        "ideal_held_bytes": weights_bytes / record.ranks,
    }
    if not record.samples:
        return row
    quiet = undisturbed(record.samples)
    row |= {name: spread([take(sample) for sample in quiet]) for name, take in _FIGURES.items()}
    first = next(other for other in records if other.ranks == record.ranks)
    if first.samples and first is not record:
        row["ratio_time"] = _ratio(record, first, "load_s")
        row["ratio_peak_sum"] = _ratio(record, first, "peak_sum_bytes")
    return row


def _ratio(record: Record, first: Record, figure: str) -> dict[str, float]:
    """How many times as much as the first, round by round; over the rounds in which both were undisturbed."""
    take = _FIGURES[figure]
    # One that was left out later has fewer rounds.
    rounds = undisturbed_rounds(zip(record.samples, first.samples, strict=False))
    return spread([take(theirs) / take(ours) for theirs, ours in rounds])


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    said = []
    measured = [row for row in result["rows"] if row["samples"]]
    if any(row["undisturbed"] < len(row["samples"]) for row in measured):
        rejected = sum(row["rejected"] for row in measured)
        said.append(
            f"Other processes took more than {result['quiet_below']:.0%} of the machine during some loads "
            f"({rejected} were measured again, until the time for that was over): don't trust the times."
        )
    for row in result["rows"]:
        if row["left_out"]:
            said.append(f"{row['name']} on {row['ranks']} ranks was left out: {row['left_out']}.")
    said.append(
        "Files come from the page cache, which was warmed before each load: the times have no disk in them. Pages of "
        "mapped files are in each rank's resident memory, but exist once; the proportional set size counts them so."
    )
    return said
