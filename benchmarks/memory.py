"""Activations that 8 ranks keep and have at a time, on several meshes, beside the formula and one process ÷ 8.

python benchmarks/memory.py [--meshes 1x8x1 2x2x2 auto …] [--repeats N] [--quick] [--out DIR]

Nothing here depends on time, or on who else computes on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from memory_parts.rank import MemoryRank
from memory_parts.report import draw, print_table
from memory_parts.results import Record, check_agreement, rows
from memory_parts.workload import AUTO, QUICK, MemoryWorkload
from network.networks import Loopback
from network.ranks import forked_ranks
from network.script import run_script
from pipeline import machine

from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError

RANKS = 8
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", AUTO]
_TIMEOUT_S = 600.0
_DEFAULT_OUT = Path("runs") / "benchmarks" / "memory"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--meshes", nargs="+", default=_MESHES, metavar="BxSxH", help="meshes of 8 ranks, or auto")
    parser.add_argument(
        "--network", choices=["loopback"], default="loopback", help="what is kept depends on no network"
    )
    parser.add_argument("--repeats", type=int, default=3, help="steps of which the largest peak is taken (default 3)")
    parser.add_argument("--limit", type=float, help="as of the other benchmarks; nothing here waits for quiet times")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one step, to see that everything works")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if given.quick:
        given.repeats = 1
    return given


def distinct(meshes: list[str], workload: MemoryWorkload) -> dict[str, str]:
    """Names of rows and the meshes that are asked for, each mesh only once.

    Raises:
        CuboidError: a mesh isn't one, isn't of 8 ranks, or can't cut the model.
    """
    model = workload.model()
    automatic = workload.shape(AUTO, RANKS, model) if AUTO in meshes else None
    shapes = [workload.shape(mesh, RANKS, model) for mesh in meshes]
    for shape in shapes:
        if shape.size != RANKS:
            raise CuboidError(f"mesh {shape} has {shape.size} ranks, but this benchmark has {RANKS}")
    return {f"{shape} (auto)" if shape == automatic else str(shape): _text(shape) for shape in shapes}


def _text(shape: MeshShape) -> str:
    return f"{shape.batch}x{shape.sequence}x{shape.hidden}"


def examine(workload: MemoryWorkload, meshes: dict[str, str], repeats: int) -> list[Record]:
    """Plain transformers and Cuboid in one process, then every mesh.

    Raises:
        CuboidError: one computes something else.
    """

    def build(_: int) -> MemoryRank:
        return MemoryRank(workload)

    with forked_ranks(Loopback(1), build, timeout_s=_TIMEOUT_S) as one:
        records = [
            Record("plain transformers", None, one.call("examine_plain", repeats, timeout_s=_TIMEOUT_S)),
            Record("1×1×1", "1x1x1", one.call("examine", "1x1x1", repeats, timeout_s=_TIMEOUT_S)),
        ]
    with forked_ranks(Loopback(RANKS), build, timeout_s=_TIMEOUT_S) as ranks:
        for name, mesh in meshes.items():
            records.append(Record(name, mesh, ranks.call("examine", mesh, repeats, timeout_s=_TIMEOUT_S)))
            check_agreement(records)
    return records


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything, written when it is complete."""
    workload = QUICK if given.quick else MemoryWorkload()
    records = examine(workload, distinct(given.meshes, workload), given.repeats)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "workload": workload.numbers(),
        "ranks": RANKS,
        "repeats": given.repeats,
        "rows": rows(records),
    }
    (given.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main() -> int:
    """Measure, print and write; the exit status."""
    return run_script("memory", parse(), measure, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
