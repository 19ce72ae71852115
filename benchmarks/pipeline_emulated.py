"""The pipeline on 8 and 16 stages, with computing emulated by sleeping: schedules, beside theory and other pipelines.

python benchmarks/pipeline_emulated.py [--network loopback|shaped] [--rate-mbit R] [--stages 8 16]
                                       [--micro-batches 8 16] [--segments 2 4 8] [--forward-ms T] [--width W] …

The runtime is the real one; only a layer's computing sleeps, for a time in proportion to a real layer's operations.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants.emulation import Channels, CuboidRuntime, Work, programs
from contestants.pipelines import DeepSpeedPipeline, Entry, First, Pipeline, TorchPipeline, cuts, row_name, together
from harness import freshness, pictures
from harness.case import Case, at_least, chosen, positive
from harness.rounds import Record, run_rounds, spread, undisturbed
from harness.tables import Column, Row, Table, in_order, ranged
from harness.watch import Watch
from layer_meshes import links
from network.names import burst_bytes
from network.networks import Network, open_network
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step, verify_rate
from network.serving import Step
from pipeline import draw_recorded, schedule_numbers, timelines

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError
from cuboid.models.pipeline.pipeline import open_channels
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.simulator import Timeline, peak_bytes

#: The label that everything carries.
EMULATED = "computing emulated by sleeping"
#: How far a float32 loss or gradient norm may be from float64, relatively; they are at 1e-6 and below.
AGREEMENT = 1e-5
#: Above this, processes wait for cores, which stages of their own wouldn't.
_MOST_PROCESSOR_SHARE = 0.5
#: Below this, what a unit costs beyond its sleep weighs too much.
_LEAST_UNIT_S = 0.010
#: By how much units may be late, as a part of their time, and steps longer than simulated, before it is told.
_MOST_LATE, _MOST_EXCESS = 0.01, 0.05
#: Whom every contestant is compared with.
YARDSTICKS = {"own_1f1b": Entry("cuboid"), "torch": Entry("torch"), "deepspeed": Entry("deepspeed")}
_COLOURS = {
    "torch": pictures.GREY,
    "deepspeed": pictures.DARK_GREY,
    "gpipe": pictures.YELLOW,
    "flops": pictures.BLUE,
    "even": pictures.CYAN,
}


def entries(segments: Sequence[int]) -> list[Entry]:
    """Everyone: Cuboid with whole sequences, with each number of segments and both cuts, and the peers."""
    return [Entry("cuboid", "gpipe"), *YARDSTICKS.values(), *cuts(segments)]


class EmulatedPipeline(Case):
    """Each step must have the loss and the gradient norm that plain autograd in float64 gives."""

    name = "pipeline_emulated"
    part = "emulated stages"
    sources = freshness.SEQ1F1B
    repeats, limit_s = 5, 600.0
    networks = ("loopback", "shaped")
    #: With the other defaults a message takes half as long as its forward.
    rate_mbit = 50.0

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--stages", type=at_least(2), nargs="+", metavar="P", help="each divides 32 (default 8 16)")
        parser.add_argument("--micro-batches", type=at_least(1), nargs="+", metavar="M", help="(default 8 16)")
        parser.add_argument("--segments", type=at_least(2), nargs="+", metavar="K", help="beside 1 (default 2 4 8)")
        forward = "of a whole sequence on one stage; backward is 2 T (default 160)"
        parser.add_argument("--forward-ms", type=positive, metavar="T", help=forward)
        width = "float32 numbers a token sends (default 4)"
        parser.add_argument("--width", type=at_least(1), default=4, metavar="W", help=width)

    def check(self, given: argparse.Namespace, error: Callable[[str], Any]) -> None:
        usual = ([4], [4], [2, 4], 20.0) if given.quick else ([8, 16], [8, 16], [2, 4, 8], 160.0)
        for name, value in zip(("stages", "micro_batches", "segments", "forward_ms"), usual, strict=True):
            if getattr(given, name) is None:
                setattr(given, name, value)
        for name in ("stages", "micro_batches", "segments"):
            if len(set(getattr(given, name))) < len(getattr(given, name)):
                error(f"--{name.replace('_', '-')} has a number twice")

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        # Errors are reported before anything takes time.
        forward_s, counts = given.forward_ms / 1e3, given.micro_batches
        works = {p: [Work(p, count, forward_s, given.width) for count in counts] for p in given.stages}
        everyone = chosen(given, entries(given.segments), lambda entry: entry.name)
        first = works[given.stages[0]][0]
        result.update(emulated=EMULATED, refusals=[], workload=first.numbers(), timelines=[])
        records: list[Record] = []

        def write_rows() -> None:
            result["rows"] = [_row(record, records, given.rate_mbit) for record in records]
            write()

        for stages, own in works.items():
            for entry, work in product(everyone, own):
                # So that ranks, which are forked from here, needn't all find out.
                programs(entry.schedule, entry.shape(work))
            with (
                open_network(given.network, stages) as network,
                forked_ranks(network, partial(_keep, network)) as ranks,
            ):
                if given.rate_mbit is not None:
                    network.set_rate(given.rate_mbit)
                    measured = verify_rate(network, ranks)
                    result["measured_mbit"] = min(measured, result["measured_mbit"] or measured)
                for work in own:
                    able = []
                    for entry in everyone:
                        reason = refusal(entry, work)
                        if reason is None:
                            able.append(entry)
                        else:
                            result["refusals"].append(reason)
                    _measure(ranks, work, able, given, records, write_rows)
        result["timelines"] = timelines(records, lambda entry: entry.kind == "cuboid" and entry.partition == "flops")

    def facts(self, result: Row) -> list[str]:
        sizes, where = result["workload"], "loopback" if result["rate_mbit"] is None else links(result)
        return [
            self.machine(result, "{} cores for all stages"),
            f"Emulated: {sizes['layers']} layers like Llama-2-7B's (hidden {sizes['hidden']}, MLP "
            f"{sizes['intermediate']}), sequences of {sizes['length']} tokens; the forward of a whole sequence sleeps "
            f"for {1e3 * sizes['forward_s']:g} ms on each stage.",
            f"Messages: {sizes['width']} float32 numbers a token; {where}.",
            self.command(result),
        ]

    def remarks(self, result: Row) -> list[str]:
        table = result["rows"]
        said = [
            "Computing is emulated: a unit sleeps for as long as its operations say. Schedules, messages and "
            "everything else between two units are real.",
            *result["refusals"],
            *self.busy(result),
        ]
        shortest_s = min(row["shortest_forward_s"] for row in table)
        if shortest_s < _LEAST_UNIT_S:
            said.append(
                f"The shortest unit takes {1e3 * shortest_s:.1f} ms forward, so that what it costs beyond its sleep "
                "weighs more than it would in practice."
            )
        busiest = max(table, key=lambda row: row["processor_share"])
        if busiest["processor_share"] > _MOST_PROCESSOR_SHARE:
            said.append(
                f"The ranks kept the cores busy for {busiest['processor_share']:.0%} of the time ({_place(busiest)}): "
                "they may have waited for one another's cores, which ranks on machines of their own don't."
            )
        latest = max(table, key=lambda row: row["late"])
        if latest["late"] > _MOST_LATE:
            said.append(f"Units took up to {latest['late']:.1%} longer than they should ({_place(latest)}).")
        longer = [row for row in table if row["excess"] > _MOST_EXCESS]
        if longer:
            worst = max(longer, key=lambda row: row["excess"])
            said.append(
                f"Steps took more than {_MOST_EXCESS:.0%} longer than simulated in {len(longer)} of {len(table)} rows, "
                f"at most {worst['excess']:.1%} ({_place(worst)})."
            )
        if result["rate_mbit"] is None:
            return [*said, "On loopback messages cost hardly any time."]
        least, burst = min(min(row["message_bytes"]) for row in table), burst_bytes(result["rate_mbit"])
        if least < 4 * burst:
            said.append(
                f"The smallest message has {least} bytes, of which the links let {burst} pass at once: it isn't "
                "slowed as the simulation assumes; give more --width."
            )
        return said

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("", lambda row: row_name(row) if row["kind"] != "cuboid" else _cuboid_name(row), "l"),
            Column("step, s", lambda row: ranged(row["step_s"])),
            Column("simulated", lambda row: f"{row['simulated_s']:.2f}"),
            Column("÷ 1F1B", lambda row: ranged(row["ratios"].get("own_1f1b"))),
            Column("simulated", lambda row: f"{row['ratio_simulated']:.2f}"),
            Column("theory", lambda row: f"{row['ratio_theory']:.2f}"),
            Column("÷ torch", lambda row: ranged(row["ratios"].get("torch"))),
            Column("÷ DeepSpeed", lambda row: ranged(row["ratios"].get("deepspeed"))),
            Column("bubble", lambda row: f"{100 * row['bubble']['median']:.1f} %"),
            Column("simulated", lambda row: f"{100 * row['bubble_simulated']:.1f} %"),
            Column("theory", lambda row: f"{100 * row['bubble_theory']:.1f} %"),
            Column("sequences in flight", lambda row: f"{max(row['sequences_in_flight']):.2f}"),
        ]
        return [
            Table(columns, rows, f"{stages} stages, M = {count} ({EMULATED})")
            for (stages, count), rows in _settings(result).items()
        ]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of step times, a panel for each setting, with what was simulated; and timelines."""
        shown, path = _settings(result), folder / "pipeline_emulated.png"
        columns = min(2, len(shown))
        lines = -(-len(shown) // columns)
        figure, grid = pictures.panels(6.5 * columns, 1 + 3.8 * lines, lines, columns)
        panels = list(grid.flat)
        for axes, ((stages, count), own) in zip(panels, shown.items(), strict=False):
            longest_s = max(row["step_s"]["median"] for row in own)
            for place, row in enumerate(own):
                kind = row["kind"] if row["kind"] != "cuboid" else row["partition"]
                pictures.bar(axes, place, row["step_s"], _COLOURS["gpipe" if row["schedule"] == "gpipe" else kind])
                text = f"bubble {row['bubble']['median']:.1%}, theory {row['bubble_theory']:.1%}"
                axes.text(0.01 * longest_s, place, text, va="center", fontsize=8)
            simulated = [row["simulated_s"] for row in own]
            axes.plot(simulated, range(len(own)), "|", color=pictures.RED, markersize=13, label="simulated")
            pictures.finish(axes, [row["name"] for row in own], "seconds for a step", fontsize=8)
            axes.set_title(f"{stages} stages, M = {count}", loc="left")
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        where = "loopback" if result["rate_mbit"] is None else f"links of {result['rate_mbit']:g} Mbit/s"
        figure.suptitle(f"{EMULATED[0].upper()}{EMULATED[1:]}; {where}", fontsize=10)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
        pictures.save(figure, path)
        caption = f"measured, one step each; {EMULATED}"
        return [path, *draw_recorded(result, folder / "pipeline_emulated_timelines.png", caption)]


def refusal(entry: Entry, work: Work) -> str | None:
    """Why a pipeline can't do this work; None if it can."""
    if entry.kind == "torch" and work.micro_batches < work.stages:
        return (
            f"torch's Schedule1F1B refuses {work.micro_batches} micro-batches on {work.stages} stages: it wants "
            "no fewer micro-batches than stages."
        )
    return None


def _keep(network: Network, _: int) -> Link:
    """What a rank keeps: the channels that Cuboid's contestants share, and whatever is built."""
    mesh = Mesh(MeshShape(), pipe=network.ranks)
    mesh.connect()
    assert mesh.coordinate.pipe == dist.get_rank()
    channels: Channels = open_channels(mesh, torch.device("cpu"))

    def build(key: tuple[Entry, Work]) -> Pipeline:
        entry, work = key
        if entry.kind == "cuboid":
            return CuboidRuntime(entry, work, channels)
        return DeepSpeedPipeline(work) if entry.kind == "deepspeed" else TorchPipeline(work)

    return Link(network, build)


def _measure(
    ranks: Ranks,
    work: Work,
    able: list[Entry],
    given: argparse.Namespace,
    records: list[Record],
    write_rows: Callable[[], None],
) -> None:
    """All contestants that are able to do a work: build, check, rounds."""
    reference = work.reference()
    own = [Record((entry, work), entry.name) for entry in able]
    for record in own:
        # The first step connects, and PyTorch tries each stage out in it.
        first: list[First] = ranks.call("prepare", record.entry)
        found = together(first)
        check_agreement(record, (found["loss"], found["gradient_norm"]), reference)
    watch = Watch(given.limit)
    figures = partial(_figures, reference)
    records += own
    run_rounds(own, given.repeats, watch, partial(timed_step, ranks, watch, figures=figures))
    write_rows()
    ranks.call("discard")


def _figures(reference: tuple[float, float], record: Record, steps: Sequence[Step]) -> Row:
    """Check a step, and see how it went.

    Raises:
        CuboidError: it computed something else, or left something out.
    """
    entry, work = record.entry
    norm = math.sqrt(sum(step.figures["squares"] for step in steps))
    check_agreement(record, (steps[-1].figures["loss"], norm), reference)
    timeline = Timeline(tuple(step.figures["spans"] for step in steps), (0,) * len(steps))
    check_complete(record, timeline)
    record.facts["timeline"] = timeline
    duration_s, step_s = work.cost(entry.lengths(work)), max(step.duration_s for step in steps)
    wanted_s = sum(duration_s(span.action) for spans in timeline.spans for span in spans)
    busy_s = sum(timeline.busy_s)
    # The part of the step, over all stages, in which no unit was under way; and by how much units took longer than
    # they should, as a part of that.
    return {"bubble": 1 - busy_s / (step_s * len(steps)), "late": busy_s / wanted_s - 1}


def check_agreement(record: Record, own: tuple[float, float], reference: tuple[float, float]) -> None:
    """Make sure that a step did the same as the reference; loss and gradient norm of both are given.

    Raises:
        CuboidError: with who didn't.
    """
    for name, ours, right in zip(("loss", "gradient norm"), own, reference, strict=True):
        error = abs(ours / right - 1)
        if not error <= AGREEMENT:
            raise CuboidError(
                f"{record.name} has {name} {ours}, but without a pipeline it is {right}: it doesn't do the same"
            )
        record.error = max(record.error, error)


def check_complete(record: Record, timeline: Timeline) -> None:
    """Make sure that every unit ran forward and backward once, for else no time means anything.

    Raises:
        CuboidError: with the unit.
    """
    entry, work = record.entry
    ran = Counter(span.action for spans in timeline.spans for span in spans)
    units = product(range(work.stages), range(work.micro_batches), range(entry.segments))
    for action in (Action(op, *unit) for unit in units for op in (Op.FORWARD, Op.BACKWARD)):
        count = ran.pop(action, 0)
        if count != 1:
            raise CuboidError(f"{record.name} ran {action} {count} times instead of once")
    if ran:
        raise CuboidError(f"{record.name} ran {next(iter(ran))}, which isn't part of the step")


def transfer_s(entry: Entry, work: Work, rate_mbit: float | None) -> Callable[[Action], float] | None:
    """Of each unit's message over the links."""
    if rate_mbit is None:
        return None
    lengths = entry.lengths(work)
    return lambda action: work.message_bytes(lengths[action.segment]) * 8 / (rate_mbit * 1e6)


def _row(record: Record, records: Sequence[Record], rate_mbit: float | None) -> Row:
    entry, work = record.entry
    by_key = {other.entry: other for other in records}
    yardsticks = [(key, by_key.get((own, work))) for key, own in YARDSTICKS.items()]
    numbers = record.numbers([(key, other) for key, other in yardsticks if other is not None])
    quiet, lengths = undisturbed(record.samples), entry.lengths(work)
    forward_s = [work.cost(lengths)(Action(Op.FORWARD, 0, 0, segment)) for segment in range(len(lengths))]
    cut = entry.simulated(work, transfer_s(entry, work, rate_mbit))
    ran = [[span.action for span in spans] for spans in record.facts["timeline"].spans]
    return {
        "name": entry.name,
        **dataclasses.asdict(entry),
        "stages": work.stages,
        "micro_batches": work.micro_batches,
        "lengths": list(lengths),
        "message_bytes": [work.message_bytes(length) for length in lengths],
        "shortest_forward_s": min(forward_s),
        "error": record.error,
        "simulated_s": cut.makespan_s,
        "excess": numbers["step_s"]["median"] / cut.makespan_s - 1,
        "bubble": spread([sample.figures["bubble"] for sample in quiet]),
        **schedule_numbers(entry, YARDSTICKS["own_1f1b"], work, partial(transfer_s, work=work, rate_mbit=rate_mbit)),
        "sequences_in_flight": [peak_bytes(own, lambda action: lengths[action.segment]) / work.length for own in ran],
        "sequences_in_flight_simulated": [peak / work.length for peak in cut.peak_bytes],
        "kept_bytes_estimated": [peak_bytes(own, work.kept_bytes(lengths)) for own in ran],
        "late": statistics.median(sample.figures["late"] for sample in quiet),
        "processor_share": statistics.median(
            sample.computing_s / (sample.step_s * (os.cpu_count() or 1)) for sample in quiet
        ),
        **numbers,
    }


def _settings(result: Row) -> dict[tuple[int, int], list[Row]]:
    """Rows by numbers of stages and of micro-batches, in the order in which they were measured."""
    settings = in_order([(row["stages"], row["micro_batches"]) for row in result["rows"]])
    return {
        setting: [row for row in result["rows"] if (row["stages"], row["micro_batches"]) == setting]
        for setting in settings
    }


def _cuboid_name(row: Row) -> str:
    return f"`{row['schedule']}`" + (f", {row_name(row)}" if row["segments"] > 1 else "")


def _place(row: Row) -> str:
    return f"{row['name']} on {row['stages']} stages, M = {row['micro_batches']}"


CASE = EmulatedPipeline()

if __name__ == "__main__":
    sys.exit(CASE.main())
