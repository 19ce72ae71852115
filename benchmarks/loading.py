"""Time and memory to bring a checkpoint onto ranks: only a rank's slices, the whole on each, and what others do.

python benchmarks/loading.py [--stored float32|bfloat16] …
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from harness import freshness, llama
from harness.case import Case
from harness.llama import Llama
from harness.rounds import Record, Sample, check_equal, run_rounds, spread, undisturbed, undisturbed_rounds
from harness.tables import DASH, GIB, MIB, Column, Row, Table, grouped, ranged
from harness.watch import Watch
from network.networks import Loopback
from network.ranks import forked_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import cuboid
from cuboid.distributed.topology import MeshShape

#: How far losses and gradient norms may be apart, relatively.
AGREEMENT = 1e-4
#: What must stay free of the machine's memory, as a part of what a way needs.
_SPARE = 0.15
#: Of each file of a checkpoint.
_SHARD_SIZE = "512MB"
_READ_BYTES = 2**24
#: Two GiB of float32.
WORKLOAD = Llama(length=16, hidden=2048, intermediate=5632, heads=16, key_value_heads=8, vocabulary=8192, layers=11)
QUICK = Llama(length=16, hidden=128, intermediate=256, heads=8, key_value_heads=8, vocabulary=512, layers=11)
#: In what checkpoints hold their weights; each is a run of its own.
STORED = ("float32", "bfloat16")
_DTYPE = torch.float32
_OWN = Path("/proc/self")
_SAMPLE_S = 0.01


# --- ways to load ---


class Way(NamedTuple):
    """One way to load."""

    name: str  # of the table's row
    load: Callable[[Path], PreTrainedModel]  # gives the model, given the checkpoint
    owned: bool = True  # whether every number of the model has one owner among the ranks
    everywhere: bool = False  # whether every rank holds the whole model at some time


def ways(ranks: int) -> list[Way]:
    """All ways on so many ranks; the first one is what others are compared with."""

    def config(mesh: str) -> Row:
        return {"tensor_parallel": Llama().section(mesh, ranks)}

    def ours(mesh: str) -> Way:
        name = f"Cuboid {MeshShape.parse(mesh)}"
        return Way(name, lambda path: cuboid.from_pretrained(path, config(mesh), dtype=_DTYPE))

    cube = {4: "1x2x2", 8: "2x2x2"}[ranks]
    return [
        ours(cube),
        ours(f"{ranks}x1x1"),
        Way("whole, then cuboid.shard", lambda path: cuboid.shard(plain(path), config(cube)), everywhere=True),
        Way('transformers, tp_plan="auto"', _tensor_parallel, owned=False),
        Way("FSDP2, broadcast from rank 0", _fsdp),
    ]


def plain(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE)


def _tensor_parallel(path: Path) -> PreTrainedModel:
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPE, distributed_config=plan)


def _fsdp(path: Path) -> PreTrainedModel:
    """As PyTorch's tutorial has it: rank 0 has the whole state, and broadcasts it tensor by tensor."""
    state = plain(path).state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=_DTYPE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Buffers that no checkpoint has: the frequencies of the rotary embedding.
    rotary = model.model.rotary_emb
    for name, buffer in type(rotary)(model.config).named_buffers():
        setattr(rotary, name, buffer)
    return model


def loss_and_norm(model: PreTrainedModel, ids: torch.Tensor, *, owned: bool = True) -> Row:
    """Loss of a batch that all ranks have, and the norm of its gradient; see :class:`Way`. Collective."""
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local() if owned else gradient.full_tensor()
        squares += gradient.double().square().sum()
    if owned and dist.is_initialized():
        dist.all_reduce(squares)
    return {"loss": loss.item(), "gradient_norm": squares.sqrt().item()}


# --- on a rank ---


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Inside, what this process holds and reads is watched; afterwards, in what this gives,

    * ``floor_bytes`` is what it had in memory before: PyTorch, transformers, everything imported;
    * ``peak_bytes`` the most that it had in memory at a time, files that it mapped included;
    * ``peak_files_bytes`` the most pages of files that it mapped, beyond those from before; sampled;
    * ``proportional_bytes`` what it holds afterwards, where each page that several processes share counts in parts.
    """
    # The peak starts again at what the process has now.
    (_OWN / "clear_refs").write_text("5", encoding="ascii")
    before, end = _numbers(_OWN / "status"), threading.Event()
    footprint = {"floor_bytes": before["VmRSS"], "peak_files_bytes": 0}

    def sample() -> None:
        while not end.wait(_SAMPLE_S):
            files_bytes = _numbers(_OWN / "status")["RssFile"] - before["RssFile"]
            footprint["peak_files_bytes"] = max(footprint["peak_files_bytes"], files_bytes)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield footprint
    end.set()
    thread.join()
    footprint["peak_bytes"] = _numbers(_OWN / "status")["VmHWM"]
    footprint["proportional_bytes"] = _numbers(_OWN / "smaps_rollup")["Pss"]


def _numbers(path: Path) -> dict[str, int]:
    """Lines ``Name: number kB``, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0].removesuffix(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


class LoadingRank:
    """What a rank keeps, for one load of a checkpoint, and a batch by which to see whether it was the right one."""

    def __init__(self, checkpoint: Path, ids: torch.Tensor, way: Way) -> None:
        self._checkpoint, self._ids, self._way = checkpoint, ids, way

    def load(self) -> Row:
        """Load, and read every weight of this rank once: of a mapped file nothing has been read before that."""
        begin_s = time.process_time()
        dist.barrier()
        computing_s, start_s = time.process_time(), time.perf_counter()
        with watched() as footprint:
            self._model = self._way.load(self._checkpoint)
            for parameter in self._model.parameters():
                weight = parameter.detach()
                (weight.to_local() if isinstance(weight, DTensor) else weight).sum()
            duration_s, computing_s = time.perf_counter() - start_s, time.process_time() - computing_s
            # Until then, what the last one broadcasts isn't done.
            dist.barrier()
        # Meeting the others before, and looking at the memory afterwards, can take as long as a load.
        times = {"duration_s": duration_s, "computing_s": computing_s, "all_computing_s": time.process_time() - begin_s}
        return {**times, "footprint": footprint}

    def check(self) -> Row:
        return loss_and_norm(self._model, self._ids, owned=self._way.owned)


# --- the case ---


class Loading(Case):
    """Each way's first model must have the loss and the gradient norm of plain transformers."""

    name = "loading"
    sources = freshness.LOADING + freshness.MESHES
    unit = "loads"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        stored = "what the checkpoint holds; bfloat16 is converted while it is loaded (default float32)"
        parser.add_argument("--stored", choices=STORED, default="float32", help=stored)

    def check(self, args: argparse.Namespace, error: Callable[[str], object]) -> None:  # noqa: ARG002
        if not sys.platform.startswith("linux"):
            error("loads are measured by what Linux says of its processes, and this isn't Linux")

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = QUICK if args.quick else WORKLOAD
        watch, records = Watch(args.limit), []
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.out) as folder:
            checkpoint = Path(folder)
            expected, held_bytes = _in_a_process(_write, workload, args.stored, checkpoint)
            files_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
            sizes = {**workload.numbers(), "stored": args.stored, "loaded": "float32"}
            result.update(workload=sizes, files_bytes=files_bytes, weights_bytes=held_bytes, page_cache="warm")
            _warm_up()
            load = partial(_load, checkpoint=checkpoint, ids=workload.tokens(), watch=watch, expected=expected)

            def write_rows() -> None:
                result["rows"] = [_row(record, records, files_bytes, held_bytes) for record in records]
                write()

            for count in (4,) if args.quick else (4, 8):
                able = []
                for way in ways(count):
                    left_out = _too_large(way, count, held_bytes)
                    records.append(Record((count, way), way.name, facts={"left_out": left_out}))
                    able += [records[-1]] if left_out is None else []
                run_rounds(able, args.repeats, watch, load, write_rows)

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        files, held = (f"{result[key] / MIB:.0f} MiB" for key in ("files_bytes", "weights_bytes"))
        return [
            f"Checkpoint: {llama.described(sizes)}, in {sizes['stored']}, {files} of files; loaded as "
            f"{sizes['loaded']}, {held}. Page cache: {result['page_cache']}.",
        ]

    def remarks(self, result: Row) -> list[str]:
        left_out = [row for row in result["rows"] if row["left_out"]]
        said = [f"Left out: {row['name']} on {row['ranks']} ranks; {row['left_out']}." for row in left_out]
        return self.busy(result) + said

    def tables(self, result: Row) -> list[Table]:
        tables = []
        for (count,), rows in grouped(result["rows"], "ranks").items():
            first, held_bytes = rows[0]["name"], rows[0]["ideal_held_bytes"]
            ideal = {"peak_bytes": held_bytes, "peak_sum_bytes": held_bytes * count}
            ideal["touched_bytes"] = rows[0]["ideal_file_bytes"]
            last = {"name": "*size ÷ ranks*", **{key: {"median": size} for key, size in ideal.items()}}
            columns = [
                Column(f"{count} ranks; memory in MiB", lambda row: row["name"], "l"),
                Column("load, s", lambda row: ranged(row.get("step_s"))),
                Column(f"÷ {first}", lambda row: _ratio(row, "ratio_time")),
                Column("peak of a rank", lambda row: _mib(row, "peak_bytes")),
                Column("all peaks", lambda row: _mib(row, "peak_sum_bytes")),
                Column(f"÷ {first}", lambda row: _ratio(row, "ratio_peak_sum"), on_page=False),
                Column("PSS of all after", lambda row: _mib(row, "proportional_sum_bytes"), on_page=False),
                Column("file pages of a rank", lambda row: _mib(row, "touched_bytes")),
            ]
            lines = [*(row for row in rows if row["samples"]), last]
            tables.append(Table(columns, lines, file=f"_{count}_ranks"))
        return tables

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['workload']['stored']}"


def _in_a_process(function: Callable[..., Row], *arguments: object) -> Row:
    """What a function gives that would leave much memory behind, which processes forked later would have too."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def _write(workload: Llama, stored: str, folder: Path) -> tuple[Row, int]:
    """An ordinary sharded checkpoint: what plain transformers computes with it, and the bytes of its weights."""
    workload.model().to(getattr(torch, stored)).save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    model = plain(folder)
    return loss_and_norm(model, workload.tokens()), sum(parameter.nbytes for parameter in model.parameters())


def _warm_up() -> None:
    """Load one layer, so that what a process imports or compiles at its first load is there in all that are forked."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(dataclasses.replace(QUICK, layers=1).config()).save_pretrained(folder)
        plain(Path(folder))


def _too_large(way: Way, ranks: int, held_bytes: int) -> str | None:
    """Why this machine can't hold all that a way may hold, in a sentence."""
    needed = held_bytes * (ranks + 1 if way.everywhere else 2) * (1 + _SPARE)
    free = psutil.virtual_memory().available
    return None if needed <= free else f"it may take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"


def _load(record: Record, checkpoint: Path, ids: torch.Tensor, watch: Watch, expected: Row) -> Sample:
    """A load in processes forked from one that has imported everything; the first one of each way is checked."""
    count, way = record.entry
    for path in checkpoint.glob("*.safetensors"):
        # So that all loads find it in the page cache.
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    with forked_ranks(Loopback(count), lambda _: LoadingRank(checkpoint, ids, way)) as ranks:
        # Again, for the ranks have only just started.
        watch.wait()
        watch.start()
        loads: list[Row] = ranks.call("load")
        foreign = watch.share(sum(load["all_computing_s"] for load in loads))
        if "loss" not in record.facts:
            checked = ranks.call("check")[0]
            check_equal(way.name, checked, "plain transformers", expected, AGREEMENT)
            record.facts.update(checked)
    figures = {"footprints": [load["footprint"] for load in loads]}
    computing_s = sum(load["computing_s"] for load in loads)
    return Sample(max(load["duration_s"] for load in loads), computing_s, foreign, figures)


# --- rows ---


def _figures(sample: Sample) -> dict[str, int]:
    footprints = sample.figures["footprints"]
    peaks = [footprint["peak_bytes"] - footprint["floor_bytes"] for footprint in footprints]
    return {
        "peak_bytes": max(peaks),
        "peak_sum_bytes": sum(peaks),
        "touched_bytes": max(footprint["peak_files_bytes"] for footprint in footprints),
        "proportional_sum_bytes": sum(footprint["proportional_bytes"] for footprint in footprints),
    }


def _row(record: Record, records: Sequence[Record], files_bytes: int, held_bytes: int) -> Row:
    count, _ = record.entry
    row = {
        "name": record.name,
        "ranks": count,
        **record.facts,
        "ideal_file_bytes": files_bytes / count,
        "ideal_held_bytes": held_bytes / count,
        "undisturbed": 0,
        "samples": [],
    }
    if not record.samples:
        return row
    figures = [_figures(sample) for sample in undisturbed(record.samples)]
    row |= record.numbers()
    row |= {name: spread([of_sample[name] for of_sample in figures]) for name in figures[0]}
    first = next(other for other in records if other.entry[0] == count)
    if first.samples and first is not record:
        rounds = undisturbed_rounds([record, first])
        peaks = [[_figures(sample)["peak_sum_bytes"] for sample in samples] for samples in rounds]
        row["ratio_time"] = spread([sample.step_s / other.step_s for sample, other in rounds])
        row["ratio_peak_sum"] = spread([peak / other for peak, other in peaks])
    return row


def _ratio(row: Row, key: str) -> str:
    return ranged(row.get(key), none="1" if "samples" in row else DASH)


def _mib(row: Row, key: str) -> str:
    return f"{row[key]['median'] / MIB:.0f}" if key in row else DASH


CASE = Loading()

if __name__ == "__main__":
    sys.exit(CASE.main())
