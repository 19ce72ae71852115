"""Step times, bubbles and memory of Seq1F1B beside two other pipelines, for the same model on two cores.

python benchmarks/pipeline.py [--quick] [--micro-batches 2 4] [--segments 1 2 4 8] [--repeats 10] [--limit 1800]
                              [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from contestants import entries
from measuring import Record, examine, measure
from quiet import QUIET
from report import draw, print_tables
from results import memory_rows, rows
from workload import QUICK, Workload

from cuboid.seq1f1b.schedule.simulator import Timeline
from cuboid.seq1f1b.schedule.timeline_picture import draw_timelines
from cuboid.verify import WorkerPool

_TIMEOUT_S = 3600.0
#: For the peaks of memory, where more stages than cores do no harm.
_MANY_STAGES = 4
_DEFAULT_OUT = Path("runs") / "benchmarks" / "pipeline"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything works")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4], metavar="M")
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    parser.add_argument("--repeats", type=int, default=10, help="rounds for each M (default 10)")
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        help="seconds for each M to wait for quiet times (default 1800)",
    )
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if min(given.micro_batches) < Workload.stages:
        parser.error(f"--micro-batches must be {Workload.stages} or more: torch's 1F1B refuses fewer than stages")
    return given


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    packages = ("torch", "transformers", "deepspeed")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "load_before": os.getloadavg()[0],
    }


def _processor() -> str:
    """Its name, as precisely as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name", platform.machine())
    return f"{name}, family {found['cpu family']} model {found['model']}" if "cpu family" in found else name


def _timelines(records: list[Record]) -> list[tuple[str, Timeline]]:
    """Titles and timelines of the cuts by operations, for the first number of micro-batches."""
    count = records[0].micro_batches
    return [
        (f"{record.entry.name}, M={count}: bubble {record.timeline.bubble:.1%}", record.timeline)
        for record in records
        if record.timeline is not None and record.micro_batches == count and record.entry.partition == "flops"
    ]


def main() -> int:
    """Measure, print and write; the exit status."""
    given = parse()
    workload = QUICK if given.quick else Workload()
    given.out.mkdir(parents=True, exist_ok=True)
    before = machine()
    contestants = entries(given.segments)
    many = dataclasses.replace(workload, stages=_MANY_STAGES)
    with WorkerPool(_MANY_STAGES) as pool:
        run = functools.partial(pool.run, timeout_s=_TIMEOUT_S)
        rounds = (given.micro_batches, given.repeats, given.limit)
        records, *_ = run(workload.stages, measure, workload, contestants, *rounds, given.out / "traces")
        kept, *_ = run(many.stages, examine, many, contestants, many.stages, given.out / "traces_of_many")
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": before,
        "workload": workload.numbers(),
        "repeats": given.repeats,
        "quiet_below": QUIET,
        "rows": rows(records, workload),
        "memory": memory_rows(kept, many),
    }
    (given.out / "pipeline.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_tables(result)
    draw(result, given.out / "pipeline.png")
    draw_timelines(_timelines(records), given.out / "timelines.png", caption="measured, one step each")
    print(f"\n{given.out}/pipeline.json, pipeline.png, timelines.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
