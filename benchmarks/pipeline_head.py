"""A heavy head on the last stage, and spread over the stages, beside PyTorch's schedules, which have it on the last.

python benchmarks/pipeline_head.py [--stages 4 8] [--micro-batches 4 8] [--segments 8] …

On two stages that compute, and on more whose computing is emulated by sleeping, as in pipeline_emulated.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pipeline
import torch
import torch.distributed as dist
from harness import freshness, llama
from harness.case import Case, at_least
from harness.rounds import Record, run_rounds, spread, undisturbed
from harness.tables import Column, Row, Table, grouped, known, ranged
from harness.watch import Watch
from network.networks import Loopback
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step
from network.serving import Step
from pipeline import PEERS_CHUNKED, Entry, Pipeline, RealTask, Task, build, is_able, row_name, together
from pipeline_emulated import (
    EMULATED,
    CuboidRuntime,
    Mixer,
    Work,
    check_agreement,
    connected,
    lasting,
    step_figures,
)
from torch import nn

from cuboid.seq1f1b.runtime.executor import SpreadHead
from cuboid.seq1f1b.runtime.pipe_collectives import PipeCollectives
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import place_stages
from cuboid.seq1f1b.schedule.partition import balance_by_flops, ends_of
from cuboid.seq1f1b.schedule.unit_costs import BACKWARD_RATIO, ModelSizes

_SEED = 20241108


@functools.cache
def _balance(task: HeadTask | HeadWork, chunks: int) -> tuple[int, ...]:
    return balance_by_flops(task.sizes, task.stages * chunks, task.length, has_head=not task.spreads_head)


@dataclass(frozen=True)
class HeadTask(RealTask):
    """A Llama whose stages really compute; its head has the operations of 1.5 layers."""

    length: int = 1024
    vocabulary: int = 6912
    spreads_head: bool = False

    def balance(self, chunks: int = 1) -> tuple[int, ...]:
        return _balance(self, chunks)


@dataclass(frozen=True)
class HeadWork(Work):
    """A task whose model has a head, of a weight for each rank that maps a token to a number: the sum of all ranks'."""

    #: Layers whose forward takes as long as the head's.
    head_layers: float = 1.5
    spreads_head: bool = False

    @property
    def sizes(self) -> ModelSizes:
        without = super().sizes
        layer_flops = without.layer_flops(self.length)[0]
        return ModelSizes(without.layers, head=round(self.head_layers * layer_flops / (2 * self.length)))

    def balance(self, chunks: int = 1) -> tuple[int, ...]:
        return _balance(self, chunks)

    def cost(self, lengths: Sequence[int], chunks: int = 1) -> Callable[[Action], float]:
        flops = super(Work, self).cost(lengths, chunks)
        stage_flops = sum(self.sizes.layer_flops(self.length)) / self.stages
        return functools.cache(lambda action: self.forward_s * flops(action) / stage_flops)

    def whole_cost(self, chunks: int = 1) -> Callable[[Action], float]:
        """The head's backward is in the last stage's backward, where PyTorch's schedules have it."""
        cost, last = self.cost((self.length,), chunks), self.stages * chunks - 1
        head_s = self.forward_s * self.head_layers * self.stages / self.layers
        moved = {Op.FORWARD: -BACKWARD_RATIO, Op.BACKWARD: BACKWARD_RATIO, Op.INPUT_GRADIENT: 1, Op.WEIGHT_GRADIENT: 1}
        return lambda action: cost(action) + (head_s * moved[action.op] if action.stage == last else 0.0)

    def mixer(self, number: int, chunks: int = 1) -> Mixer:
        is_last = number == self.stages * chunks - 1
        return HeadMixer(self, number) if is_last and not self.spreads_head else Mixer(self, number)

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return super().loss(output, wanted[..., :1])

    def head_weights(self) -> torch.Tensor:
        """``[P, W]``."""
        return torch.rand((self.stages, self.width), generator=torch.Generator().manual_seed(_SEED))

    def reference(self, chunks: int = 1) -> Row:
        return super(HeadWork, dataclasses.replace(self, spreads_head=False)).reference(chunks)


class HeadMixer(Mixer):
    """The last stage, with the whole head: hidden states ``[B, S, W]`` to ``[B, S, 1]``."""

    def __init__(self, work: HeadWork, stage: int) -> None:
        super().__init__(work, stage)
        self.shares = nn.Parameter(work.head_weights())

    def segment(self, hidden: torch.Tensor, before: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        output, sums = super().segment(hidden, before)
        return (output @ self.shares.T).sum(-1, keepdim=True), sums


class EmulatedShare:
    """A rank's share as Cuboid's interpreter takes one (:class:`cuboid.seq1f1b.runtime.executor.HeadPart`)."""

    def __init__(self, work: HeadWork, lengths: tuple[int, ...], chunks: int) -> None:
        self._work, self._ends, self._rank = work, ends_of(lengths), dist.get_rank()
        self._duration_s, self._wanted = work.cost(lengths, chunks), work.data()[1][..., 0]
        self.weight = nn.Parameter(work.head_weights()[self._rank].clone())
        #: Units between the two parts.
        self._open: dict[tuple[int, int], torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """A step."""
        self.loss = 0.0

    def buffer(self, micro_batch: int, segment: int) -> torch.Tensor:  # noqa: ARG002 -- all are cut alike
        start, stop = self._ends[segment]
        return torch.empty(1, stop - start, self._work.width)

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor) -> torch.Tensor:
        """``[1, L]``: this share's part of what the head gives."""
        unit = micro_batch, segment
        with lasting(self._duration_s(Action(Op.HEAD_FORWARD, self._rank, *unit))):
            self._open[unit] = hidden
            return hidden @ self.weight.detach()

    def backward(self, micro_batch: int, segment: int, statistics: torch.Tensor) -> torch.Tensor:
        """``[1, L, W]``; ``statistics`` are all ranks' ``[P, 1, L]``."""
        unit, (start, stop) = (micro_batch, segment), self._ends[segment]
        with lasting(self._duration_s(Action(Op.HEAD_BACKWARD, self._rank, *unit))):
            hidden, tokens = self._open.pop(unit), self._work.length * self._work.micro_batches
            missed = statistics.sum(0) - self._wanted[micro_batch : micro_batch + 1, start:stop]
            self.loss += 0.5 * missed.square().sum().item() / tokens
            gradient = missed[..., None] / tokens
            of_weight = (gradient * hidden).sum((0, 1))
            self.weight.grad = of_weight if self.weight.grad is None else self.weight.grad + of_weight
            return gradient * self.weight.detach()

    def finish(self) -> None:
        """There are no rows to give back."""


class SpreadRuntime(CuboidRuntime):
    """Cuboid's pipeline with a share of the head on every rank."""

    def __init__(self, entry: Entry, work: HeadWork) -> None:
        mesh, channels = connected(place_stages(entry.schedule, work.stages, entry.chunks))
        self._share = EmulatedShare(work, entry.lengths(work), entry.chunks)
        collectives = PipeCollectives(mesh.pipe_group, mesh.peer(mesh.placement[-1]), lambda _: None)
        super().__init__(entry, work, channels, SpreadHead(self._share, collectives), [self._share.weight])

    def step(self) -> None:
        self._share.begin()
        super().step()
        # All ranks know it.
        self.loss = self._share.loss if self.number == self.task.stages - 1 else 0.0


# --- the case ---

#: Sequences of its share that a rank may keep.
_LIMIT = 2.0
TORCH = [Entry("torch"), *(entry for entry in PEERS_CHUNKED if entry.kind == "torch")]


def contestants(
    tasks: Sequence[Task], segments: Sequence[int], chunks: Sequence[int]
) -> Iterator[tuple[Entry, Task, str]]:
    """PyTorch's schedules with the head on the last stage, and Cuboid's with both: schedule, task and name."""
    last, _ = tasks
    ours = []
    for k in segments:
        ours.append(Entry("cuboid", "zero_bubble", k, limit=_LIMIT))
        ours += [Entry("cuboid", "zero_bubble-interleaved", k, chunks=count, limit=_LIMIT) for count in chunks]
    pairs = [(entry, last) for entry in TORCH if is_able(entry, last)]
    pairs += [(entry, task) for entry in ours for task in tasks]
    yield from ((entry, task, f"{entry.name}, head {_place(task)}") for entry, task in pairs)


class HeadCase(Case):
    """Steps must have the loss and the gradient norm of each other, the emulated ones those of float64."""

    name = "pipeline_head"
    sources = freshness.SEQ1F1B + freshness.STAGES + freshness.ENGINE
    repeats, limit_s = 5, 600.0
    cores = "{cores} cores for all stages"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--stages", type=int, choices=[4, 8, 16], nargs="+", help="emulated (default 4 8)")
        parser.add_argument("--micro-batches", type=at_least(2), nargs="+", metavar="M", help="(default 4 8)")
        parser.add_argument("--segments", type=at_least(2), metavar="K", help="(default 8; on real stages 2 as well)")
        parser.add_argument("--chunks", type=int, choices=[2, 4], nargs="+", default=[2], help="of a rank (default 2)")

    def check(self, args: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        args.stages = args.stages or ([4] if args.quick else [4, 8])
        args.micro_batches = args.micro_batches or ([8] if args.quick else [4, 8])
        # Where computing is real, segments are short enough to cost more than the bubble that they spare.
        args.real_segments = [args.segments] if args.segments else ([2] if args.quick else [2, 8])
        args.segments = args.segments or (2 if args.quick else 8)

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        real = HeadTask(length=256, hidden=64, intermediate=128, vocabulary=1300) if args.quick else HeadTask()
        result.update(workload=real.numbers(), rows=[])
        with forked_ranks(Loopback(real.stages), pipeline.keep) as ranks:
            for count in args.micro_batches:
                tasks = [dataclasses.replace(real, micro_batches=count, spreads_head=it) for it in (False, True)]
                some = [
                    pipeline.prepare(ranks, entry, task, f", {count} micro-batches, head {_place(task)}")
                    for entry, task, _ in contestants(tasks, args.real_segments, args.chunks)
                ]
                pipeline.check_agreement(some)
                self._run(ranks, some, args, result, write, pipeline.idle)
        forward_s = 0.02 if args.quick else Work.forward_s
        # PyTorch's schedules need a micro-batch for each stage.
        for stages, count in ((P, M) for P, M in itertools.product(args.stages, args.micro_batches) if P <= M):
            works = [HeadWork(stages, count, forward_s=forward_s, spreads_head=spreads) for spreads in (False, True)]
            result.update(emulated=works[0].numbers())
            with forked_ranks(Loopback(stages), _keep) as ranks:
                reference = functools.cache(works[0].reference)
                some = []
                for entry, work, name in contestants(works, [args.segments], args.chunks):
                    record = Record((entry, work), name)
                    first = together(ranks.call("prepare", record.entry))
                    check_agreement(record, first, reference(entry.chunks))
                    some.append(record)
                self._run(ranks, some, args, result, write, partial(step_figures, reference))

    def _run(
        self,
        ranks: Ranks,
        records: Sequence[Record],
        args: argparse.Namespace,
        result: Row,
        write: Callable[[], None],
        figures: Callable[[Record, Sequence[Step]], Row],
    ) -> None:
        watch = Watch(args.limit)
        run_rounds(records, args.repeats, watch, partial(timed_step, ranks, watch, figures=figures))
        result["rows"] += [_row(record, records) for record in records]
        write()

    def setting(self, result: Row) -> list[str]:
        sizes, emulated = result["workload"], result["emulated"]
        return [
            f"Two stages: {llama.described(sizes)}, {sizes['dtype']}; rows of {sizes['length']} tokens.",
            f"More, emulated: {emulated['layers']} layers like Llama-2-7B's; rows of {emulated['length']} tokens; "
            f"messages of {emulated['width']} float32 numbers a token.",
            "M micro-batches of a row. The head has the operations of 1.5 layers; layers are balanced by operations, "
            "the head's among them where it is on the last stage. Loopback.",
        ]

    def remarks(self, result: Row) -> list[str]:
        emulation = (
            "Where computing is emulated, a unit sleeps for as long as its operations say. Schedules, messages and "
            "collectives are real."
        )
        return [emulation, *self.busy(result)]

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("", row_name, "l"),
            Column("head", lambda row: row["head"]),
            Column("step, s", lambda row: ranged(row["step_s"])),
            Column("÷ head on the last stage", lambda row: ranged(row["ratios"].get("last"))),
            Column("simulated", lambda row: known(row["ratio_simulated"], ".2f")),
            Column("÷ fastest of torch", lambda row: ranged(row["ratios"].get("torch"))),
            Column("idle", lambda row: f"{100 * row['idle']['median']:.1f} %"),
            Column("simulated idle", lambda row: known(row["idle_simulated"], ".1f", unit=0.01, end=" %")),
        ]
        return [
            Table(columns, rows, f"{stages} stages, M = {count}" + (f" ({EMULATED})" if rows[0]["emulated"] else ""))
            for (stages, count), rows in grouped(result["rows"], "stages", "micro_batches").items()
        ]


def _keep(_: int) -> Link:
    def built(key: tuple[Entry, HeadWork]) -> Pipeline:
        entry, work = key
        if entry.kind != "cuboid":
            return build(key)
        if work.spreads_head:
            return SpreadRuntime(entry, work)
        return CuboidRuntime(entry, work, connected(place_stages(entry.schedule, work.stages, entry.chunks))[1])

    return Link(Loopback(dist.get_world_size()), built)


def _place(task: Task) -> str:
    return "spread" if task.spreads_head else "last"


def _row(record: Record, records: Sequence[Record]) -> Row:
    entry, task = record.entry
    last = dataclasses.replace(task, spreads_head=False)
    by_entry = {other.entry: other for other in records}
    quiet, torchs = undisturbed(record.samples), [by_entry[peer, last] for peer in TORCH if is_able(peer, last)]
    fastest = min(torchs, key=lambda other: statistics.median(sample.step_s for sample in undisturbed(other.samples)))
    others = [("torch", fastest)] + ([("last", by_entry[entry, last])] if task.spreads_head else [])
    timeline = entry.chosen(task).timeline if entry.kind == "cuboid" else None
    return {
        "name": record.name,
        **dataclasses.asdict(entry),
        "stages": task.stages,
        "micro_batches": task.micro_batches,
        "emulated": task.is_emulated,
        "head": _place(task),
        "balance": list(task.balance(entry.chunks)),
        "idle": spread([sample.figures["bubble" if task.is_emulated else "idle"] for sample in quiet]),
        "simulated_s": timeline and timeline.makespan_s,
        "idle_simulated": timeline and timeline.bubble,
        "ratio_simulated": timeline and entry.chosen(last).timeline.makespan_s / timeline.makespan_s,
        **record.numbers(others),
    }


CASE = HeadCase()

if __name__ == "__main__":
    sys.exit(CASE.main())
