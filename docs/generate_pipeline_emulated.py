"""Write the tables of many stages in docs/performance.md from what benchmarks/pipeline_emulated.py measured.

python docs/generate_pipeline_emulated.py [--check] [--from FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured" / "pipeline_emulated.json"
#: What --from takes out of the benchmark's folder, and where it goes.
TAKEN = {
    "pipeline_emulated.json": MEASURED,
    "pipeline_emulated.png": DOCS / "figures" / "pipeline_emulated.png",
    "timelines.png": DOCS / "figures" / "pipeline_emulated_timelines.png",
}
#: Of how many times as fast a contestant is, and of its idle time.
HEADER = [
    *("", "step, s", "simulated", "÷ 1F1B", "simulated", "theory", "÷ torch", "÷ DeepSpeed"),
    *("bubble", "simulated", "theory", "sequences in flight"),
]


def part(result: dict[str, Any]) -> str:
    """Facts, and a table for each number of stages and of micro-batches."""
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    rate = result["rate_mbit"]
    links = "loopback" if rate is None else f"{rate:g} Mbit/s for each rank, {result['measured_mbit']:.2f} measured"
    facts = [
        f"* Machine: {own['processor']}, {own['cores']} cores for all stages; {own['system']}, {versions}.",
        f"* Emulated: {sizes['layers']} layers like Llama-2-7B's (hidden {sizes['hidden']}, MLP "
        f"{sizes['intermediate']}), sequences of {sizes['length']} tokens; the forward of a whole sequence sleeps for "
        f"{1e3 * sizes['forward_s']:g} ms on each stage.",
        f"* Messages: {sizes['width']} float32 numbers a token; {links}.",
        f"* Command: `{result['command']}`; rounds: {result['repeats']}.",
        *(f"* {sentence}" for sentence in result["remarks"]),
    ]
    tables = [_table(result, *setting) for setting in _settings(result)]
    return "\n\n".join(["\n".join(facts), *tables])


def _settings(result: dict[str, Any]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["stages"], row["micro_batches"]) for row in result["rows"]))


def _table(result: dict[str, Any], stages: int, micro_batches: int) -> str:
    own = [row for row in result["rows"] if (row["stages"], row["micro_batches"]) == (stages, micro_batches)]
    title = f"{stages} stages, M = {micro_batches} ({result['emulated']}):"
    return f"{title}\n\n{table(HEADER, [_cells(row) for row in own], 'l' + 'r' * (len(HEADER) - 1))}"


def _cells(row: dict[str, Any]) -> list[str]:
    bubbles = (row["bubble"]["median"], row["bubble_simulated"], row["bubble_theory"])
    return [
        _name(row),
        _range(row["step_s"]),
        f"{row['simulated_s']:.2f}",
        _ratio(row, "own_1f1b"),
        f"{row['ratio_simulated']:.2f}",
        f"{row['ratio_theory']:.2f}",
        *(_ratio(row, key) for key in ("torch", "deepspeed")),
        *(f"{100 * bubble:.1f} %" for bubble in bubbles),
        f"{max(row['sequences_in_flight']):.2f}",
    ]


def _name(row: dict[str, Any]) -> str:
    if row["kind"] != "cuboid":
        return {"torch": "`torch.distributed.pipelining`", "deepspeed": "DeepSpeed `PipelineEngine`"}[row["kind"]]
    return f"`{row['schedule']}`" + (f", k = {row['segments']}, {row['partition']}" if row["segments"] > 1 else "")


def _ratio(row: dict[str, Any], key: str) -> str:
    return _range(row["ratios"][key]) if key in row["ratios"] else "–"


def _range(numbers: dict[str, float]) -> str:
    return f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the tables of many stages in docs/performance.md.")
    arguments.add_argument("--from", type=Path, dest="source", help="first take over the results in this folder")
    given = arguments.parse_args()
    if given.source is not None:
        for name, target in TAKEN.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(given.source / name, target)
    parts = {"emulated stages": part(json.loads(MEASURED.read_text(encoding="utf-8")))}
    return update(DOCS / "performance.md", parts, "docs/generate_pipeline_emulated.py", check=given.check)


if __name__ == "__main__":
    sys.exit(main())
