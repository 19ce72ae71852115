"""A whole training step of a small Llama: Cuboid beside DeepSpeed AutoTP, Transformers' tp_plan and FSDP2 on 8 ranks.

python benchmarks/training_step.py [--network loopback|shaped] [--dtype float32|bfloat16] [--contestants KEY …]
                                   [--rate-mbit R] [--repeats N] [--limit S] [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# DeepSpeed looks for this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from network.calm import Bystanders
from network.layer_measuring import TIMEOUT_S, limit_rate, run_rounds
from network.networks import open_network
from network.ranks import forked_ranks
from network.script import run_script
from pipeline import machine
from quiet import QUIET
from whole_step.checking import prepare
from whole_step.engines import skip_shared_memory_build
from whole_step.entries import DEFAULT, find
from whole_step.rank import StepRank
from whole_step.report import draw, print_table
from whole_step.results import comparisons, remarks, rows
from whole_step.workload import QUICK, RANKS, StepWorkload, compute_reference

_DEFAULT_OUT = Path("runs") / "benchmarks" / "training_step"
#: At which the links should take three times as long as two cores do, even for the one that sends least: 100 MB in
#: float32, beside 5.5 s of computing on one core. What it came to is in the results.
_RATE_MBIT = 80.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=["loopback", "shaped"], default="loopback", help="shaped needs root")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 is mixed precision"
    )
    parser.add_argument(
        "--contestants", nargs="+", metavar="KEY", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument("--rate-mbit", type=float, metavar="R", help="of each rank's link, either way (default 80)")
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default 10)")
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds to wait for quiet times, or repeat steps (default 1800)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round, to see that everything works")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.rate_mbit is not None and given.network == "loopback":
        parser.error("--rate-mbit needs --network shaped: loopback has no rate that could be set")
    if given.repeats < 1 or (given.rate_mbit is not None and given.rate_mbit <= 0):
        parser.error("--repeats must be 1 or more, and --rate-mbit more than 0")
    if given.network == "shaped" and given.rate_mbit is None:
        given.rate_mbit = _RATE_MBIT
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    given.ranks = RANKS
    return given


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is complete only after the last round, but is written after each.

    Raises:
        CuboidError: a contestant isn't one, computes something else, or fails; or the network can't be had.
    """
    workload = dataclasses.replace(QUICK if given.quick else StepWorkload(), dtype=given.dtype)
    model = workload.model()
    entries = find(given.contestants, workload, model)
    with (
        open_network(given.network, given.ranks) as network,
        tempfile.TemporaryDirectory(prefix="cuboid-") as directory,
    ):
        folder = Path(directory)
        model.save_pretrained(folder)
        before = machine()
        reference = compute_reference(workload, model)

        def build(_: int) -> StepRank:
            return StepRank(network, workload, model, folder)

        with forked_ranks(network, build, timeout_s=TIMEOUT_S) as ranks:
            checked = prepare(ranks, entries, reference, workload.dtype)
            result = {
                "command": " ".join(["python", *sys.argv]),
                "machine": before,
                "workload": workload.numbers(),
                "network": given.network,
                "ranks": RANKS,
                "rate_mbit": given.rate_mbit,
                "measured_mbit": None,
                "repeats": given.repeats,
                "quiet_below": QUIET,
                "reference": dataclasses.asdict(reference),
            }

            def write() -> None:
                table = rows(checked, workload, model, given.rate_mbit)
                result.update(rows=table, comparisons=comparisons(table))
                result["remarks"] = remarks(result)
                (given.out / "training_step.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

            bystanders, records = Bystanders(given.limit), [own.record for own in checked]
            if given.rate_mbit is not None:
                result["measured_mbit"] = limit_rate(
                    network, ranks, records, given.rate_mbit, given.repeats, bystanders
                )
            run_rounds(ranks, records, given.repeats, bystanders, lambda record: record.samples, write)
    return result


def main() -> int:
    """Measure, print and write; the exit status."""
    skip_shared_memory_build()
    return run_script("training_step", parse(), measure, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
