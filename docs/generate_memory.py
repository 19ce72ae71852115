"""Write the table of docs/performance.md from what benchmarks/memory.py measured.

python docs/generate_memory.py [--check] [--from FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured" / "memory.json"
#: What --from takes out of the benchmark's folder, and where it goes.
TAKEN = {"memory.json": MEASURED, "memory.png": DOCS / "figures" / "memory.png"}
MIB = 2**20


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the table of activations in docs/performance.md.")
    arguments.add_argument("--from", dest="source", type=Path, help="folder with results")
    given = arguments.parse_args()
    if given.source is not None:
        for name, place in TAKEN.items():
            shutil.copyfile(given.source / name, place)
    written = part(json.loads(MEASURED.read_text(encoding="utf-8"))) if MEASURED.is_file() else "Not measured yet."
    return update(DOCS / "performance.md", {"activations": written}, "docs/generate_memory.py", check=given.check)


def part(result: dict[str, Any]) -> str:
    """Facts, the table and the picture."""
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = [
        f"* Machine: {own['processor']}, {own['cores']} cores for all ranks; {own['system']}, {versions}.",
        f"* Model: a Llama of {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
        f"{sizes['heads']} query and {sizes['key_value_heads']} key/value heads, vocabulary {sizes['vocabulary']}; "
        f"{sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}.",
        f"* Command: `{result['command']}`.",
    ]
    header = [
        "",
        "kept, MiB",
        "by the formula",
        "× ranks ÷ plain",
        "÷ 1×1×1",
        "peak, MiB",
        "× ranks ÷ plain",
        "÷ 1×1×1",
    ]
    lines = [_line(row) for row in result["rows"]]
    rows = table(header, lines, "l" + "r" * (len(header) - 1))
    return "\n\n".join(["\n".join(facts), rows, "![What the fullest rank keeps on each mesh](figures/memory.png)"])


def _line(row: dict[str, Any]) -> list[str]:
    formula = row["formula_total_bytes"]
    return [
        row["name"].replace("(auto)", "(`auto`)"),
        f"{row['kept_bytes'] / MIB:.2f}",
        "–" if formula is None else f"{formula / MIB:.2f}",
        f"**{row['kept_share_of_plain']:.2f}**",
        f"{row['kept_share_of_alone']:.2f}",
        f"{row['peak_bytes'] / MIB:.2f}",
        f"**{row['peak_share_of_plain']:.2f}**",
        f"{row['peak_share_of_alone']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
