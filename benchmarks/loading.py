"""Time and memory to bring a checkpoint onto ranks: only a rank's slices, the whole on each, and what others do.

python benchmarks/loading.py [--gib G] [--stored float32|bfloat16] [--ranks 4 8] [--keep] …
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from contestants.loaders import Load, LoadingRank, Way, plain, ways
from harness import freshness, pictures
from harness.case import Case, chosen, positive
from harness.llama import Llama
from harness.rounds import Record, Sample, run_rounds, spread, undisturbed, undisturbed_rounds
from harness.tables import DASH, MIB, Column, Row, Table, ranged, versions
from harness.watch import Watch
from network.networks import Loopback
from network.ranks import forked_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.errors import CuboidError

GIB = 2**30
_SEED = 0
#: How far losses and gradient norms may be apart, relatively.
AGREEMENT = 1e-4
#: What must stay free of the machine's memory, as a part of what a way needs.
_SPARE = 0.15
#: Of each file of a checkpoint.
_SHARD_SIZE = "512MB"
_READ_BYTES = 2**24
#: By which a checkpoint that is there is known to be the one that is asked for.
_COMPARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "dtype"),
)
WORKLOAD = Llama(length=16, hidden=2048, intermediate=5632, heads=16, key_value_heads=8, vocabulary=8192)
#: In a few seconds, to see whether everything works. The figures say nothing.
QUICK = Llama(length=16, hidden=128, intermediate=256, heads=8, key_value_heads=8, vocabulary=512)
_QUICK_GIB = 1 / 128
#: In what checkpoints hold their weights; each is a run of its own.
STORED = ("float32", "bfloat16")


class Loading(Case):
    """Each way's first model must have the loss and the gradient norm of plain transformers."""

    name = "loading"
    sources = freshness.LOADING + freshness.MESHES
    unit = "loads"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        gib = "weights once loaded, in GiB of float32 (default 2)"
        parser.add_argument("--gib", type=positive, metavar="G", help=gib)
        stored = "what the checkpoint holds; bfloat16 is converted while it is loaded (default float32)"
        parser.add_argument("--stored", choices=STORED, default="float32", help=stored)
        parser.add_argument("--ranks", type=int, nargs="+", choices=[4, 8], help="default: 4 and 8; quick: 4")
        keep = "keep the checkpoint, for the next run with the same --out"
        parser.add_argument("--keep", action="store_true", help=keep)

    def check(self, given: argparse.Namespace, error: Callable[[str], object]) -> None:
        if not sys.platform.startswith("linux"):
            error("loads are measured by what Linux says of its processes, and this isn't Linux")
        given.ranks = sorted(set(given.ranks or ([4] if given.quick else [4, 8])))
        given.gib = given.gib or (_QUICK_GIB if given.quick else 2.0)

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = sized(QUICK if given.quick else WORKLOAD, given.gib)
        checkpoint = given.out / "checkpoint"
        files_bytes, held_bytes = write_checkpoint(workload, given.stored, checkpoint), weights_bytes(workload)
        sizes = {**workload.numbers(), "gib": given.gib, "stored": given.stored, "loaded": "float32"}
        result.update(workload=sizes, files_bytes=files_bytes, weights_bytes=held_bytes, page_cache="warm")
        watch, ids = Watch(given.limit), workload.tokens()
        try:
            _warm_up()
            with forked_ranks(Loopback(1), lambda _: LoadingRank(checkpoint, ids, None)) as one:
                (expected,) = one.call("check")
            records: list[Record] = []

            def write_rows() -> None:
                result["rows"] = [_row(record, records, files_bytes, held_bytes) for record in records]
                write()

            load = partial(_load, checkpoint=checkpoint, ids=ids, watch=watch, expected=expected)
            for count in given.ranks:
                found = chosen(given, ways(count), lambda way: way.name)
                own = [
                    Record((count, way), way.name, facts={"left_out": _too_large(way, count, held_bytes)})
                    for way in found
                ]
                records += own
                able = [record for record in own if record.facts["left_out"] is None]
                run_rounds(able, given.repeats, watch, load, write_rows)
        finally:
            if not given.keep:
                shutil.rmtree(checkpoint)

    def facts(self, result: Row) -> list[str]:
        own, sizes = result["machine"], result["workload"]
        return [
            f"Machine: {own['processor']}, {own['cores']} cores, {own['memory_bytes'] / GIB:.0f} GiB; {own['system']}, "
            f"{versions(result)}.",
            f"Checkpoint: a Llama of {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
            f"in {sizes['stored']}, {result['files_bytes'] / MIB:.0f} MiB of files; loaded as {sizes['loaded']}, "
            f"{result['weights_bytes'] / MIB:.0f} MiB. Page cache: {result['page_cache']}.",
            self.command(result),
        ]

    def remarks(self, result: Row) -> list[str]:
        left_out = [row for row in result["rows"] if row["left_out"]]
        return self.busy(result) + [
            f"Left out: {row['name']} on {row['ranks']} ranks; {row['left_out']}." for row in left_out
        ]

    def tables(self, result: Row) -> list[Table]:
        found = []
        for count in sorted({row["ranks"] for row in result["rows"]}):
            own = [row for row in result["rows"] if row["ranks"] == count]
            measured = [row for row in own if row["samples"]]
            first = own[0]["name"]
            ideal = {
                "name": "*size ÷ ranks*",
                "ideal": {
                    "peak_bytes": own[0]["ideal_held_bytes"],
                    "peak_sum_bytes": own[0]["ideal_held_bytes"] * count,
                    "touched_bytes": own[0]["ideal_file_bytes"],
                },
            }
            columns = [
                Column(f"{count} ranks; memory in MiB", lambda row: row["name"], "l"),
                Column("load, s", lambda row: _ranged(row, "step_s")),
                Column(f"÷ {first}", lambda row: _ranged(row, "ratio_time")),
                Column("peak of a rank", lambda row: _mib(row, "peak_bytes")),
                Column("all peaks", lambda row: _mib(row, "peak_sum_bytes")),
                Column(f"÷ {first}", lambda row: _ranged(row, "ratio_peak_sum")),
                Column("PSS of all after", lambda row: _mib(row, "proportional_sum_bytes")),
                Column("file pages of a rank", lambda row: _mib(row, "touched_bytes")),
            ]
            found.append(Table(columns, [*measured, ideal]))
        return found

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of times and of the sum of peaks, a row of panels for each number of ranks."""
        counts, path = sorted({row["ranks"] for row in result["rows"]}), folder / f"{self.record_name(result)}.png"
        figure, grid = pictures.panels(11, 1 + 2.2 * len(counts), len(counts), 2)
        for count, panels in zip(counts, grid, strict=True):
            own = [row for row in result["rows"] if row["ranks"] == count and row["samples"]]
            under = "MiB, peaks of all ranks beyond what they have before; line: the model once"
            for axes, key, unit, label in zip(
                panels, ("step_s", "peak_sum_bytes"), (1.0, float(MIB)), ("seconds", under), strict=True
            ):
                for place, row in enumerate(own):
                    colour = pictures.BLUE if row["name"].startswith("Cuboid") else pictures.GREY
                    pictures.bar(axes, place, row[key], colour, unit=unit)
                pictures.finish(axes, [row["name"] for row in own], label)
            times, memory = panels
            held = sum(row["ideal_held_bytes"] for row in own[:1]) * count / MIB
            memory.axvline(held, color=pictures.RED, linewidth=1)
            times.set_title(f"{count} ranks", loc="left")
            memory.set_yticklabels([])
        pictures.save(figure, path)
        return [path]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['workload']['stored']}"

    def parts(self, results: dict[str, Row]) -> dict[str, str]:
        found = {}
        for stored in STORED:
            result = results.get(f"{self.name}_{stored}")
            text = "Not measured yet." if result is None else self.markdown(result, "Times and peaks of loading")
            found[f"loading {stored}"] = text
        return found


# --- the checkpoint ---


def sized(workload: Llama, gib: float) -> Llama:
    """With as many layers as so many GiB of float32 weights ask for, at least one."""
    one, two = (weights_bytes(dataclasses.replace(workload, layers=layers)) for layers in (1, 2))
    return dataclasses.replace(workload, layers=1 + max(0, round((gib * GIB - one) / (two - one))))


def weights_bytes(workload: Llama) -> int:
    """Of the whole model, once it is loaded."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in LlamaForCausalLM(workload.config()).parameters())


def write_checkpoint(workload: Llama, stored: str, folder: Path) -> int:
    """Write an ordinary sharded checkpoint, unless it is there from another run; the bytes of its weights' files.

    Raises:
        CuboidError: the folder has something else in it.
    """
    if (folder / "config.json").exists():
        there, wanted = LlamaConfig.from_pretrained(folder), workload.config()
        wanted.dtype = getattr(torch, stored)
        for key in _COMPARED:
            if getattr(there, key) != getattr(wanted, key):
                raise CuboidError(
                    f"{folder} holds a model with {key} = {getattr(there, key)}, but {getattr(wanted, key)} is asked "
                    "for; remove the folder, or name another one with --out"
                )
    else:
        # In a process of its own, so that the one that ranks are forked from stays small.
        process = multiprocessing.get_context("fork").Process(target=_write, args=(workload, stored, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise CuboidError(f"the checkpoint couldn't be written to {folder} (exit code {process.exitcode})")
    return sum(file.stat().st_size for file in weight_files(folder))


def _write(workload: Llama, stored: str, folder: Path) -> None:
    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(workload.config()).to(getattr(torch, stored))
    # Under its name it is always whole.
    unfinished = folder.with_name(f"{folder.name}.incomplete")
    model.save_pretrained(unfinished, max_shard_size=_SHARD_SIZE)
    unfinished.rename(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold tensors."""
    return sorted(folder.glob("*.safetensors"))


def _warm_up() -> None:
    """Load one layer, so that what a process imports or compiles at its first load is there in all that are forked."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(dataclasses.replace(QUICK, layers=1).config()).save_pretrained(folder)
        plain(Path(folder))


# --- one load ---


def _too_large(way: Way, ranks: int, held_bytes: int) -> str | None:
    """Why this machine can't hold all that a way may hold, in a sentence."""
    needed = held_bytes * (ranks + 1 if way.everywhere else 2) * (1 + _SPARE)
    free = psutil.virtual_memory().available
    return None if needed <= free else f"it may take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"


def _load(record: Record, checkpoint: Path, ids: torch.Tensor, watch: Watch, expected: tuple[float, float]) -> Sample:
    """A load in processes of its own, forked from one that has imported everything."""
    ranks_count, way = record.entry
    for path in weight_files(checkpoint):
        # So that all loads find it in the page cache.
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    with forked_ranks(Loopback(ranks_count), lambda _: LoadingRank(checkpoint, ids, way.name)) as ranks:
        # Again, for the ranks have only just started.
        watch.wait()
        watch.start()
        loads: list[Load] = ranks.call("load")
        foreign = watch.share(sum(load.all_computing_s for load in loads))
        if "loss" not in record.facts:
            found = ranks.call("check")[0]
            check_agreement(way.name, found, expected)
            record.facts.update(loss=found[0], gradient_norm=found[1])
    figures = {"footprints": [dataclasses.asdict(load.footprint) for load in loads]}
    computing_s = sum(load.computing_s for load in loads)
    return Sample(max(load.duration_s for load in loads), computing_s, foreign, figures)


def check_agreement(name: str, found: tuple[float, float], expected: tuple[float, float]) -> None:
    """Make sure that the right model was loaded.

    Raises:
        CuboidError: its loss or gradient norm isn't that of plain transformers.
    """
    for what, own, other in zip(("loss", "gradient norm"), found, expected, strict=True):
        if not abs(own - other) <= AGREEMENT * abs(other):
            raise CuboidError(f"{name} has {what} {own}, but plain transformers has {other}: it didn't load the same")


# --- rows ---

#: What each sample is asked: a figure of each rank's footprint, and what of all ranks it is.
_FIGURES: dict[str, tuple[Callable[[Row], int], Callable[[Sequence[int]], int]]] = {
    "peak_bytes": (lambda own: own["peak_bytes"] - own["floor_bytes"], max),
    "peak_sum_bytes": (lambda own: own["peak_bytes"] - own["floor_bytes"], sum),
    "touched_bytes": (lambda own: own["peak_files_bytes"], max),
    "proportional_sum_bytes": (lambda own: own["proportional_bytes"], sum),
}


def _figure(sample: Sample, name: str) -> int:
    of_rank, of_all = _FIGURES[name]
    return of_all([of_rank(footprint) for footprint in sample.figures["footprints"]])


def _row(record: Record, records: Sequence[Record], files_bytes: int, held_bytes: int) -> Row:
    count, _ = record.entry
    row = {
        "name": record.name,
        "ranks": count,
        **{key: record.facts.get(key) for key in ("left_out", "loss", "gradient_norm")},
        "ideal_file_bytes": files_bytes / count,
        "ideal_held_bytes": held_bytes / count,
        "undisturbed": 0,
        "samples": [],
    }
    if not record.samples:
        return row
    quiet = undisturbed(record.samples)
    row |= record.numbers()
    row |= {name: spread([_figure(sample, name) for sample in quiet]) for name in _FIGURES}
    first = next(other for other in records if other.entry[0] == count)
    if first.samples and first is not record:
        rounds = undisturbed_rounds([record, first])
        row["ratio_time"] = spread([own.step_s / other.step_s for own, other in rounds])
        peaks = [[_figure(sample, "peak_sum_bytes") for sample in samples] for samples in rounds]
        row["ratio_peak_sum"] = spread([own / other for own, other in peaks])
    return row


def _ranged(row: Row, key: str) -> str:
    return DASH if "ideal" in row else ranged(row.get(key), none="1")


def _mib(row: Row, key: str) -> str:
    if "ideal" in row:
        return f"{row['ideal'][key] / MIB:.0f}" if key in row["ideal"] else DASH
    return f"{row[key]['median'] / MIB:.0f}"


CASE = Loading()

if __name__ == "__main__":
    sys.exit(CASE.main())
