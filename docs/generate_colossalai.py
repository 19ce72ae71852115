"""Write the table of docs/colossalai.md from what benchmarks/colossalai_3d.py measured.

python docs/generate_colossalai.py [--check] [--from FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured" / "colossalai_3d.json"
#: What --from takes out of the benchmark's folder, and where it goes.
TAKEN = {"colossalai_3d.json": MEASURED, "colossalai_3d.png": DOCS / "figures" / "colossalai_3d.png"}
MIB = 2**20


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the table of docs/colossalai.md.")
    arguments.add_argument("--from", dest="source", type=Path, help="take the benchmark's results from this folder")
    given = arguments.parse_args()
    for name, target in TAKEN.items() if given.source is not None else ():
        shutil.copyfile(given.source / name, target)
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    part = "\n\n".join([_machine(result), *map(_case, result["cases"])])
    return update(DOCS / "colossalai.md", {"measured": part}, "docs/generate_colossalai.py", check=given.check)


def _machine(result: dict[str, Any]) -> str:
    own = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    return (
        f"Measured on {own['processor']}, {own['cores']} cores for 8 ranks, gloo, float32; {versions}; "
        f"`{result['command']}`. Slowest or largest rank; times are medians of {result['repeats']} steps with "
        "quartiles, in brackets how many times as fast as Colossal-AI's 3-D in the same rounds."
    )


def _case(case: dict[str, Any]) -> str:
    rows = case["rows"]
    header = [case["title"], *(row["name"] for row in rows)]
    lines = [
        ["forward + backward, s", *(_time(row) for row in rows)],
        ["sent by a rank, MiB", *(_mib(row["sent_bytes"]) for row in rows)],
        ["kept for backward, MiB", *(_mib(row["saved_bytes"]) for row in rows)],
        ["of it inputs of linear layers", *(_mib(row["saved_by_kind"]["linear_inputs"]) for row in rows)],
        ["peak of live tensors, MiB", *(_mib(row["peak_bytes"]) for row in rows)],
        ["largest error against float64", *(f"{max(row['errors'].values()):.1e}" for row in rows)],
    ]
    doubtful = [row["name"] for row in rows if row["undisturbed"] == 0]
    text = table(header, lines, "l" + "r" * len(rows))
    if not doubtful:
        return text
    return f"{text}\n\nThe machine was busy in all steps of {', '.join(doubtful)}: those times say nothing."


def _time(row: dict[str, Any]) -> str:
    step, ratio = row["step_s"], row["times_as_fast"]
    paired = "" if ratio is None else f" [{ratio['median']:.2f}]"
    return f"{step['median']:.3f} ({step['low']:.3f}–{step['high']:.3f}){paired}"


def _mib(by_rank: list[int]) -> str:
    return f"{max(by_rank) / MIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
