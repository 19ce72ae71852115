"""What Cuboid costs where it splits nothing: a training step on a mesh of 1×1×1, beside the same step without it.

python benchmarks/overhead.py [--dtypes float32 bfloat16] [--engines plain deepspeed] [--profile]
                              [--repeats N] [--limit S] [--quick] [--out DIR]

One process on one core, without any network. Both trainings are of the same small Llama, in the same process, and each
has a step in every round; losses and all gradients of their first steps must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_process.contestants import DTYPES, QUICK, Workload, pairs
from one_process.measuring import compare
from one_process.report import draw, print_tables, row
from pipeline import machine
from quiet import QUIET, Watch, pin

from cuboid.errors import CuboidError
from cuboid.library_warnings import quiet

_DEFAULT_OUT = Path("runs") / "benchmarks" / "overhead"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", choices=["plain", "deepspeed"], default=["plain", "deepspeed"])
    parser.add_argument("--profile", action="store_true", help="say which operators take the difference")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of each pair (default 20)")
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds to wait for quiet times, or repeat steps (default 1800)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round, to see that everything works")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    return given


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is complete only after the last pair, but is written after each."""
    workload = QUICK if given.quick else Workload()
    core = pin(0)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "workload": workload.numbers(),
        "core": core,
        "repeats": given.repeats,
        "quiet_below": QUIET,
        "rows": [],
    }
    # A world of one, in which Cuboid makes no group. DeepSpeed wants it, and whoever launches to have said so.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        watch = Watch(core, given.limit)
        for entries in pairs(given.dtypes, given.engines):
            pair = compare(entries, workload, given.repeats, watch, profiled=given.profile)
            result["rows"].append(row(pair))
            (given.out / "overhead.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    finally:
        dist.destroy_process_group()
    return result


def main() -> int:
    """Measure, print and write; the exit status."""
    given = parse()
    quiet()
    # Or the profiler writes of each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        result = measure(given)
    except CuboidError as error:
        print(error, file=sys.stderr)
        return 1
    print_tables(result)
    draw(result, given.out / "overhead.png")
    print(f"\n{given.out}/overhead.json, overhead.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
