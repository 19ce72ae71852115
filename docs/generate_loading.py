"""Write the tables of docs/performance.md from what benchmarks/loading.py measured.

python docs/generate_loading.py [--check] [--from FOLDER …]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured"
#: In what checkpoints hold their weights; each is a run of its own.
STORED = ("float32", "bfloat16")
MIB = 2**20


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the tables of loading in docs/performance.md.")
    arguments.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], help="folders with results")
    given = arguments.parse_args()
    for source in given.sources:
        stored = json.loads((source / "loading.json").read_text(encoding="utf-8"))["workload"]["stored"]
        shutil.copyfile(source / "loading.json", _measured(stored))
        shutil.copyfile(source / "loading.png", DOCS / "figures" / f"loading_{stored}.png")
    parts = {f"loading {stored}": _written(_measured(stored)) for stored in STORED}
    return update(DOCS / "performance.md", parts, "docs/generate_loading.py", check=given.check)


def _measured(stored: str) -> Path:
    return MEASURED / f"loading_{stored}.json"


def _written(measured: Path) -> str:
    if not measured.is_file():
        return "Not measured yet."
    return part(json.loads(measured.read_text(encoding="utf-8")))


def part(result: dict[str, Any]) -> str:
    """Facts, a table for each number of ranks, and the picture."""
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = [
        f"* Machine: {own['processor']}, {own['cores']} cores, {own['memory_bytes'] / 2**30:.0f} GiB; {own['system']}, "
        f"{versions}.",
        f"* Checkpoint: a Llama of {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, in "
        f"{sizes['stored']}, {result['files_bytes'] / MIB:.0f} MiB of files; loaded as {sizes['loaded']}, "
        f"{result['weights_bytes'] / MIB:.0f} MiB. Page cache: {result['page_cache']}.",
        f"* Command: `{result['command']}`; rounds: {result['repeats']}.",
        *_doubts(result),
    ]
    parts = ["\n".join(facts)]
    for count in sorted({row["ranks"] for row in result["rows"]}):
        own_rows = [row for row in result["rows"] if row["ranks"] == count]
        parts.append(_table(own_rows, count))
    parts.append(f"![Times and peaks of loading](figures/loading_{sizes['stored']}.png)")
    return "\n\n".join(parts)


def _doubts(result: dict[str, Any]) -> list[str]:
    taken = sum(len(row["samples"]) for row in result["rows"])
    quiet = sum(row["undisturbed"] for row in result["rows"])
    doubts = (
        [] if quiet == taken else [f"* The machine was busy with other work during {taken - quiet} of {taken} loads."]
    )
    left_out = [row for row in result["rows"] if row["left_out"]]
    doubts += [f"* Left out: {row['name']} on {row['ranks']} ranks; {row['left_out']}." for row in left_out]
    return doubts


def _table(rows: list[dict[str, Any]], count: int) -> str:
    first = rows[0]["name"]
    header = [f"{count} ranks; memory in MiB", "load, s", f"÷ {first}", "peak of a rank", "all peaks", f"÷ {first}"]
    header += ["PSS of all after", "file pages of a rank"]
    lines = [_line(row) for row in rows if row["samples"]]
    measured = next((row for row in rows if row["samples"]), rows[0])
    held, files = measured["ideal_held_bytes"] / MIB, measured["ideal_file_bytes"] / MIB
    lines.append(["*size ÷ ranks*", "–", "–", f"{held:.0f}", f"{held * count:.0f}", "–", "–", f"{files:.0f}"])
    return table(header, lines, "l" + "r" * (len(header) - 1))


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        _range(row["load_s"]),
        _range(row.get("ratio_time")),
        _mib(row["peak_bytes"]),
        _mib(row["peak_sum_bytes"]),
        _range(row.get("ratio_peak_sum")),
        _mib(row["proportional_sum_bytes"]),
        _mib(row["touched_bytes"]),
    ]


def _mib(numbers: dict[str, float]) -> str:
    return f"{numbers['median'] / MIB:.0f}"


def _range(numbers: dict[str, float] | None) -> str:
    return "1" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
