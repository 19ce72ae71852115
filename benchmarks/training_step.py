"""A whole training step of a small Llama: Cuboid beside DeepSpeed AutoTP, Transformers' tp_plan and FSDP2 on 8 ranks.

python benchmarks/training_step.py [--network loopback|shaped] [--dtype float32|bfloat16] [--contestants KEY …] …
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

# DeepSpeed looks for this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from contestants.whole_steps import ADAMW, AUTO_KEY, CLIP, DEFAULT, RANKS, Entry, FirstSteps, build, find
from harness import freshness, pictures
from harness.case import Case, chosen
from harness.llama import Llama
from harness.rounds import Record, run_rounds
from harness.tables import MB, Column, Row, Table, known, ranged
from harness.watch import Watch
from layer_meshes import link_numbers, links, mark_limits, processor_counts, shared_cores
from network.networks import open_network
from network.ranks import forked_ranks
from network.rate import Link, limit_rate, timed_step, traffic
from overhead import model_fact
from transformers import LlamaForCausalLM

from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import precision
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

WORKLOAD = Llama()
#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = Llama(length=32, hidden=64, intermediate=176, layers=2, vocabulary=256)
#: How far losses and the gradient norm may be from one process in float64, relatively. A norm is a sum of millions of
#: squares, which frameworks add up in float32.
AGREEMENT = {"float32": (1e-5, 5e-5), "bfloat16": (0.02, 0.02)}
#: Whom the automatic mesh is compared with, at the best of each one's layouts.
PEERS = {"autotp": "DeepSpeed AutoTP", "tp_plan": "Transformers tp_plan", "fsdp2": "FSDP2"}
#: Of the page.
SETTINGS = [(network, dtype) for network in ("shaped", "loopback") for dtype in ("float32", "bfloat16")]
_COLOURS = {
    "cuboid": pictures.CYAN,
    "autotp": pictures.GREY,
    "tp_plan": pictures.YELLOW,
    "fsdp2": pictures.PURPLE,
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """What plain Hugging Face computes in one process in float64.

    Args:
        losses: of the batch, before and after a step.
        gradient_norm: of that step, before clipping.
    """

    losses: tuple[float, float]
    gradient_norm: float


class TrainingStep(Case):
    """Losses and gradient norms are compared with one process in float64 before anything is timed."""

    name = "training_step"
    sources = freshness.MESHES + freshness.LOSS + freshness.ENGINE
    networks = ("loopback", "shaped")
    #: At which the links should take three times as long as two cores do, even for the one that sends least: 100 MB in
    #: float32, beside 5.5 s of computing on one core. What it came to is in the results.
    rate_mbit = 80.0

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        dtypes = ["float32", "bfloat16"]
        parser.add_argument("--dtype", choices=dtypes, default="float32", help="bfloat16 is mixed precision")
        default = f"default: {' '.join(DEFAULT)}"
        parser.add_argument("--contestants", nargs="+", metavar="KEY", default=DEFAULT, help=default)

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute
        workload = dataclasses.replace(QUICK if given.quick else WORKLOAD, dtype=given.dtype)
        model = workload.model()
        entries = chosen(given, find(given.contestants, workload, model), lambda entry: entry.name)
        with (
            open_network(given.network, RANKS) as network,
            tempfile.TemporaryDirectory(prefix="cuboid-") as directory,
        ):
            model.save_pretrained(directory)
            reference = compute_reference(workload, model)
            sizes = {**workload.numbers(), "model": "LlamaForCausalLM", "clip": CLIP, "adamw": ADAMW}
            result.update(workload=sizes, ranks=RANKS, reference=dataclasses.asdict(reference))
            own = partial(build, workload=workload, model=model, folder=Path(directory))
            with forked_ranks(network, lambda _: Link(network, own)) as ranks:
                records = [check(entry, ranks.call("prepare", entry), reference, given.dtype) for entry in entries]
                for record, entry in zip(records, entries, strict=True):
                    shape = str(entry.shape(workload, model)) if entry.family == "cuboid" else None
                    record.facts.update(shape=shape, formula_bytes=entry.formula_bytes(workload, model))

                def write_rows() -> None:
                    result["rows"] = [_row(record, records, given.rate_mbit) for record in records]
                    write()

                watch = Watch(given.limit)
                rounds = (given.repeats, watch, partial(timed_step, ranks, watch, figures=traffic))
                result["measured_mbit"] = limit_rate(network, ranks, records, given.rate_mbit, *rounds)
                run_rounds(records, *rounds, write_rows)

    def facts(self, result: Row) -> list[str]:
        return [
            self.machine(result),
            f"{model_fact(result['workload'])} in all, {result['workload']['dtype']}.",
            f"Links: {links(result)}.",
            self.command(result),
        ]

    def remarks(self, result: Row) -> list[str]:
        said = [f"The automatic mesh is **{_compared(one)}**." for one in comparisons(result["rows"])]
        said += self.busy(result) + processor_counts(result["rows"], "name")
        said += [
            f"{row['name']}: sends {row['sent_bytes'] / row['formula_bytes']:.2f} times what its collectives need, "
            "since PyTorch's reduce-scatter over gloo sends as much as an all-reduce; over NCCL it doesn't."
            for row in result["rows"]
            if row["family"] == "fsdp2" and row["sent_bytes"] is not None
        ]
        return said + shared_cores(result)

    def tables(self, result: Row) -> list[Table]:
        rows = result["rows"]
        auto = next((row for row in rows if row["key"] == AUTO_KEY), {"ratios": {}, "ratios_bytes": {}})
        columns = [
            Column("contestant", lambda row: row["name"], "l"),
            Column("step, s", lambda row: ranged(row["step_s"])),
            Column("`auto` is × as fast", lambda row: ranged(auto["ratios"].get(row["key"]), none="1")),
            Column("CPU, s", lambda row: f"{row['computing_s']:.1f}"),
        ]
        if result["rate_mbit"] is not None:
            columns += [
                Column("MB sent", lambda row: f"{row['sent_bytes'] / MB:.1f}"),
                Column("by bytes", lambda row: known(auto["ratios_bytes"].get(row["key"]), ".2f", none="1")),
                Column("bytes ÷ rate, s", lambda row: f"{row['link_s']:.1f}"),
                Column("without a limit, s", lambda row: f"{row['floor_s']['median']:.1f}"),
            ]
        return [Table([*columns, Column("error", lambda row: f"{row['error']:.0e}")], rows)]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of step times, with what the links alone and the processors alone take."""
        rows, path = result["rows"], folder / f"{self.record_name(result)}.png"
        figure, ((axes,),) = pictures.panels(9, 1.2 + 0.42 * len(rows))
        for place, row in enumerate(rows):
            colour = pictures.BLUE if row["key"] == AUTO_KEY else _COLOURS[row["family"]]
            pictures.bar(axes, place, row["step_s"], colour)
        mark_limits(axes, rows, size=14)
        rate = "loopback" if result["rate_mbit"] is None else f"{result['rate_mbit']:g} Mbit/s each"
        what = f"seconds for a training step, {result['workload']['dtype']}, {result['ranks']} ranks, {rate}"
        pictures.finish(axes, [row["name"] for row in rows], what)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        pictures.save(figure, path)
        return [path]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['network']}_{result['workload']['dtype']}"

    def parts(self, results: dict[str, Row]) -> dict[str, str]:
        found = {}
        for network, dtype in SETTINGS:
            result = results.get(f"{self.name}_{network}_{dtype}")
            text = "Not measured yet." if result is None else self.markdown(result, "Step times of all contestants")
            found[f"training step, {network}, {dtype}"] = text
        return found


def compute_reference(workload: Llama, model: LlamaForCausalLM) -> Reference:
    """A whole training step of the whole model in this process."""
    whole, rows = copy.deepcopy(model).double(), workload.tokens()
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW)
    with precision(keep_float64=True):
        first = whole(input_ids=rows, labels=rows).loss
        first.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            second = whole(input_ids=rows, labels=rows).loss
    return Reference((first.item(), second.item()), norm.item())


def check(entry: Entry, told: Sequence[FirstSteps], reference: Reference, dtype: str) -> Record:
    """Compare what all ranks tell with the reference; each replica has as many ranks and rows as any other, so that
    the mean of the ranks' losses is that of the batch.

    Raises:
        CuboidError: it differs, on any rank.
    """
    of_loss, of_norm = AGREEMENT[dtype]
    losses = [statistics.fmean(rank.losses[number] for rank in told) for number in range(2)]
    compared = [
        ("the first loss", losses[0], reference.losses[0], of_loss),
        ("the loss after a step", losses[1], reference.losses[1], of_loss),
        *(
            (f"the gradient norm on rank {number}", rank.gradient_norm, reference.gradient_norm, of_norm)
            for number, rank in enumerate(told)
        ),
    ]
    worst = 0.0
    for what, found, right, allowed in compared:
        error = abs(found / right - 1) if math.isfinite(found) else math.inf
        if error > allowed:
            raise CuboidError(
                f"{entry.name} doesn't compute what plain Hugging Face does: {what} is {found:.7g} instead of "
                f"{right:.7g}, {error:.1e} away, where {allowed:g} is allowed"
            )
        worst = max(worst, error)
    return Record(entry, entry.name, worst, {"losses": losses, "gradient_norm": told[0].gradient_norm})


def _row(record: Record, records: list[Record], rate_mbit: float | None) -> Row:
    others = [other for other in records if other is not record]
    numbers = record.numbers([(other.entry.key, other) for other in others])
    sent, last = _sent_bytes(record), record.samples[-1].figures
    by_others = {other.entry.key: _sent_bytes(other) for other in others}
    return {
        **dataclasses.asdict(record.entry),
        **record.facts,
        "error": record.error,
        "sent_bytes": sent,
        "counted_bytes": last["counted_bytes"] or None,
        "interface_bytes": last["interface_bytes"],
        **link_numbers(sent, rate_mbit, numbers["floor_s"]),
        **numbers,
        "ratios_bytes": {key: theirs / sent for key, theirs in by_others.items() if None not in (theirs, sent)},
    }


def _sent_bytes(record: Record) -> float | None:
    """What a rank sends in a step: by the interfaces, on loopback by Cuboid's counter; None for others there."""
    last = record.samples[-1].figures
    return last["interface_bytes"] or last["counted_bytes"] or None


def comparisons(rows: Sequence[Row]) -> list[Row]:
    """The automatic mesh beside each peer's layout that has the shortest median step, and beside AutoTP on all ranks.

    Returns:
        For each: ``against`` (key), ``what`` (a name), ``ratio`` (times as fast, of paired rounds), ``bytes`` (times as
        much sent, or None). Empty where the automatic mesh or all peers didn't take part.
    """
    own = next((row for row in rows if row["key"] == AUTO_KEY), None)
    if own is None:
        return []
    found = [{"against": row["key"], "what": row["name"]} for row in rows if row["key"] == f"autotp-{RANKS}"]
    for family, name in PEERS.items():
        layouts = [row for row in rows if row["family"] == family]
        if layouts:
            best = min(layouts, key=lambda row: row["step_s"]["median"])
            what = f"{name} at its best ({best['name']})" if len(layouts) > 1 else best["name"]
            found.append({"against": best["key"], "what": what})
    ratios, sent = own["ratios"], own["ratios_bytes"]
    return [{**one, "ratio": ratios[one["against"]], "bytes": sent.get(one["against"])} for one in found]


def _compared(one: Row) -> str:
    sent = "" if one["bytes"] is None else f" (which sends {one['bytes']:.2f} times as much)"
    return f"{ranged(one['ratio'])} times as fast as {one['what']}{sent}"


CASE = TrainingStep()

if __name__ == "__main__":
    sys.exit(CASE.main())
