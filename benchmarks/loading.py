"""Time and memory to bring a checkpoint onto ranks: only a rank's slices, the whole on each, and what others do.

python benchmarks/loading.py [--gib G] [--stored float32|bfloat16] [--ranks 4 8] [--repeats N] [--limit S] [--keep]
                             [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from loading_parts.checkpoint import QUICK, LoadingWorkload, warm_up, weights_bytes, write_checkpoint
from loading_parts.measuring import Record, measure
from loading_parts.report import draw, print_table
from loading_parts.results import rows
from network.calm import Bystanders
from network.script import run_script
from pipeline import machine
from quiet import QUIET

_DEFAULT_OUT = Path("runs") / "benchmarks" / "loading"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=2.0, help="weights once loaded, in GiB of float32 (default 2)")
    parser.add_argument(
        "--stored",
        choices=["float32", "bfloat16"],
        default="float32",
        help="what the checkpoint holds; bfloat16 is converted while it is loaded (default float32)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=[4, 8], help="default: 4 and 8; quick: 4")
    parser.add_argument("--network", choices=["loopback"], default="loopback", help="nothing of a load is on a network")
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default 10)")
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds to wait for quiet times, or repeat loads (default 1800)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint, for the next run with the same --out")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round, to see that everything works")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.repeats < 1 or given.gib <= 0:
        parser.error("--repeats must be 1 or more, and --gib more than 0")
    given.ranks = sorted(set(given.ranks or ([4] if given.quick else [4, 8])))
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    return given


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is written after each round."""
    workload = dataclasses.replace(QUICK if given.quick else LoadingWorkload(given.gib), stored=given.stored)
    checkpoint = given.out / "checkpoint"
    files_bytes = write_checkpoint(workload, checkpoint)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "workload": workload.numbers(),
        "files_bytes": files_bytes,
        "weights_bytes": weights_bytes(workload),
        "repeats": given.repeats,
        "quiet_below": QUIET,
        "page_cache": "warm",
    }

    def write(records: list[Record]) -> None:
        result["rows"] = rows(records, files_bytes, result["weights_bytes"])
        (given.out / "loading.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    try:
        warm_up()
        measure(workload, checkpoint, given.ranks, given.repeats, Bystanders(given.limit), write)
    finally:
        if not given.keep:
            shutil.rmtree(checkpoint)
    return result


def main() -> int:
    """Measure, print and write; the exit status."""
    given = parse()
    if not sys.platform.startswith("linux"):
        print("loads are measured by what Linux says of its processes, and this isn't Linux", file=sys.stderr)
        return 1
    return run_script("loading", given, measure_all, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
