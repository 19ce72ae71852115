"""Write the tables of docs/performance.md from what benchmarks/layer_meshes.py measured on 8 and on 64 ranks.

python docs/generate_meshes.py [--check] [--from FOLDER …]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured"
RANKS = (64, 8)
MB = 1e6


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the tables of meshes in docs/performance.md.")
    arguments.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], help="folders with results")
    given = arguments.parse_args()
    for source in given.sources:
        ranks = json.loads((source / "layer_meshes.json").read_text(encoding="utf-8"))["ranks"]
        shutil.copyfile(source / "layer_meshes.json", _measured(ranks))
        shutil.copyfile(source / "layer_meshes.png", DOCS / "figures" / f"layer_meshes_{ranks}.png")
    parts = {f"{ranks} ranks": _part(json.loads(_measured(ranks).read_text(encoding="utf-8"))) for ranks in RANKS}
    return update(DOCS / "performance.md", parts, "docs/generate_meshes.py", check=given.check)


def _measured(ranks: int) -> Path:
    return MEASURED / f"layer_meshes_{ranks}.json"


def _part(result: dict[str, Any]) -> str:
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = "\n".join(
        [
            f"* Machine: {own['processor']}, {own['cores']} cores for all ranks; {own['system']}, {versions}.",
            f"* Layer: {sizes['layer']}, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, {sizes['heads']} "
            f"heads; {sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}.",
            f"* Links: {result['rate_mbit']:g} Mbit/s for each rank, {result['measured_mbit']:.2f} measured before.",
            f"* Command: `{result['command']}`; {result['repeats']} rounds.",
            *_doubts(result),
        ]
    )
    rows = result["rows"]
    first, second = rows[0]["shape"], rows[1]["shape"]
    header = ["mesh", "step, s", f"× {first}", "by bytes", f"× {second}", "by bytes", "MB sent", "bytes ÷ rate, s"]
    lines = [[*_name(row), *_ratio(row, first), *_ratio(row, second), *_sent(row)] for row in rows]
    header += ["without a limit, s", "error"]
    return f"{facts}\n\n{table(header, lines, 'l' + 'r' * (len(header) - 1))}"


def _doubts(result: dict[str, Any]) -> list[str]:
    taken = sum(len(row["samples"]) for row in result["rows"])
    quiet = sum(row["undisturbed"] for row in result["rows"])
    if quiet == taken:
        return []
    return [f"* The machine was busy with other work during {taken - quiet} of {taken} steps."]


def _name(row: dict[str, Any]) -> list[str]:
    name = f"{row['shape']} (`auto`)" if row["mesh"] == "auto" else row["shape"]
    return [name, _range(row["step_s"])]


def _ratio(row: dict[str, Any], other: str) -> list[str]:
    if other not in row["ratios"]:
        return ["1", "1"]
    return [_range(row["ratios"][other], 2), f"{row['ratios_theory'][other]:.2f}"]


def _sent(row: dict[str, Any]) -> list[str]:
    floor = f"{row['floor_s']['median']:.1f}"
    return [f"{row['counted_bytes'] / MB:.2f}", f"{row['link_s']:.1f}", floor, f"{row['error']:.0e}"]


def _range(numbers: dict[str, float], digits: int = 1) -> str:
    low, median, high = (f"{numbers[key]:.{digits}f}" for key in ("low", "median", "high"))
    return f"{median} ({low}–{high})"


if __name__ == "__main__":
    sys.exit(main())
