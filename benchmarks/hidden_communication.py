"""How much of a layer's communication is hidden behind its computing, where both would take the same time.

python benchmarks/hidden_communication.py [--network loopback|shaped] [--ranks 2|4|8] [--meshes 2x1x1 1x2x1 auto …]
                                          [--layers N] [--most-mbit R] …
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contestants.hidden import COMMUNICATION, COMPUTING, KINDS, HiddenRank
from contestants.layer import (
    LayerWorkload,
    check_error,
    compute_reference,
    distinct,
    interface_doubts,
    interface_numbers,
    layer_fact,
    mesh_name,
)
from harness import freshness, pictures
from harness.case import Case, at_least, positive
from harness.rounds import Record, Sample, run_rounds, spread, undisturbed, undisturbed_rounds
from harness.tables import MB, Column, Row, Table, known, percent, ranged
from harness.watch import Watch
from network.networks import Network, Shaped, open_network
from network.ranks import Ranks, forked_ranks
from network.rate import timed_step, traffic, verify_rate
from network.serving import Step

_MESHES = {
    2: ["2x1x1", "1x2x1", "1x1x2"],
    4: ["4x1x1", "1x4x1", "1x2x2", "2x2x1"],
    8: ["auto", "2x2x2", "1x8x1", "1x4x2"],
}
#: So large because a processor that carries messages besides computing is slowed down by that: the more a rank computes
#: for each byte, the less.
WORKLOAD = LayerWorkload(batch=8, length=512, hidden=2048, intermediate=5504, heads=16)
QUICK = LayerWorkload(batch=8, length=64, hidden=128, intermediate=192, heads=8)
#: Steps without communication that the rate is found by.
_COMPUTING_STEPS = 5
#: What links of one machine can be relied on to hold, and what they hold on a busy one too.
_MOST_MBIT, _QUICK_MOST_MBIT = 1200.0, 50.0
#: How far apart computing and communication may be for "the same time".
_BALANCE = 1.25
#: Collectives that do nothing send next to nothing: what keeps connections alive.
_SILENCE = 0.01
_BAR = 0.36


class HiddenCommunication(Case):
    """In each round three things take turns: a step (forward and backward), the same step with collectives that do
    nothing, and the step's collectives alone, one after another. On the shaped network the links' rate is set for each
    mesh so that what the step sends takes as long as its computing. Two ranks, a core each, are what a machine of two
    cores can measure: where ranks share cores, one computes while another waits, which isn't overlap.
    """

    name = "hidden_communication"
    sources = freshness.MESHES
    networks = ("loopback", "shaped")
    selects = False
    unit = "rounds"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, choices=sorted(_MESHES), default=2)
        parser.add_argument("--meshes", nargs="+", metavar="BxSxH", help="meshes, or auto")
        parser.add_argument("--layers", type=at_least(1), default=1, metavar="N", help="one after another (default 1)")
        parser.add_argument(
            "--most-mbit", type=positive, metavar="R", help="never set links to more (default 1200; 50 with --quick)"
        )

    def check(self, given: argparse.Namespace, error: Callable[[str], Any]) -> None:
        if given.most_mbit is not None and given.network == "loopback":
            error("--most-mbit needs --network shaped: loopback has no rate")
        given.meshes = given.meshes or _MESHES[given.ranks]
        given.most_mbit = given.most_mbit or (_QUICK_MOST_MBIT if given.quick else _MOST_MBIT)

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        with open_network(given.network, given.ranks) as network:
            workload = dataclasses.replace(QUICK if given.quick else WORKLOAD, layers=given.layers)
            model = workload.model()
            meshes = distinct(given.meshes, given.ranks, workload, model)
            result.update(workload=workload.numbers(), ranks=given.ranks)
            reference = compute_reference(workload, model)
            watch = Watch(given.limit)
            with forked_ranks(network, lambda _: HiddenRank(network, workload, model, reference)) as ranks:
                for mesh, shape in meshes.items():
                    name, error = check_error(ranks.call("prepare", mesh))
                    trio = [Record((mesh, kind), name, error) for kind in KINDS]
                    sent = workload.formula_bytes(shape, model)
                    rates = _measure_mesh(network, ranks, trio, sent, given, watch)
                    cores = min(given.ranks, os.cpu_count() or 1)
                    row = {"mesh": mesh, "shape": name, "error": error, "formula_bytes": sent, **rates}
                    result["rows"].append({**row, **_sent(trio), **_times(trio, cores)})
                    write()

    def facts(self, result: Row) -> list[str]:
        return [
            self.machine(result, f"{{}} cores for {result['ranks']} ranks"),
            f"Layers: {result['workload']['layers']} of {layer_fact(result['workload'])}",
            self.command(result),
        ]

    def remarks(self, result: Row) -> list[str]:
        said = self.busy(result)
        if result["ranks"] > result["machine"]["cores"]:
            said.append("Ranks share cores, so one computes while another waits: that too hides communication here.")
        if result["network"] == "loopback":
            said.append("On loopback communication is work of the cores that compute: little can be hidden.")
        for row in result["rows"]:
            balance = row["seconds"][COMMUNICATION]["median"] / row["seconds"][COMPUTING]["median"]
            if row["rate_mbit"] is not None and row["rate_mbit"] < row["wanted_mbit"]:
                said.append(
                    f"Computing and sending would take the same time on {row['shape']} at {row['wanted_mbit']:.0f} "
                    f"Mbit/s, but the links were set to the most that was allowed, {row['rate_mbit']:.0f}."
                )
            elif row["rate_mbit"] is not None and not 1 / _BALANCE <= balance <= _BALANCE:
                said.append(f"{row['shape']}: communication takes {balance:.2f} times as long as computing.")
            if row["silent_bytes"] is not None and row["silent_bytes"] > _SILENCE * row["counted_bytes"]:
                said.append(f"{row['shape']}: collectives that should do nothing sent {row['silent_bytes']:.0f} bytes.")
        return said + interface_doubts(result["rows"])

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("mesh", mesh_name, "l"),
            Column("Mbit/s", lambda row: known(row["rate_mbit"], ".0f", none="no limit")),
            *(Column(f"{kind}, s", lambda row, kind=kind: ranged(row["seconds"][kind])) for kind in KINDS),
            *(Column(key, lambda row, key=key: percent(row[key], bold=True)) for key in ("exposed", "waited")),
            Column("÷ perfect", lambda row: ranged(row["to_perfect"])),
            Column("÷ none", lambda row: ranged(row["to_none"])),
            Column("÷ possible", lambda row: ranged(row["to_possible"])),
            Column("MB sent", lambda row: f"{row['counted_bytes'] / MB:.1f}"),
            Column("error", lambda row: f"{row['error']:.0e}"),
        ]
        return [Table(columns, result["rows"])]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """For each mesh the step, split into computing and what is exposed, above its communication alone."""
        rows, path = result["rows"], folder / f"{self.record_name(result)}.png"
        figure, ((axes,),) = pictures.panels(9, 1.4 + 0.75 * len(rows))
        for place, row in enumerate(rows):
            step, computing, alone = (row["seconds"][kind]["median"] for kind in KINDS)
            upper, lower = place - _BAR / 2, place + _BAR / 2
            names = ("computing", "exposed communication", "communication alone") if place == 0 else ("", "", "")
            axes.barh(upper, min(step, computing), height=_BAR, color=pictures.GREY, label=names[0])
            axes.barh(upper, max(step - computing, 0), _BAR, computing, color=pictures.BLUE, label=names[1])
            axes.barh(lower, alone, height=_BAR, color=pictures.YELLOW, label=names[2])
            axes.text(step, upper, f" {row['exposed']['median']:.0%} exposed", va="center", fontsize=8)
        axes.margins(x=0.15)
        layers = result["workload"]["layers"]
        what = "one layer" if layers == 1 else f"{layers} layers"
        links = "loopback" if result["network"] == "loopback" else "links as slow as computing"
        names = [mesh_name(row).replace("`", "") for row in rows]
        label = f"seconds; {what}, forward and backward, {result['ranks']} ranks, {links}"
        pictures.finish(axes, names, label)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        pictures.save(figure, path)
        return [path]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['ranks']}_ranks_{result['workload']['layers']}_layers"

    def parts(self, results: dict[str, Row]) -> dict[str, str]:
        blocks = []
        for result in sorted(results.values(), key=lambda each: (each["ranks"], each["workload"]["layers"])):
            ranks, layers = result["ranks"], result["workload"]["layers"]
            picture = f"Steps of {ranks} ranks, with what of their communication is exposed"
            heading = f"### {ranks} ranks, {layers} layer{'s' if layers > 1 else ''}"
            blocks.append(f"{heading}\n\n{self.markdown(result, picture)}")
        return {"hidden": "\n\n".join(blocks) or "Not measured yet."}


def _figures(record: Record, steps: Sequence[Step]) -> dict[str, Any]:
    return {**traffic(record, steps), "waited_s": max(step.figures["waited_s"] for step in steps)}


def _measure_mesh(
    network: Network, ranks: Ranks, trio: list[Record], sent_bytes: int, given: argparse.Namespace, watch: Watch
) -> Row:
    """Find the rate at which what is sent takes as long as what is computed, set it, and have the rounds."""
    step = partial(timed_step, ranks, watch, figures=_figures)
    run_rounds([trio[1]], _COMPUTING_STEPS, watch, step, floor=True)
    first = trio[1].floor
    wanted = rate = measured = None
    if isinstance(network, Shaped):
        # Noise only adds to the shortest step.
        wanted = sent_bytes * 8 / min(sample.step_s for sample in undisturbed(first)) / 1e6
        rate = min(wanted, given.most_mbit)
        network.set_rate(rate)
        measured = verify_rate(network, ranks)
    run_rounds(trio, given.repeats, watch, step)
    network.set_rate(None)
    return {
        "wanted_mbit": wanted,
        "rate_mbit": rate,
        "measured_mbit": measured,
        "link_s": None if rate is None else sent_bytes * 8 / (rate * 1e6),
        "first_computing": [sample.numbers() for sample in first],
    }


def _sent(trio: list[Record]) -> Row:
    """Bytes of the last round."""
    silent, replayed = (record.samples[-1].figures for record in trio[1:])
    return {
        **interface_numbers(trio[0]),
        "replayed_bytes": replayed["counted_bytes"],
        "silent_bytes": silent["interface_bytes"],
    }


def _times(trio: list[Record], cores: int) -> Row:
    """Times, and what they make round by round; over the rounds in which all three were undisturbed.

    With T, C and M for a step, its computing and its communication, ``exposed`` is (T - C) / M, and ``waited`` the part
    of M in which a rank's computing stood still for messages; what else is exposed are cores that carry messages where
    they could compute. The other ratios say how many times as long as it could the step takes: with perfect overlap,
    max(C, M); with none, C + M; and with what overlap is possible where the cores that compute carry the messages too,
    which makes the processor time of both, a core's share of it, a third thing that no step is shorter than.
    """
    rounds = undisturbed_rounds(trio)
    columns = dict(zip(KINDS, zip(*rounds, strict=True), strict=True))

    def over_rounds(value: Callable[[Sample, Sample, Sample], float]) -> Row:
        return spread([value(*samples) for samples in rounds])

    return {
        "seconds": {kind: spread([sample.step_s for sample in own]) for kind, own in columns.items()},
        "processor_s": {kind: statistics.median(each.computing_s for each in own) for kind, own in columns.items()},
        "exposed": over_rounds(lambda t, c, m: (t.step_s - c.step_s) / m.step_s),
        "waited": over_rounds(lambda t, _, m: t.figures["waited_s"] / m.step_s),
        "to_perfect": over_rounds(lambda t, c, m: t.step_s / max(c.step_s, m.step_s)),
        "to_none": over_rounds(lambda t, c, m: t.step_s / (c.step_s + m.step_s)),
        "to_possible": over_rounds(
            lambda t, c, m: t.step_s / max(c.step_s, m.step_s, (c.computing_s + m.computing_s) / cores)
        ),
        "undisturbed": sum(
            all(sample.is_quiet for sample in samples)
            for samples in zip(*(record.samples for record in trio), strict=True)
        ),
        "rejected": sum(record.rejected for record in trio),
        "samples": {kind: [own.numbers() for own in each.samples] for kind, each in zip(KINDS, trio, strict=True)},
    }


CASE = HiddenCommunication()

if __name__ == "__main__":
    sys.exit(CASE.main())
