"""Write the tables of docs/performance.md from what benchmarks/training_step.py measured, one for each network and
precision.

python docs/generate_training_step.py [--check] [--from FOLDER …]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured"
CASES = [(network, dtype) for network in ("shaped", "loopback") for dtype in ("float32", "bfloat16")]
MB = 1e6


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the tables of training steps in docs/performance.md.")
    arguments.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], help="folders with results")
    given = arguments.parse_args()
    for source in given.sources:
        result = json.loads((source / "training_step.json").read_text(encoding="utf-8"))
        name = _name(result["network"], result["workload"]["dtype"])
        shutil.copyfile(source / "training_step.json", MEASURED / f"{name}.json")
        shutil.copyfile(source / "training_step.png", DOCS / "figures" / f"{name}.png")
    parts = {f"training step, {network}, {dtype}": _part(network, dtype) for network, dtype in CASES}
    return update(DOCS / "performance.md", parts, "docs/generate_training_step.py", check=given.check)


def _name(network: str, dtype: str) -> str:
    return f"training_step_{network}_{dtype}"


def _part(network: str, dtype: str) -> str:
    path = MEASURED / f"{_name(network, dtype)}.json"
    if not path.exists():
        return "Not measured yet."
    return describe(json.loads(path.read_text(encoding="utf-8")))


def describe(result: dict[str, Any]) -> str:
    """One result in Markdown: facts, comparisons, doubts, table, picture."""
    own, sizes = result["machine"], result["workload"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = "\n".join(
        [
            f"* Machine: {own['processor']}, {own['cores']} cores for all ranks; {own['system']}, {versions}.",
            f"* Model: {sizes['model']}, {sizes['layers']} layers, hidden {sizes['hidden']}, MLP "
            f"{sizes['intermediate']}, {sizes['heads']} heads, vocabulary {sizes['vocabulary']}; {sizes['batch']} rows "
            f"of {sizes['length']} tokens in all, {sizes['dtype']}.",
            f"* Links: {_links(result)}.",
            f"* Command: `{result['command']}`; {result['repeats']} rounds.",
            *(f"* The automatic mesh is **{_comparison(one)}**." for one in result["comparisons"]),
            *(f"* {remark}" for remark in result["remarks"]),
        ]
    )
    picture = f"![Step times of all contestants](figures/{_name(result['network'], sizes['dtype'])}.png)"
    return f"{facts}\n\n{_table(result)}\n\n{picture}"


def _links(result: dict[str, Any]) -> str:
    if result["rate_mbit"] is None:
        return "loopback, without a limit"
    return f"{result['rate_mbit']:g} Mbit/s for each rank, {result['measured_mbit']:.2f} measured before"


def _comparison(one: dict[str, Any]) -> str:
    sent = "" if one["bytes"] is None else f" (which sends {one['bytes']:.2f} times as much)"
    return f"{_range(one['ratio'])} times as fast as {one['what']}{sent}"


def _table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    auto = next((row for row in rows if row["key"] == "cuboid-auto"), None)
    header = ["contestant", "step, s", "`auto` is × as fast", "CPU, s"]
    shaped = result["rate_mbit"] is not None
    if shaped:
        header += ["MB sent", "by bytes", "bytes ÷ rate, s", "without a limit, s"]
    header.append("error")
    lines = [[*_times(row, auto), *(_sent(row, auto) if shaped else []), f"{row['error']:.0e}"] for row in rows]
    return table(header, lines, "l" + "r" * (len(header) - 1))


def _times(row: dict[str, Any], auto: dict[str, Any] | None) -> list[str]:
    ratio = None if auto is None else auto["ratios"].get(row["key"])
    return [row["name"], _range(row["step_s"]), _range(ratio), f"{row['computing_s']:.1f}"]


def _sent(row: dict[str, Any], auto: dict[str, Any] | None) -> list[str]:
    more = None if auto is None else auto["ratios_bytes"].get(row["key"])
    return [
        f"{row['sent_bytes'] / MB:.1f}",
        "1" if more is None else f"{more:.2f}",
        f"{row['link_s']:.1f}",
        f"{row['floor_s']['median']:.1f}",
    ]


def _range(numbers: dict[str, float] | None) -> str:
    return "1" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
