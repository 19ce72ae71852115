"""Step times, bubbles and memory of Seq1F1B beside two other pipelines, for the same model on two cores.

python benchmarks/pipeline.py [--micro-batches 2 4] [--segments 1 2 4 8] …
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contestants.pipelines import (
    CuboidPipeline,
    DeepSpeedPipeline,
    Entry,
    Pipeline,
    RealTask,
    TorchPipeline,
    cuts,
    read_timeline,
    row_name,
    timeline_text,
    together,
)
from harness import freshness, pictures
from harness.case import Case, at_least, chosen
from harness.rounds import Record, run_rounds, undisturbed
from harness.tables import DASH, MIB, Column, Row, Table, in_order, ranged, versions
from harness.watch import Watch, pin
from network.networks import Loopback
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step
from network.serving import Step

from cuboid.errors import CuboidError
from cuboid.seq1f1b.schedule.timeline_picture import draw_timelines

#: How far losses and gradient norms of two contestants may be apart, relatively.
AGREEMENT = 1e-5
#: For the peaks of memory, where more stages than cores do no harm.
_MANY_STAGES = 4
#: Whom every contestant is compared with.
YARDSTICKS = {"torch": Entry("torch"), "deepspeed": Entry("deepspeed"), "own_1f1b": Entry("cuboid", "seq1f1b")}
_COLOURS = {
    "torch": pictures.GREY,
    "deepspeed": pictures.DARK_GREY,
    "flops": pictures.BLUE,
    "even": pictures.CYAN,
}


class PipelineCase(Case):
    """Losses and gradient norms of all first steps must agree before anything is timed."""

    name = "pipeline"
    sources = freshness.SEQ1F1B + freshness.STAGES + freshness.ENGINE

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        # torch's 1F1B refuses fewer micro-batches than stages.
        parser.add_argument("--micro-batches", type=at_least(2), nargs="+", default=[2, 4], metavar="M")
        parser.add_argument("--segments", type=at_least(1), nargs="+", default=[1, 2, 4, 8], metavar="K")

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        task = RealTask(length=256, hidden=64, intermediate=128) if given.quick else RealTask()
        entries = chosen(given, [Entry("torch"), Entry("deepspeed"), *cuts(given.segments)], lambda entry: entry.name)
        result.update(workload=task.numbers(), memory=[], timelines=[])
        own = partial(build, traces=given.out / "traces")

        def keep(_: int) -> Link:
            pin(dist.get_rank())
            return Link(Loopback(dist.get_world_size()), own)

        records: list[Record] = []
        with forked_ranks(Loopback(task.stages), keep) as ranks:
            for count in given.micro_batches:
                step = dataclasses.replace(task, micro_batches=count)
                watch = Watch(given.limit)
                ready = [_prepare(ranks, entry, step, watch) for entry in entries]
                check_agreement(ready)
                records += ready
                run_rounds(ready, given.repeats, watch, partial(timed_step, ranks, watch, figures=_idle))
                ranks.call("discard")
                result["rows"] = [_row(record, records) for record in records]
                write()
        many = dataclasses.replace(task, stages=_MANY_STAGES, micro_batches=_MANY_STAGES)
        with forked_ranks(Loopback(many.stages), keep) as ranks:
            kept = []
            for entry in entries:
                kept.append(Record((entry, many), entry.name, facts=together(ranks.call("prepare", (entry, many)))))
                ranks.call("discard")
                gc.collect()
        check_agreement(kept)
        result["memory"] = [_memory_row(record) for record in kept]
        result["timelines"] = timelines(records, lambda entry: entry.partition == "flops")

    def facts(self, result: Row) -> list[str]:
        own, sizes = result["machine"], result["workload"]
        return [
            f"Machine: {own['processor']}, {own['cores']} cores, {own['memory_bytes'] / 2**30:.0f} GiB; "
            f"{own['system']}, Python {own['python']}, {versions(result)}.",
            f"Model: a Llama of {sizes['layers']} layers (hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
            f"{sizes['heads']} query and {sizes['key_value_heads']} key/value heads, vocabulary {sizes['vocabulary']}) "
            f"in {sizes['dtype']}, S = {sizes['length']} tokens, one row in each micro-batch.",
            self.command(result),
        ]

    def tables(self, result: Row) -> list[Table]:
        counts = in_order([row["micro_batches"] for row in result["rows"]])
        by_count = {count: [row for row in result["rows"] if row["micro_batches"] == count] for count in counts}
        found = []
        for count, rows in by_count.items():
            columns = [
                Column("", row_name, "l"),
                Column("step, s", lambda row: ranged(row["step_s"])),
                *(
                    Column(f"÷ {title}", lambda row, key=key: _ratio(row, key))
                    for title, key in (("torch", "torch"), ("DeepSpeed", "deepspeed"), ("k = 1", "own_1f1b"))
                ),
                Column("simulated", lambda row: f"{row['ratio_simulated']:.2f}"),
                Column("theory", lambda row: f"{row['ratio_theory']:.2f}"),
            ]
            found.append(Table(columns, rows, part=f"steps, M = {count}"))
        kinds = {
            "measured": "bubble",
            "traced": "bubble_traced",
            "simulated": "bubble_simulated",
            "theory": "bubble_theory",
        }
        # A row of this table has a row of each number of micro-batches.
        pairs = [dict(zip(counts, rows, strict=True)) for rows in zip(*by_count.values(), strict=True)]
        bubbles = [Column("", lambda pair: row_name(pair[counts[0]]), "l")]
        for count in counts:
            for kind, key in kinds.items():
                bubbles.append(
                    Column(f"M = {count}: {kind}", lambda pair, count=count, key=key: _share(pair[count][key]))
                )
        found.append(Table(bubbles, pairs, part="bubbles"))
        memory = result["memory"]
        whole = next((row for row in memory if row["kind"] == "cuboid" and row["segments"] == 1), None)
        stages = range(len(memory[0]["peak_bytes"]) if memory else 0)
        peaks = [
            Column("MiB", row_name, "l"),
            *(Column(f"stage {n}", lambda row, n=n: f"{row['peak_bytes'][n] / MIB:.0f}") for n in stages),
            Column("largest ÷ k = 1", lambda row: f"**{_largest(row, whole, 'peak_bytes')}**"),
            Column("by tokens in flight", lambda row: _largest(row, whole, "sequences_in_flight")),
        ]
        return [*found, Table(peaks, memory, part="memory")]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of step times, a panel for each number of micro-batches, with what was simulated; and timelines."""
        counts, path = sorted({row["micro_batches"] for row in result["rows"]}), folder / "pipeline.png"
        figure, (grid,) = pictures.panels(12, 4.2, columns=len(counts))
        for axes, count in zip(grid, counts, strict=True):
            own = [row for row in result["rows"] if row["micro_batches"] == count]
            base = next((row for row in own if row["kind"] == "cuboid" and row["segments"] == 1), own[0])
            for place, row in enumerate(own):
                kind = row["partition"] if row["kind"] == "cuboid" else row["kind"]
                pictures.bar(axes, place, row["step_s"], _COLOURS[kind])
                inside = 0.01 * base["step_s"]["median"]
                axes.text(inside, place, f"bubble {row['bubble']:.1%}", va="center", fontsize=8)
            expected = [base["step_s"]["median"] / row["ratio_simulated"] for row in own]
            label = "simulated, from Cuboid's k=1"
            axes.plot(expected, range(len(own)), "|", color=pictures.RED, markersize=13, label=label)
            pictures.finish(axes, [row["name"] for row in own], "seconds for a step", fontsize=8)
            axes.set_title(f"M = {count}", loc="left")
        for axes in grid[1:]:
            axes.set_yticklabels([])
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
        pictures.save(figure, path)
        return [path, *draw_recorded(result, folder / "pipeline_timelines.png", "measured, one step each")]

    def parts(self, results: dict[str, Row]) -> dict[str, str]:
        (result,) = results.values()
        tables = self.tables(result)
        parts = {str(table.part): table.markdown() for table in tables}
        # What is common to all tables comes first on the page.
        return {"machine": self.markdown(result), **parts}


def build(key: tuple[Entry, RealTask], traces: Path) -> Pipeline:
    """Set up a contestant for a task. All ranks must call."""
    entry, task = key
    if entry.kind == "cuboid":
        return CuboidPipeline(entry, task, traces)
    return DeepSpeedPipeline(task) if entry.kind == "deepspeed" else TorchPipeline(task)


def _prepare(ranks: Ranks, entry: Entry, task: RealTask, watch: Watch) -> Record:
    """Build a contestant and have its first two steps. Of the second one Cuboid records a timeline, only once in a
    pipeline's life, so the pipeline is built again where somebody disturbed that."""
    while True:
        record = Record((entry, task), entry.name, facts=together(ranks.call("prepare", (entry, task))))
        watch.wait()
        sample = timed_step(ranks, watch, record, figures=_timeline)
        if entry.kind != "cuboid" or sample.is_quiet or watch.is_over():
            return record


def _timeline(record: Record, steps: Sequence[Step]) -> Row:
    record.facts["timeline"] = steps[0].figures.get("timeline")
    return {}


def _idle(_: Record, steps: Sequence[Step]) -> Row:
    """For each rank the part of the step in which it didn't compute."""
    step_s = max(step.duration_s for step in steps)
    return {"idle": [1 - step.thread_s / step_s for step in steps]}


def check_agreement(records: Sequence[Record]) -> None:
    """Make sure that all did the same work.

    Raises:
        CuboidError: a loss or a gradient norm isn't the first one's.
    """
    first = records[0]
    for record in records[1:]:
        for name in ("loss", "gradient_norm"):
            one, other = first.facts[name], record.facts[name]
            if not abs(one - other) <= AGREEMENT * abs(one):
                raise CuboidError(
                    f"{record.name} has {name} {other}, but {first.name} has {one}: they don't do the same"
                )


def _row(record: Record, records: Sequence[Record]) -> Row:
    entry, task = record.entry
    by_key = {other.entry: other for other in records}
    yardsticks = {key: by_key.get((own, task)) for key, own in YARDSTICKS.items()}
    timeline = record.facts["timeline"]
    samples = undisturbed(record.samples)
    return {
        "name": entry.name,
        **dataclasses.asdict(entry),
        "micro_batches": task.micro_batches,
        "lengths": list(entry.lengths(task)),
        **{key: record.facts[key] for key in ("loss", "gradient_norm", "peak_bytes")},
        "bubble": statistics.median(statistics.fmean(sample.figures["idle"]) for sample in samples),
        "bubble_traced": None if timeline is None else timeline.bubble,
        **schedule_numbers(entry, YARDSTICKS["own_1f1b"], task),
        **record.numbers([(key, other) for key, other in yardsticks.items() if other is not None]),
    }


def schedule_numbers(entry: Entry, own: Entry, task: Any, transfer_s: Callable[[Entry], Any] = lambda _: None) -> Row:
    """What theory and simulator say of a contestant, and of how many times as fast as Cuboid's 1F1B it is.

    Args:
        entry: the contestant.
        own: Cuboid's 1F1B.
        task: what both do.
        transfer_s: gives the time of each unit's message, for either.
    """
    cut, whole = (each.simulated(task, transfer_s(each)) for each in (entry, own))
    return {
        "bubble_theory": entry.theory(task),
        "bubble_simulated": cut.bubble,
        "ratio_theory": (1 - entry.theory(task)) / (1 - own.theory(task)),
        "ratio_simulated": whole.makespan_s / cut.makespan_s,
    }


def _memory_row(record: Record) -> Row:
    """What each stage keeps, and how many sequences it has in flight by the schedule."""
    entry, task = record.entry
    return {
        "name": entry.name,
        **dataclasses.asdict(entry),
        "micro_batches": task.micro_batches,
        "peak_bytes": record.facts["peak_bytes"],
        "sequences_in_flight": [tokens / task.length for tokens in entry.simulated(task).peak_bytes],
    }


def timelines(records: Sequence[Record], shown: Callable[[Entry], bool]) -> list[Row]:
    """Of the first task's contestants, for the record."""
    task = records[0].entry[1]
    return [
        {
            "title": f"{record.name}, M={task.micro_batches}: bubble {record.facts['timeline'].bubble:.1%}",
            "ranks": timeline_text(record.facts["timeline"]),
        }
        for record in records
        if record.facts["timeline"] is not None and record.entry[1] == task and shown(record.entry[0])
    ]


def draw_recorded(result: Row, path: Path, caption: str) -> list[Path]:
    """The timelines of a record, if it has any."""
    found = [(each["title"], read_timeline(each["ranks"])) for each in result.get("timelines", [])]
    if not found:
        return []
    draw_timelines(found, path, caption=caption)
    return [path]


def _ratio(row: Row, key: str) -> str:
    is_itself = row["segments"] == 1 and key == {"cuboid": "own_1f1b"}.get(row["kind"], row["kind"])
    return "1" if is_itself else ranged(row["ratios"].get(key))


def _share(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def _largest(row: Row, whole: Row | None, key: str) -> str:
    return DASH if whole is None else f"{max(row[key]) / max(whole[key]):.2f}"


CASE = PipelineCase()

if __name__ == "__main__":
    sys.exit(CASE.main())
