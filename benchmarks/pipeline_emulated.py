"""The pipeline on 8 and 16 stages, with computing emulated by sleeping: schedules, beside theory and other pipelines.

python benchmarks/pipeline_emulated.py [--network loopback|shaped] [--rate-mbit R] [--stages 8 16]
                                       [--micro-batches 8 16] [--segments 2 4 8] [--forward-ms T] [--width W]
                                       [--repeats N] [--limit S] [--quick] [--out DIR]

The runtime is the real one; only a layer's computing sleeps, for a time in proportion to a real layer's operations.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from emulated.entries import entries
from emulated.measuring import TIMEOUT_S, Measurement, Record
from emulated.numbers import EMULATED, remarks, rows
from emulated.ours import programs
from emulated.rank import StageRank
from emulated.report import draw, print_tables
from emulated.work import Work
from network.calm import Bystanders
from network.interrupts import signals_as_exceptions
from network.networks import open_network
from network.ranks import Ranks, forked_ranks
from network.rate import verify_rate
from pipeline import machine
from quiet import QUIET

from cuboid.errors import CuboidError
from cuboid.library_warnings import quiet
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.timeline_picture import draw_timelines

_DEFAULT_OUT = Path("runs") / "benchmarks" / "pipeline_emulated"
#: Of each rank's link, where none is given: with the other defaults a message takes half as long as its forward.
_RATE_MBIT = 50.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=["loopback", "shaped"], default="loopback", help="shaped needs root")
    parser.add_argument("--rate-mbit", type=float, metavar="R", help=f"of each rank's link (default {_RATE_MBIT:g})")
    parser.add_argument("--stages", type=int, nargs="+", metavar="P", help="each P divides 32 (default 8 16)")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="M", help="(default 8 16)")
    parser.add_argument("--segments", type=int, nargs="+", metavar="K", help="beside 1 (default 2 4 8)")
    parser.add_argument(
        "--forward-ms", type=float, metavar="T", help="of a whole sequence on one stage; backward is 2 T (default 160)"
    )
    parser.add_argument("--width", type=int, default=4, metavar="W", help="float32 numbers a token sends (default 4)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds for each P and M (default 5)")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds to wait for quiet times, or repeat steps (default 600)"
    )
    parser.add_argument("--quick", action="store_true", help="4 stages, 4 micro-batches, one short round")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.rate_mbit is not None and given.network == "loopback":
        parser.error("--rate-mbit needs --network shaped: loopback has no rate that could be set")
    if given.network == "shaped" and given.rate_mbit is None:
        given.rate_mbit = _RATE_MBIT
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    usual = ([4], [4], [2, 4], 20.0) if given.quick else ([8, 16], [8, 16], [2, 4, 8], 160.0)
    for name, value in zip(("stages", "micro_batches", "segments", "forward_ms"), usual, strict=True):
        if getattr(given, name) is None:
            setattr(given, name, value)
    _check(parser, given)
    return given


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    least = {"micro_batches": 1, "segments": 2, "width": 1, "repeats": 1}
    for name, number in least.items():
        value = getattr(given, name)
        if min(value if isinstance(value, list) else [value]) < number:
            parser.error(f"--{name.replace('_', '-')} must be {number} or more")
    for name in ("stages", "micro_batches", "segments"):
        if len(set(getattr(given, name))) < len(getattr(given, name)):
            parser.error(f"--{name.replace('_', '-')} has a number twice")
    for name in ("forward_ms", "rate_mbit"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")


class Benchmark:
    """All of it, for options of the command line."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._records: list[Record] = []
        self.result: dict[str, Any] = {
            "emulated": EMULATED,
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "network": given.network,
            "rate_mbit": given.rate_mbit,
            "measured_mbit": None,
            "quick": given.quick,
            "repeats": given.repeats,
            "quiet_below": QUIET,
            "refusals": [],
        }

    def run(self) -> None:
        """Measure everything; the result is complete only after the last round, but is written after each."""
        # Mistakes are told before anything takes time.
        works = {
            stages: [self._work(stages, count) for count in self._given.micro_batches] for stages in self._given.stages
        }
        self.result["workload"] = works[self._given.stages[0]][0].numbers()
        for own in works.values():
            self._run_on_one_world(own)

    def _work(self, stages: int, micro_batches: int) -> Work:
        return Work(stages, micro_batches, self._given.forward_ms / 1e3, self._given.width)

    def _run_on_one_world(self, works: list[Work]) -> None:
        for work in works:
            # So that ranks, which are forked from here, needn't all find out.
            for entry in entries(self._given.segments):
                if entry.kind == "cuboid":
                    programs(entry.schedule, PipelineShape(work.stages, work.micro_batches, entry.segments))
        with (
            open_network(self._given.network, works[0].stages) as network,
            forked_ranks(network, lambda _: StageRank(network), timeout_s=TIMEOUT_S) as ranks,
        ):
            if self._given.rate_mbit is not None:
                network.set_rate(self._given.rate_mbit)
                measured = verify_rate(network, ranks)
                self.result["measured_mbit"] = min(measured, self.result["measured_mbit"] or measured)
            for work in works:
                self._run(work, ranks)

    def _run(self, work: Work, ranks: Ranks) -> None:
        everyone = {entry: entry.refusal(work) for entry in entries(self._given.segments)}
        self.result["refusals"] += [reason for reason in everyone.values() if reason is not None]
        able = [entry for entry, reason in everyone.items() if reason is None]
        measurement = Measurement(ranks, work, able, Bystanders(self._given.limit))
        self._records += measurement.records
        measurement.run_rounds(self._given.repeats, self._write)
        measurement.close()

    def _write(self) -> None:
        self.result["rows"] = rows(self._records, self._given.rate_mbit)
        self.result["remarks"] = remarks(self.result)
        text = json.dumps(self.result, indent=1) + "\n"
        (self._given.out / "pipeline_emulated.json").write_text(text, encoding="utf-8")

    def draw(self) -> None:
        """The bars, and the timelines of the first setting's cuts by operations."""
        draw(self.result, self._given.out / "pipeline_emulated.png")
        timelines = [
            (
                f"{record.entry.name}, M={record.work.micro_batches}: bubble {record.timeline.bubble:.1%}",
                record.timeline,
            )
            for record in self._records
            if record.work == self._records[0].work
            and record.entry.kind == "cuboid"
            and record.entry.partition == "flops"
            and record.timeline is not None
        ]
        draw_timelines(timelines, self._given.out / "timelines.png", caption=f"measured, one step each; {EMULATED}")


def main() -> int:
    """Measure, print and write; the exit status."""
    given = parse()
    quiet()
    # A process that has multiplied on several threads can't be forked safely.
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(given)
    try:
        with signals_as_exceptions():
            benchmark.run()
    except CuboidError as error:
        print(error, file=sys.stderr)
        return 1
    print_tables(benchmark.result)
    benchmark.draw()
    print(f"\n{given.out}/pipeline_emulated.json, pipeline_emulated.png, timelines.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
