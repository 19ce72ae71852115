"""One transformer layer on 1-D, 2-D, 3-D and the automatic mesh, over links of a set rate: the 3-D paper's comparison.

python benchmarks/layer_meshes.py [--network loopback|shaped] [--ranks 8|64] [--meshes 1x8x1 2x2x2 auto …] …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from contestants.layer import (
    LayerWorkload,
    ShardedLayers,
    check_error,
    compute_reference,
    distinct,
    interface_doubts,
    interface_numbers,
    layer_fact,
    mesh_name,
)
from harness import freshness, pictures
from harness.case import Case
from harness.rounds import Record, run_rounds
from harness.tables import MB, Column, Row, Table, known, ranged
from harness.watch import Watch
from network.networks import open_network
from network.ranks import forked_ranks
from network.rate import Link, limit_rate, timed_step, traffic

_MESHES = {8: ["1x8x1", "1x4x2", "2x2x2", "auto"], 64: ["1x64x1", "1x8x8", "4x4x4", "auto"]}
#: At which the links take three times as long as two cores do, even on the mesh that sends least.
_RATES_MBIT = {8: 40.0, 64: 4.0}
#: Below this, the links' time isn't what a step is made of.
_LEAST_LINK_TO_FLOOR = 3.0
#: Sixty-four heads and features that divide by 64 let 1×64×1 take part, Megatron's 1-D; the heads are small because 64
#: ranks share a few cores.
WORKLOAD = LayerWorkload(batch=16, length=256, hidden=256, intermediate=704, heads=64)
#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = LayerWorkload(batch=8, length=64, hidden=128, intermediate=192, heads=64)


class LayerMeshes(Case):
    """Each mesh's output and gradients are compared with float64 before anything is timed."""

    name = "layer_meshes"
    sources = freshness.MESHES
    networks = ("loopback", "shaped")
    selects = False
    rate_mbit = _RATES_MBIT[8]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, choices=sorted(_MESHES), default=8)
        parser.add_argument("--meshes", nargs="+", metavar="BxSxH", help="meshes, or auto; ratios are to the first two")

    def check(self, given: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        given.meshes = given.meshes or _MESHES[given.ranks]
        if given.rate_mbit == self.rate_mbit:
            given.rate_mbit = _RATES_MBIT[given.ranks]

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        with open_network(given.network, given.ranks) as network:
            workload = QUICK if given.quick else WORKLOAD
            model = workload.model()
            meshes = distinct(given.meshes, given.ranks, workload, model)
            result.update(workload=workload.numbers(), ranks=given.ranks)
            reference = compute_reference(workload, model)
            build = partial(ShardedLayers, workload, model, reference)
            with forked_ranks(network, lambda _: Link(network, build)) as ranks:
                records = [Record(mesh, *check_error(ranks.call("prepare", mesh))) for mesh in meshes]
                sent = {record.name: workload.formula_bytes(meshes[record.entry], model) for record in records}

                def write_rows() -> None:
                    result["rows"] = [_row(record, records, sent, given.rate_mbit) for record in records]
                    write()

                watch = Watch(given.limit)
                step = partial(timed_step, ranks, watch, figures=traffic)
                rounds = (given.repeats, watch, step)
                result["measured_mbit"] = limit_rate(network, ranks, records, given.rate_mbit, *rounds)
                run_rounds(records, *rounds, write_rows)

    def facts(self, result: Row) -> list[str]:
        return [
            self.machine(result),
            f"Layer: {layer_fact(result['workload'])}",
            f"Links: {links(result)}.",
            self.command(result),
        ]

    def remarks(self, result: Row) -> list[str]:
        doubts = interface_doubts(result["rows"])
        return self.busy(result) + processor_counts(result["rows"], "shape") + doubts + shared_cores(result)

    def tables(self, result: Row) -> list[Table]:
        rows = result["rows"]
        columns = [Column("mesh", mesh_name, "l"), Column("step, s", lambda row: ranged(row["step_s"], 1))]
        for shape in [row["shape"] for row in rows[:2]]:
            columns += [
                Column(f"× {shape}", lambda row, shape=shape: ranged(row["ratios"].get(shape), none="1")),
                Column("by bytes", lambda row, shape=shape: known(row["ratios_theory"].get(shape), ".2f", none="1")),
            ]
        columns += [
            Column("MB sent", lambda row: f"{row['counted_bytes'] / MB:.2f}"),
            Column("bytes ÷ rate, s", lambda row: known(row["link_s"], ".1f")),
            Column("without a limit, s", lambda row: known((row["floor_s"] or {}).get("median"), ".1f")),
            Column("error", lambda row: f"{row['error']:.0e}"),
        ]
        return [Table(columns, rows)]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of step times, with what the links alone and the processors alone take."""
        rows, path = result["rows"], folder / f"{self.record_name(result)}.png"
        figure, ((axes,),) = pictures.panels(9, 1.2 + 0.55 * len(rows))
        for place, row in enumerate(rows):
            pictures.bar(axes, place, row["step_s"], pictures.BLUE if row["mesh"] == "auto" else pictures.GREY)
        mark_limits(axes, rows, size=16)
        names = [mesh_name(row).replace("`", "") for row in rows]
        rate = "loopback" if result["rate_mbit"] is None else f"{result['rate_mbit']:g} Mbit/s each"
        what = f"seconds for a layer's forward and backward, {result['ranks']} ranks, {rate}"
        pictures.finish(axes, names, what)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
        pictures.save(figure, path)
        return [path]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['ranks']}"

    def parts(self, results: dict[str, Row]) -> dict[str, str]:
        return {f"{result['ranks']} ranks": self.markdown(result) for result in results.values()}


def _row(record: Record, records: list[Record], sent: dict[str, int], rate_mbit: float | None) -> Row:
    others = [(other.name, other) for other in records if other is not record]
    numbers = record.numbers(others)
    return {
        "mesh": record.entry,
        "shape": record.name,
        "error": record.error,
        "formula_bytes": sent[record.name],
        **interface_numbers(record),
        **link_numbers(sent[record.name], rate_mbit, numbers["floor_s"]),
        **numbers,
        "ratios_theory": {other: sent[other] / sent[record.name] for other, _ in others},
    }


def link_numbers(sent_bytes: float | None, rate_mbit: float | None, floor_s: Row | None) -> Row:
    """How long the links need for so many bytes, alone and beside a step without a limit."""
    link_s = None if rate_mbit is None or sent_bytes is None else sent_bytes * 8 / (rate_mbit * 1e6)
    return {
        "link_s": link_s,
        "link_to_floor": None if link_s is None or floor_s is None else link_s / floor_s["median"],
    }


def links(result: Row) -> str:
    """What ranks communicate over, in words."""
    if result["rate_mbit"] is None:
        return "loopback, without a limit"
    return f"{result['rate_mbit']:g} Mbit/s for each rank, {result['measured_mbit']:.2f} measured before"


def mark_limits(axes: Any, rows: list[Row], size: float) -> None:
    """What the links alone and the processors alone would take, beside bars."""
    pictures.ticks(axes, [row["link_s"] for row in rows], pictures.RED, "bytes ÷ rate", size)
    floors = [None if row["floor_s"] is None else row["floor_s"]["median"] for row in rows]
    pictures.ticks(axes, floors, pictures.GREEN, "links without limit", size)


def processor_counts(rows: list[Row], name: str) -> list[str]:
    """Which steps aren't made of the links' time, in sentences."""
    return [
        f"{row[name]}: the links' time is only {row['link_to_floor']:.1f} times the step without them; the processor "
        "counts."
        for row in rows
        if row["link_to_floor"] is not None and row["link_to_floor"] < _LEAST_LINK_TO_FLOOR
    ]


def shared_cores(result: Row) -> list[str]:
    """What times on loopback are of."""
    if result["network"] != "loopback":
        return []
    return ["On loopback the ranks share the machine's cores: the times are of computing, not of links."]


CASE = LayerMeshes()

if __name__ == "__main__":
    sys.exit(CASE.main())
