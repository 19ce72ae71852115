"""Step times, bubbles and memory of Seq1F1B beside two other pipelines, for the same model on two cores.

python benchmarks/pipeline.py [--micro-batches 2 4] [--segments 1 2 4 8] …
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# DeepSpeed looks for this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, PipelineModule
from harness import freshness, llama
from harness.case import Case, at_least
from harness.llama import Llama
from harness.rounds import Record, check_equal, run_rounds, undisturbed
from harness.tables import DASH, MIB, Column, Row, Table, grouped, known, ranged
from harness.watch import Watch, pin
from network.networks import Loopback
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step
from network.serving import Contestant, Step
from torch import nn
from torch.distributed import pipelining
from transformers import LlamaForCausalLM

import cuboid
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.stages.model_costs import model_sizes
from cuboid.seq1f1b.runtime.memory import LiveActivations, MeteredPool
from cuboid.seq1f1b.runtime.profiler import UnitProfiler
from cuboid.seq1f1b.schedule import choice
from cuboid.seq1f1b.schedule.actions import Action
from cuboid.seq1f1b.schedule.partition import cut_sequence, ends_of, even_cut, segment_cost
from cuboid.seq1f1b.schedule.simulator import Span
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes, unit_flops
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_SEED = 20240605
_PEERS = {"deepspeed": "DeepSpeed PipelineEngine", "torch": "torch.distributed.pipelining 1F1B"}
#: torch's schedules of two stages on each rank.
TORCH: dict[str, Any] = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved zero bubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}


# --- what is done ---


class Task:
    """A step of one pipeline: P stages, M micro-batches of one sequence of S tokens each. Hashable.

    ``stage`` gives a stage, of so many a rank, as peers take one; ``data`` what the first one is given and what the
    last one should give, by micro-batch and the same every time; ``loss`` the mean of a micro-batch; ``sizes`` what the
    model multiplies. ``spreads_head`` says whether every rank has a share of the model's head.
    """

    spreads_head = False

    def balance(self, chunks: int = 1) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.layers // (self.stages * chunks),) * (self.stages * chunks)

    def cost(self, lengths: Sequence[int], chunks: int = 1) -> Callable[[Action], float]:
        """Of each unit of so many stages a rank, in seconds or in any unit of time; by default its operations."""
        head_ranks = self.stages if self.spreads_head else 0
        return unit_flops(self.sizes, self.balance(chunks), tuple(lengths), head_ranks=head_ranks)

    def under_torch(self, number: int, chunks: int) -> pipelining.PipelineStage:
        """A stage as torch's schedules take one."""
        return pipelining.PipelineStage(self.stage(number, chunks), number, self.stages * chunks, torch.device("cpu"))


@dataclass(frozen=True)
class RealTask(Llama, Task):
    """A Llama whose stages really compute; all is in float32."""

    length: int = 2048
    hidden: int = 320
    intermediate: int = 864
    heads: int = 4
    key_value_heads: int | None = 2
    #: Bytes for tokens: with so small a head, all stages have the same work, as the theory assumes.
    vocabulary: int = 256
    stages: int = 2
    micro_batches: int = 2
    learning_rate: float = 1e-4
    is_emulated = False  # or stages record their units themselves, and each step is to be checked

    @property
    def sizes(self) -> ModelSizes:
        return model_sizes(self.config())

    def stage(self, number: int, chunks: int = 1) -> nn.Module:
        return PlainStage(self.model(), number, self.balance(chunks))

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(self.vocabulary, (self.micro_batches, self.length), generator=generator)
        return ids, nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORE_INDEX)


class PlainStage(nn.Module):
    """A stage as users of the peers write one, of Hugging Face's own layers: from ids ``[B, S]`` on the first stage or
    hidden states ``[B, S, H]`` to hidden states, or logits ``[B, S, V]`` on the last."""

    def __init__(self, model: LlamaForCausalLM, stage: int, balance: Sequence[int]) -> None:
        super().__init__()
        first, end = ends_of(balance)[stage]
        self.layers = model.model.layers[first:end]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.head = nn.Sequential(model.model.norm, model.lm_head) if end == len(model.model.layers) else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        cosine_and_sine = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=cosine_and_sine)
        return hidden if self.head is None else self.head(hidden)


# --- who does it ---


@dataclass(frozen=True)
class Entry:
    """Which pipeline takes part."""

    kind: str  # "cuboid", "deepspeed" or "torch"
    schedule: str = "1f1b"  # a name in :data:`~cuboid.seq1f1b.schedule.choice.NAMES`, or one that the peer's has
    segments: int = 1  # k; 1 for "gpipe" and "1f1b"
    partition: str = "flops"  # where sequences are cut, "flops" or "even"
    chunks: int = 1  # v, stages on each rank
    limit: float | None = None  # the most sequences of its share that a rank may keep, where the schedule asks for it

    @property
    def name(self) -> str:
        if self.kind != "cuboid":
            return _PEERS[self.kind] + ("" if self.chunks == 1 else f" {self.schedule}")
        segments = f", k={self.segments}" if self.schedule not in ("gpipe", "1f1b") else ""
        kept = f", v={self.chunks}, kept {self.limit:g}" if self.limit else ""
        return f"Cuboid {self.schedule}{segments}{kept}" + (f", {self.partition} cut" if self.segments > 1 else "")

    @property
    def is_known(self) -> bool:
        """Whether Cuboid has such a schedule too, by which it can be simulated."""
        return self.kind == "cuboid" or self.chunks == 1

    def lengths(self, task: Task) -> tuple[int, ...]:
        if self.partition == "even":
            return even_cut(task.length, self.segments)
        return cut_sequence(task.length, self.segments, cost=segment_cost(task.sizes))

    def theory(self, task: Task) -> float:
        """The bubble of equal units: (P − 1)/(kM + P − 1), for GPipe and 1F1B with k = 1; split backwards need none."""
        others = 0 if self.limit else task.stages - 1
        return others / (self.segments * task.micro_batches + others)

    def chosen(self, task: Task) -> choice.ChosenSchedule:
        """The schedule, and the step as it would be with nothing but the units' times."""
        lengths, limit = self.lengths(task), self.limit and choice.MemoryLimit(sequences=self.limit)

        def costs(rank_of: tuple[int, ...]) -> choice.PlacedCosts:
            duration_s = task.cost(lengths, self.chunks)
            return choice.placed_costs(duration_s, lambda action: lengths[action.segment], rank_of, self.segments)

        ends = task.stages, task.micro_batches, self.segments
        request = choice.Request(*ends, costs, limit, self.chunks, spreads_head=task.spreads_head)
        return choice.choose_schedule(self.schedule, request)


#: The peers' schedules of two stages on each rank.
PEERS_CHUNKED = [Entry("torch", name, chunks=2) for name in TORCH] + [Entry("deepspeed", "DualPipeV", chunks=2)]


def is_able(entry: Entry, task: Task) -> bool:
    """Whether there are enough micro-batches for a peer's schedule, and layers for all stages."""
    any_number = entry.kind == "cuboid" or entry == Entry("deepspeed")
    needed = 1 if any_number else task.stages * (2 if entry.schedule == "DualPipeV" else 1)
    return task.micro_batches >= needed and task.layers % (task.stages * entry.chunks) == 0


def cuts(segments: Sequence[int]) -> list[Entry]:
    """Cuboid with each number of segments and both cuts."""
    return [
        Entry("cuboid", "seq1f1b", k, cut) for k in segments for cut in (("flops", "even") if k > 1 else ("flops",))
    ]


def together(first: Sequence[Row]) -> Row:
    """Loss, gradient norm and each rank's peak, of all ranks; the last stage has the loss."""
    loss, squares = (sum(row[key] for row in first) for key in ("loss", "squares"))
    return {"loss": loss, "gradient_norm": math.sqrt(squares), "peak_bytes": [row["peak_bytes"] for row in first]}


class Pipeline(Contestant):
    """A stage of one pipeline, the optimizer of its weights, and the pool of its key/value stores, if any."""

    optimizer: torch.optim.Optimizer
    pool: MeteredPool | None = None
    loss = 0.0
    #: Stages of this rank that record their units.
    _recording: Sequence[Any] = ()
    _squares = 0.0

    def __init__(self, task: Task, stage_numbers: Sequence[int] | None = None, chunks: int = 1) -> None:
        self.task, self.number = task, dist.get_rank()
        #: This rank's stages.
        self.stage_numbers = [self.number] if stage_numbers is None else stage_numbers
        self.is_last = task.stages * chunks - 1 in self.stage_numbers

    def first(self) -> Row:
        """A step, in which all but the time is measured: loss, squares of gradients, peak of live activations."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        def note(*_: object) -> None:
            gradients = (p.grad for p in parameters if p.grad is not None)
            self._squares = sum(gradient.double().square().sum().item() for gradient in gradients)

        hook = self.optimizer.register_step_pre_hook(note)
        self.begin()
        with LiveActivations(parameters, self.pool) as live:
            self.step()
        if not self.task.is_emulated:
            # It would take time that counts.
            hook.remove()
        return {"loss": self.loss, "squares": self._squares, "peak_bytes": live.peak_bytes}

    def begin(self) -> None:
        """Record units anew, where stages do."""
        if self.task.is_emulated:
            self._recorder = UnitProfiler(torch.device("cpu"))
            for stage in self._recording:
                stage.begin(self._recorder)

    def figures(self) -> Row:
        """Loss, sum of the gradients' squares and units, where each step is to be checked."""
        if not self.task.is_emulated:
            return {}
        spans = tuple(Span(action, *times_s) for action, times_s in zip(*self._recorder.times_s(), strict=True))
        return {"loss": self.loss, "squares": self._squares, "spans": spans}


class TorchPipeline(Pipeline):
    """One stage on each rank, or two under one of torch's schedules for that."""

    def __init__(self, entry: Entry, task: Task) -> None:
        number, total = dist.get_rank(), task.stages * entry.chunks
        second = total - 1 - number if entry.schedule in ("ZBV", "DualPipeV") else task.stages + number
        super().__init__(task, [number, second][: entry.chunks], entry.chunks)
        stages = [task.under_torch(stage, entry.chunks) for stage in self.stage_numbers]
        self._recording = stages if task.is_emulated else ()
        kind = pipelining.Schedule1F1B if entry.chunks == 1 else TORCH[entry.schedule]
        self._schedule = kind(stages[0] if entry.chunks == 1 else stages, task.micro_batches, loss_fn=task.loss)
        self._inputs, self._wanted = task.data()
        modules = nn.ModuleList(stage.submod for stage in stages)
        self.optimizer = torch.optim.SGD(modules.parameters(), lr=task.learning_rate)

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        inputs = [self._inputs] if 0 in self.stage_numbers else []
        asked: Row = {"target": self._wanted, "losses": losses} if self.is_last else {}
        self._schedule.step(*inputs, **asked, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = torch.stack(losses).mean().item() if self.is_last else 0.0


class _UnderDeepSpeed(Pipeline):
    """What DeepSpeed's engine and Cuboid's share."""

    def _config(self) -> Row:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.task.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": self.task.learning_rate}},
            "gradient_clipping": 0.0,  # it would clip at 1 by default
            "steps_per_print": 10**9,
        }

    def _start(self, module: nn.Module, batches: Iterator[Any], config: Row) -> None:
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
        self._batches = batches
        self.optimizer = self.engine.optimizer

    def _micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The task's batch over and over, row by row."""
        return itertools.cycle(zip(*(rows.split(1) for rows in self.task.data()), strict=True))

    def step(self) -> None:
        loss: torch.Tensor = self.engine.train_batch(self._batches)
        self.loss = loss.item() if self.is_last else 0.0

    def close(self) -> None:
        self.engine.destroy()
        super().close()


class DeepSpeedPipeline(_UnderDeepSpeed):
    """1F1B, or DualPipeV with two stages a rank."""

    def __init__(self, task: Task, chunks: int = 1) -> None:
        number, total = dist.get_rank(), task.stages * chunks
        super().__init__(task, [number, total - 1 - number][:chunks], chunks)
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and point-to-point messages don't use it
        deepspeed.init_distributed()
        stages = [task.stage(stage, chunks) for stage in range(total)]
        self._recording = [stages[stage] for stage in self.stage_numbers] if task.is_emulated else []
        kind = PipelineModule if chunks == 1 else DualPipeVModule
        module = kind(stages, num_stages=task.stages, loss_fn=task.loss, partition_method="uniform")
        self._start(module, self._micro_batches(), self._config())


class CuboidPipeline(_UnderDeepSpeed):
    """Cuboid as users have it: given the whole model, which it cuts."""

    def __init__(self, entry: Entry, task: RealTask) -> None:
        super().__init__(task)
        pipeline = {"engine": "seq1f1b", "stages": task.stages, "stage_balance": list(task.balance(entry.chunks))}
        pipeline |= {"segments": entry.segments, "partition": entry.partition, "schedule": entry.schedule}
        if entry.limit:
            pipeline |= {"chunks": entry.chunks, "memory_limit": entry.limit}
        if task.spreads_head:
            pipeline["head"] = "spread"
        config = {**self._config(), "pipeline": pipeline}
        batches = ({"input_ids": ids, "shift_labels": labels} for ids, labels in self._micro_batches())
        self._start(cuboid.shard(task.model(), config), batches, config)
        self.pool = MeteredPool()
        self.engine.pipeline.pool = self.pool


# --- how they are shown ---


def row_name(row: Row) -> str:
    """A peer, or Cuboid's cut, for tables."""
    if row["kind"] != "cuboid":
        peer = {"torch": "`torch.distributed.pipelining`", "deepspeed": "DeepSpeed `PipelineEngine`"}[row["kind"]]
        return peer + ("" if row.get("chunks", 1) == 1 else f", {row['schedule']}")
    cut = f"k = {row['segments']}" + (f", {row['partition']}" if row["segments"] > 1 else "")
    if not row.get("limit"):
        return cut
    return f"`{row['schedule']}`, {cut}, v = {row['chunks']}, at most {row['limit']:g} kept"


# --- the case ---

#: How far losses and gradient norms of two contestants may be apart, relatively.
AGREEMENT = 1e-5
#: For the peaks of memory, where more stages than cores do no harm.
_MANY_STAGES = 4
#: Split backwards: schedules, segments, and stages on each rank.
_SPLIT = [*(("zero_bubble", k, 1) for k in (2, 4, 8)), *(("zero_bubble-v", k, 2) for k in (2, 4))]
#: Whom every contestant is compared with.
YARDSTICKS = {"torch": Entry("torch"), "deepspeed": Entry("deepspeed"), "own_1f1b": Entry("cuboid", "seq1f1b")}


class PipelineCase(Case):
    """Losses and gradient norms of all first steps must agree before anything is timed."""

    name = "pipeline"
    sources = freshness.SEQ1F1B + freshness.STAGES + freshness.ENGINE

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        # torch's 1F1B refuses fewer micro-batches than stages.
        parser.add_argument("--micro-batches", type=at_least(2), nargs="+", default=[2, 4], metavar="M")
        parser.add_argument("--segments", type=at_least(1), nargs="+", default=[1, 2, 4, 8], metavar="K")

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        task = RealTask(length=256, hidden=64, intermediate=128) if args.quick else RealTask()
        split = [Entry("cuboid", name, k, chunks=v, limit=2.0) for name, k, v in _SPLIT if k <= max(args.segments)]
        entries = [Entry("torch"), Entry("deepspeed"), *PEERS_CHUNKED, *cuts(args.segments), *split]
        result.update(workload=task.numbers(), memory=[])

        records: list[Record] = []
        with forked_ranks(Loopback(task.stages), keep) as ranks:
            for count in args.micro_batches:
                step = dataclasses.replace(task, micro_batches=count)
                watch = Watch(args.limit)
                ready = [prepare(ranks, entry, step) for entry in entries if is_able(entry, step)]
                check_agreement(ready)
                records += ready
                run_rounds(ready, args.repeats, watch, partial(timed_step, ranks, watch, figures=idle))
                ranks.call("discard")
                result["rows"] = [_row(record, records) for record in records]
                write()
        many = dataclasses.replace(task, stages=_MANY_STAGES, micro_batches=_MANY_STAGES)
        kept: list[Record] = []
        with forked_ranks(Loopback(many.stages), keep) as ranks:
            for entry in (entry for entry in entries if is_able(entry, many)):
                kept.append(prepare(ranks, entry, many))
                ranks.call("discard")
                gc.collect()
        check_agreement(kept)
        result["memory"] = [_memory_row(record) for record in kept]

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        model = f"Model: {llama.described(sizes)}, {sizes['dtype']}; S = {sizes['length']} tokens"
        return [f"{model}, one row in each micro-batch."]

    def tables(self, result: Row) -> list[Table]:
        by_count = grouped(result["rows"], "micro_batches")
        return [*(_step_table(rows, *count) for count, rows in by_count.items()), _memory_table(result["memory"])]


# --- measuring ---


def keep(_: int) -> Link:
    """What a rank keeps, with a core of its own."""
    pin(dist.get_rank())
    return Link(Loopback(dist.get_world_size()), build)


def build(key: tuple[Entry, RealTask]) -> Pipeline:
    """Set up a contestant for a task. All ranks must call."""
    entry, task = key
    if entry.kind == "cuboid":
        return CuboidPipeline(entry, task)
    return DeepSpeedPipeline(task, entry.chunks) if entry.kind == "deepspeed" else TorchPipeline(entry, task)


def prepare(ranks: Ranks, entry: Entry, task: RealTask, more: str = "") -> Record:
    """Build a contestant, with ``more`` in its name, and have its first step."""
    return Record((entry, task), entry.name + more, facts=together(ranks.call("prepare", (entry, task))))


def idle(_: Record, steps: Sequence[Step]) -> Row:
    """The part of the step in which ranks didn't compute."""
    step_s = max(step.duration_s for step in steps)
    return {"idle": statistics.fmean(1 - step.thread_s / step_s for step in steps)}


def check_agreement(records: Sequence[Record]) -> None:
    """Refuse whose loss or gradient norm isn't the first one's."""
    first = records[0]
    expected = {key: first.facts[key] for key in ("loss", "gradient_norm")}
    for record in records[1:]:
        check_equal(record.name, record.facts, first.name, expected, AGREEMENT)


def _row(record: Record, records: Sequence[Record]) -> Row:
    return {
        **record.facts,
        "bubble": statistics.median(sample.figures["idle"] for sample in undisturbed(record.samples)),
        **pipeline_row(record, records, YARDSTICKS),
    }


def _memory_row(record: Record) -> Row:
    entry, task = record.entry
    return {
        **dataclasses.asdict(entry),
        "peak_bytes": record.facts["peak_bytes"],
        "sequences_in_flight": list(entry.chosen(task).timeline.peak_bytes) if entry.is_known else None,
    }


# --- what the emulated case shares ---


def pipeline_row(record: Record, records: Sequence[Record], yardsticks: Mapping[str, Entry]) -> Row:
    """What samples, theory and simulator say of a contestant; ``own_1f1b`` of the yardsticks is Cuboid's 1F1B."""
    (entry, task), baseline = record.entry, yardsticks["own_1f1b"]
    by_entry = {other.entry: other for other in records}
    others = {key: by_entry[other, task] for key, other in yardsticks.items() if (other, task) in by_entry}
    # Schedules that only peers have aren't simulated.
    timeline = entry.chosen(task).timeline if entry.is_known else None
    return {
        "name": entry.name,
        **dataclasses.asdict(entry),
        "stages": task.stages,
        "micro_batches": task.micro_batches,
        "lengths": list(entry.lengths(task)),
        "simulated_s": timeline and timeline.makespan_s,
        "bubble_theory": timeline and entry.theory(task),
        "bubble_simulated": timeline and timeline.bubble,
        "ratio_theory": timeline and (1 - entry.theory(task)) / (1 - baseline.theory(task)),
        "ratio_simulated": timeline and baseline.chosen(task).timeline.makespan_s / timeline.makespan_s,
        **record.numbers(others.items()),
    }


# --- tables ---


def _step_table(rows: Sequence[Row], count: int) -> Table:
    def ratio(row: Row, key: str) -> str:
        return "1" if row["name"] == YARDSTICKS[key].name else ranged(row["ratios"].get(key))

    columns = [
        Column("", row_name, "l"),
        Column("step, s", lambda row: ranged(row["step_s"])),
        Column("÷ torch", lambda row: ratio(row, "torch")),
        Column("÷ DeepSpeed", lambda row: ratio(row, "deepspeed"), on_page=False),
        Column("÷ k = 1", lambda row: ratio(row, "own_1f1b"), on_page=False),
        Column("÷ k = 1, simulated", lambda row: known(row["ratio_simulated"], ".2f")),
        Column("÷ k = 1, theory", lambda row: known(row["ratio_theory"], ".2f"), on_page=False),
        Column("bubble", lambda row: _percent(row["bubble"])),
        Column("simulated bubble", lambda row: _percent(row["bubble_simulated"])),
        Column("theory of the bubble", lambda row: _percent(row["bubble_theory"]), on_page=False),
    ]
    return Table(columns, rows, part=f"steps, M = {count}", file=f"_m{count}", page_rows=fastest_of_each(rows))


def fastest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Of each kind of schedule the fastest row, of segments of equal cost each number."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] != "cuboid":
            kind = (row["kind"], row["chunks"])
        elif (row["schedule"], row["partition"]) == ("seq1f1b", "flops"):
            kind = ("seq1f1b", row["segments"])
        else:
            kind = (row["schedule"], row["partition"])
        if kind not in fastest or row["step_s"]["median"] < fastest[kind]["step_s"]["median"]:
            fastest[kind] = row
    return [row for row in rows if any(row is kept for kept in fastest.values())]


def _percent(share: float | None) -> str:
    return known(share, ".1f", unit=0.01, end=" %")


def _memory_table(rows: Sequence[Row]) -> Table:
    unsegmented = next((row for row in rows if row["kind"] == "cuboid" and row["segments"] == 1), None)

    def largest(row: Row, key: str) -> str:
        return DASH if unsegmented is None or row[key] is None else f"{max(row[key]) / max(unsegmented[key]):.2f}"

    stages = range(len(rows[0]["peak_bytes"]) if rows else 0)
    columns = [
        Column("MiB", row_name, "l"),
        *(
            Column(f"stage {n}", lambda row, n=n: f"{row['peak_bytes'][n] / MIB:.0f}", on_page=n in (0, stages[-1]))
            for n in stages
        ),
        Column("largest ÷ k = 1", lambda row: f"**{largest(row, 'peak_bytes')}**"),
        Column("by tokens in flight", lambda row: largest(row, "sequences_in_flight")),
    ]
    shown = [row for row in rows if row["partition"] != "even"]
    return Table(columns, rows, part="memory", file="_memory", page_rows=shown)


CASE = PipelineCase()

if __name__ == "__main__":
    sys.exit(CASE.main())
