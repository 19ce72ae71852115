"""Write the table of docs/performance.md from what benchmarks/overhead.py measured.

python docs/generate_overhead.py [--check] [--from FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured" / "overhead.json"
PICTURE = Path("figures") / "overhead.png"


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the table of overheads in docs/performance.md.")
    arguments.add_argument("--from", dest="source", type=Path, help="folder with results")
    given = arguments.parse_args()
    if given.source is not None:
        shutil.copyfile(given.source / "overhead.json", MEASURED)
        shutil.copyfile(given.source / "overhead.png", DOCS / PICTURE)
    text = _part(json.loads(MEASURED.read_text(encoding="utf-8"))) if MEASURED.exists() else "Not measured yet."
    return update(DOCS / "performance.md", {"overhead": text}, "docs/generate_overhead.py", check=given.check)


def _part(result: dict[str, Any]) -> str:
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = [
        f"* Machine: {own['processor']}, one core of {own['cores']}; {own['system']}, {versions}.",
        f"* Model: {sizes['model']}, {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
        f"{sizes['heads']} heads, vocabulary {sizes['vocabulary']}; {sizes['batch']} rows of {sizes['length']} tokens.",
        f"* Command: `{result['command']}`; {result['repeats']} rounds.",
    ]
    disturbed = sum(result["repeats"] - row["undisturbed"] for row in result["rows"])
    if disturbed:
        rounds = result["repeats"] * len(result["rows"])
        facts.append(f"* The core was busy with other work during {disturbed} of {rounds} rounds.")
    header = ["training", "dtype", "without, s", "with, s", "overhead", "by processor time", "losses differ"]
    header.append("gradients differ")
    parts = ["\n".join(facts), table(header, list(map(_line, result["rows"])), "llrrrrrr")]
    parts += [_profile(row) for row in result["rows"] if row["profile"]]
    return "\n\n".join(
        [*parts, f"![How much longer a step takes with Cuboid on a mesh of 1×1×1]({PICTURE.as_posix()})"]
    )


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        row["dtype"],
        *(
            f"{row[key]['median']:.3f} ({row[key]['low']:.3f}–{row[key]['high']:.3f})"
            for key in ("plain_s", "cuboid_s")
        ),
        _percent(row["ratio"], bold="**"),
        _percent(row["ratio_processor"]),
        f"{row['loss_difference']:.0e}",
        f"{row['gradient_difference']:.0e}",
    ]


def _percent(ratio: dict[str, float], *, bold: str = "") -> str:
    """How much more it is."""
    median, low, high = (f"{ratio[key] - 1:+.1%}" for key in ("median", "low", "high"))
    return f"{bold}{median}{bold} ({low} to {high})"


def _profile(row: dict[str, Any]) -> str:
    """What differs most between the two, by the profiler."""
    lines = []
    for each in row["profile"]:
        plain, ours = each["plain"], each["cuboid"]
        times = [f"{seconds * 1e3:.1f}" for seconds in (plain["seconds"], ours["seconds"])]
        more = f"{(ours['seconds'] - plain['seconds']) * 1e3:+.1f}"
        lines.append([f"`{each['operator']}`", *times, more, f"{plain['calls']:.0f}", f"{ours['calls']:.0f}"])
    header = ["operator", "without, ms", "with, ms", "more", "calls without", "calls with"]
    return f"{row['name']}, {row['dtype']}, what differs most by the profiler:\n\n{table(header, lines, 'lrrrrr')}"


if __name__ == "__main__":
    sys.exit(main())
