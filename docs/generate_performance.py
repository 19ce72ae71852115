"""Write the tables of docs/performance.md from what benchmarks/pipeline.py measured.

python docs/generate_performance.py [--check] [--from FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured" / "pipeline.json"
#: What --from takes out of the benchmark's folder, and where it goes.
TAKEN = {
    "pipeline.json": MEASURED,
    "pipeline.png": DOCS / "figures" / "pipeline.png",
    "timelines.png": DOCS / "figures" / "pipeline_timelines.png",
}
MIB = 2**20


def machine(result: dict[str, Any]) -> str:
    """Where and how it was measured."""
    own = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    sizes = result["workload"]
    return "\n".join(
        [
            f"* Machine: {own['processor']}, {own['cores']} cores, {own['memory_bytes'] / 2**30:.0f} GiB; "
            f"{own['system']}, Python {own['python']}, {versions}.",
            f"* Model: a Llama of {sizes['layers']} layers (hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
            f"{sizes['heads']} query and {sizes['key_value_heads']} key/value heads, vocabulary {sizes['vocabulary']}) "
            f"in {sizes['dtype']}, S = {sizes['length']} tokens, one row in each micro-batch.",
            f"* Command: `{result['command']}`",
            *_doubts(result),
        ]
    )


def _doubts(result: dict[str, Any]) -> list[str]:
    taken = sum(len(row["samples"]) for row in result["rows"])
    disturbed = taken - sum(row["undisturbed"] for row in result["rows"])
    if disturbed == 0:
        return []
    return [f"* **The machine was busy during {disturbed} of {taken} steps: the times below are not to be trusted.**"]


def steps(result: dict[str, Any], micro_batches: int) -> str:
    """Table of step times and ratios."""
    header = ["", "step, s", "÷ torch", "÷ DeepSpeed", "÷ k = 1", "simulated", "theory"]
    rows = []
    for row in _rows(result, micro_batches):
        ratios = [_ratio(row, key) for key in ("torch", "deepspeed", "own_1f1b")]
        rows.append(
            [_name(row), _range(row["step_s"]), *ratios, f"{row['ratio_simulated']:.2f}", f"{row['ratio_theory']:.2f}"]
        )
    return table(header, rows, "lrrrrrr")


def bubbles(result: dict[str, Any]) -> str:
    """Table of idle shares, for each number of micro-batches."""
    counts = sorted({row["micro_batches"] for row in result["rows"]})
    header = [
        "",
        *(f"M = {count}: {kind}" for count in counts for kind in ("measured", "traced", "simulated", "theory")),
    ]
    rows = []
    for index, row in enumerate(_rows(result, counts[0])):
        cells = []
        for count in counts:
            own = _rows(result, count)[index]
            keys = ("bubble", "bubble_traced", "bubble_simulated", "bubble_theory")
            cells += ["–" if own[key] is None else f"{100 * own[key]:.1f} %" for key in keys]
        rows.append([_name(row), *cells])
    return table(header, rows, "l" + "r" * (len(header) - 1))


def memory(result: dict[str, Any]) -> str:
    """Table of peaks with four stages."""
    own = result["memory"]
    whole = next(row for row in own if row["kind"] == "cuboid" and row["segments"] == 1)
    stages = range(len(whole["peak_bytes"]))
    rows = []
    for row in own:
        share = max(row["peak_bytes"]) / max(whole["peak_bytes"])
        theory = max(row["sequences_in_flight"]) / max(whole["sequences_in_flight"])
        peaks = [f"{row['peak_bytes'][stage] / MIB:.0f}" for stage in stages]
        rows.append([_name(row), *peaks, f"**{share:.2f}**", f"{theory:.2f}"])
    header = ["MiB", *(f"stage {stage}" for stage in stages), "largest ÷ k = 1", "by tokens in flight"]
    return table(header, rows, "l" + "r" * (len(header) - 1))


def _rows(result: dict[str, Any], micro_batches: int) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["micro_batches"] == micro_batches]


def _name(row: dict[str, Any]) -> str:
    if row["kind"] == "cuboid":
        return f"k = {row['segments']}" + (f", {row['partition']}" if row["segments"] > 1 else "")
    return {"torch": "`torch.distributed.pipelining`", "deepspeed": "DeepSpeed `PipelineEngine`"}[row["kind"]]


def _range(numbers: dict[str, float]) -> str:
    return f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def _ratio(row: dict[str, Any], key: str) -> str:
    is_itself = row["segments"] == 1 and key == {"cuboid": "own_1f1b"}.get(row["kind"], row["kind"])
    return "1" if is_itself else _range(row["ratios"][key])


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the tables of docs/performance.md.")
    arguments.add_argument("--from", type=Path, dest="source", help="first take over the results in this folder")
    given = arguments.parse_args()
    if given.source is not None:
        for name, target in TAKEN.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(given.source / name, target)
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    counts = sorted({row["micro_batches"] for row in result["rows"]})
    parts = {f"steps, M = {count}": steps(result, count) for count in counts}
    parts |= {"machine": machine(result), "bubbles": bubbles(result), "memory": memory(result)}
    return update(DOCS / "performance.md", parts, "docs/generate_performance.py", check=given.check)


if __name__ == "__main__":
    sys.exit(main())
