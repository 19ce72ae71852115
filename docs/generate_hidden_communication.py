"""Write the part of docs/performance.md about what benchmarks/hidden_communication.py measured.

python docs/generate_hidden_communication.py [--check] [--from FOLDER …]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from marked import DOCS, parser, table, update

MEASURED = DOCS.parent / "benchmarks" / "measured"
MB = 1e6


def main() -> int:
    """Update or check the page; the exit status."""
    arguments = parser("Write the part about hidden communication in docs/performance.md.")
    arguments.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], help="folders with results")
    given = arguments.parse_args()
    for source in given.sources:
        name = _name(json.loads((source / "hidden_communication.json").read_text(encoding="utf-8")))
        shutil.copyfile(source / "hidden_communication.json", MEASURED / f"{name}.json")
        shutil.copyfile(source / "hidden_communication.png", DOCS / "figures" / f"{name}.png")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in MEASURED.glob("hidden_communication_*.json")]
    found.sort(key=lambda result: (result["ranks"], result["workload"]["layers"]))
    text = "\n\n".join(map(_part, found)) or "Not measured yet."
    return update(DOCS / "performance.md", {"hidden": text}, "docs/generate_hidden_communication.py", check=given.check)


def _name(result: dict[str, Any]) -> str:
    """Of the files that keep a result: each number of ranks and layers has its own."""
    return f"hidden_communication_{result['ranks']}_ranks_{result['workload']['layers']}_layers"


def _part(result: dict[str, Any]) -> str:
    own, sizes, ranks = result["machine"], result["workload"], result["ranks"]
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    facts = [
        f"* Machine: {own['processor']}, {own['cores']} cores for {ranks} ranks; {own['system']}, {versions}.",
        f"* Layers: {sizes['layers']} of {sizes['layer']}, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
        f"{sizes['heads']} heads; {sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}.",
        f"* Command: `{result['command']}`; {result['repeats']} rounds.",
        *_doubts(result),
    ]
    header = [
        "mesh",
        "Mbit/s",
        "step, s",
        "computing, s",
        "communication, s",
        "exposed",
        "waited",
        "÷ perfect",
        "÷ none",
    ]
    header += ["÷ possible", "MB sent", "error"]
    lines = [_line(row) for row in result["rows"]]
    picture = f"![Steps of {ranks} ranks, with what of their communication is exposed](figures/{_name(result)}.png)"
    heading = f"### {ranks} ranks, {sizes['layers']} layer{'s' if sizes['layers'] > 1 else ''}"
    return "\n\n".join([heading, "\n".join(facts), table(header, lines, "l" + "r" * 11), picture])


def _doubts(result: dict[str, Any]) -> list[str]:
    said = []
    disturbed = sum(result["repeats"] - row["undisturbed"] for row in result["rows"])
    if disturbed:
        rounds = result["repeats"] * len(result["rows"])
        said.append(f"* The machine was busy with other work during {disturbed} of {rounds} rounds.")
    capped = [row for row in result["rows"] if row["rate_mbit"] is not None and row["rate_mbit"] < row["wanted_mbit"]]
    said += [
        f"* Computing and sending would take the same time on {row['shape']} at {row['wanted_mbit']:.0f} Mbit/s, but "
        f"the links were set to the most that was allowed, {row['rate_mbit']:.0f}."
        for row in capped
    ]
    if result["ranks"] > result["machine"]["cores"]:
        said.append("* Ranks share cores, so one computes while another waits: that too hides communication here.")
    return said


def _line(row: dict[str, Any]) -> list[str]:
    rate = "no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:.0f}"
    name = f"{row['shape']} (`auto`)" if row["mesh"] == "auto" else row["shape"]
    exposed, waited = ([f"{row[name][key]:.0%}" for key in ("median", "low", "high")] for name in ("exposed", "waited"))
    return [
        name,
        rate,
        *(_range(row["seconds"][kind]) for kind in ("step", "computing", "communication")),
        f"**{exposed[0]}** ({exposed[1]} to {exposed[2]})",
        f"**{waited[0]}** ({waited[1]} to {waited[2]})",
        *(_range(row[key]) for key in ("to_perfect", "to_none", "to_possible")),
        f"{row['counted_bytes'] / MB:.1f}",
        f"{row['error']:.0e}",
    ]


def _range(numbers: dict[str, float]) -> str:
    median, low, high = (f"{numbers[key]:.2f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


if __name__ == "__main__":
    sys.exit(main())
