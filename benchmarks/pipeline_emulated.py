"""The pipeline on 8 and 16 stages, with computing emulated by sleeping: schedules, beside theory and other pipelines.

python benchmarks/pipeline_emulated.py [--stages 8 16] [--micro-batches 8 16] [--segments 2 4 8] …

The runtime is the real one; only a layer's computing sleeps, for a time in proportion to a real layer's operations.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from harness import freshness
from harness.case import Case, at_least
from harness.rounds import Record, check_equal, run_rounds, spread, undisturbed
from harness.tables import Column, Row, Table, grouped, known, ranged
from harness.watch import Watch
from network.networks import Loopback
from network.ranks import forked_ranks
from network.rate import Link, timed_step
from network.serving import Step, sleep_until
from pipeline import (
    PEERS_CHUNKED,
    Entry,
    Pipeline,
    Task,
    build,
    cuts,
    fastest_of_each,
    is_able,
    pipeline_row,
    row_name,
    together,
)
from torch import nn
from torch.distributed import pipelining

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.models.pipeline.training_pipeline import open_channels
from cuboid.seq1f1b.runtime.executor import Interpreter, SpreadHead
from cuboid.seq1f1b.runtime.p2p import Channel
from cuboid.seq1f1b.runtime.profiler import UnitProfiler
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import place_stages
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.simulator import Timeline, peak_bytes
from cuboid.seq1f1b.schedule.unit_costs import INPUT_GRADIENT_FREES, LayerSizes, ModelSizes

_SEED = 20240605
#: Llama-2-7B's layers (Touvron et al. 2023).
_HIDDEN, _INTERMEDIATE = 4096, 11008
#: What weights start from: near 1, so that hidden states neither grow nor shrink over the stages.
_WEIGHT, _MIX = 0.9, 0.1


@dataclass(frozen=True)
class Work(Task):
    """A task of P stages, which must divide the layers, and M micro-batches."""

    stages: int  # P, which must divide the layers
    micro_batches: int  # M
    forward_s: float = 0.32  # of a sequence on a stage: four such layers at 275 TFLOP/s; backward takes twice as long
    width: int = 4  # features of a token in the messages between stages, in float32
    length: int = 32768  # S, tokens of a sequence
    layers: int = 32  # of the whole model
    #: Each step does the same.
    learning_rate = 0.0
    is_emulated = True

    @property
    def sizes(self) -> ModelSizes:
        """The head is left out, for it would make the last stage slower than the others."""
        layer = LayerSizes.decoder(_HIDDEN, _HIDDEN, _HIDDEN, _INTERMEDIATE)
        return ModelSizes((layer,) * self.layers, head=0)

    def cost(self, lengths: Sequence[int], chunks: int = 1) -> Callable[[Action], float]:
        """Seconds of each part of a unit, in proportion to its operations; all stages are alike."""
        flops = super().cost(lengths)
        sequence_flops = super().cost((self.length,))(Action(Op.FORWARD, 0, 0, 0))
        # Equal for all stages and micro-batches, and asked for in the middle of what is timed.
        table = {
            (op, segment): self.forward_s / chunks * flops(Action(op, 0, 0, segment)) / sequence_flops
            for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
            for segment in range(len(lengths))
        }
        return lambda action: table[action.op, action.segment]

    def whole_cost(self, chunks: int = 1) -> Callable[[Action], float]:
        """:meth:`cost` of whole sequences, as peers compute them."""
        return self.cost((self.length,), chunks)

    def mixer(self, number: int, chunks: int = 1) -> Mixer:  # noqa: ARG002 -- all stages are alike
        """What a stage, of so many a rank, really computes."""
        return Mixer(self, number)

    def stage(self, number: int, chunks: int = 1) -> nn.Module:
        return WholeStage(self, number, chunks)

    def under_torch(self, number: int, chunks: int) -> pipelining.PipelineStage:
        return TimedStage(self, number, chunks)

    # All contestants of a rank share it.
    @functools.lru_cache(maxsize=1)  # noqa: B019 -- as long as the rank lives
    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the first stage and what the last one should give, ``[M, S, W]`` each."""
        generator = torch.Generator().manual_seed(_SEED)
        inputs, wanted = torch.rand((2, self.micro_batches, self.length, self.width), generator=generator)
        return inputs, wanted

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return 0.5 * (output - wanted).square().mean()

    def reference(self, chunks: int = 1) -> Row:
        """Loss and gradient norm of the step in float64, by autograd, without any pipeline."""
        hidden, wanted = (tensor.double() for tensor in self.data())
        stages = [self.mixer(stage, chunks).double() for stage in range(self.stages * chunks)]
        for stage in stages:
            hidden = stage(hidden)
        loss = self.loss(hidden, wanted)
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for stage in stages for p in stage.parameters()])
        return {"loss": loss.item(), "gradient_norm": gradients.norm().item()}

    def numbers(self) -> Row:
        return {**asdict(self), "hidden": _HIDDEN, "intermediate": _INTERMEDIATE}


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Compute inside; the rest of the time is slept."""
    end_s = time.perf_counter() + seconds
    yield
    sleep_until(end_s)


class Mixer(nn.Module):
    """What a stage really computes, with two parameters ``[W]``."""

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        noise = 0.1 * torch.rand((2, work.width), generator=torch.Generator().manual_seed(_SEED + stage))
        self.weight, self.mix = nn.Parameter(_WEIGHT + noise[0]), nn.Parameter(_MIX + noise[1])
        self._length = work.length

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[B, S, W]`` of whole sequences for the next stage."""
        return self.segment(hidden, 0.0)[0]

    def segment(self, hidden: torch.Tensor, before: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[B, L, W]`` of a segment for the next stage, and the sum of all up to here; ``before`` is
        that of earlier segments, ``[B, 1, W]``: what keys and values are in attention."""
        sums = hidden.cumsum(dim=1) + before
        return self.weight * hidden + (self.mix / self._length) * sums, sums[:, -1:]


class SegmentedStage:
    """A stage as Cuboid's interpreter takes one (:class:`cuboid.seq1f1b.runtime.executor.Stage`)."""

    hidden_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, work: Work, lengths: tuple[int, ...], stage: int, chunks: int = 1) -> None:
        self._work, self._stage = work, stage
        self._has_loss = stage == work.stages * chunks - 1 and not work.spreads_head
        self._ends = list(pairwise(accumulate(lengths, initial=0)))
        self._inputs, self._wanted = work.data()
        self._duration_s = work.cost(lengths, chunks)
        self.mixer = work.mixer(stage, chunks)
        #: By unit: what it was given, the sum before it, what came of it, and the sum up to its end.
        self._pending: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        #: Between the two parts of a backward: what the first one was given.
        self._split: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """A step. Gradients add up to those that are there."""
        #: Of the step so far, on the last stage.
        self.loss = 0.0
        #: By micro-batch: the sum of earlier segments' hidden states, and its gradient from later ones.
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}

    def message_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:  # noqa: ARG002 -- all are cut alike
        start, stop = self._ends[segment]
        return 1, stop - start, self._work.width

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The last stage computes the loss too, unless all ranks do."""
        unit = micro_batch, segment
        with lasting(self._duration_s(Action(Op.FORWARD, self._stage, *unit))):
            leaf = (self._part(self._inputs, unit) if hidden is None else hidden).detach().requires_grad_()
            before = self._before.get(micro_batch, torch.zeros(1, 1, self._work.width)).requires_grad_()
            output, sums = self.mixer.segment(leaf, before)
            self._before[micro_batch] = sums.detach()
            if self._has_loss:
                share = output.shape[1] / (self._work.length * self._work.micro_batches)
                output = self._work.loss(output, self._part(self._wanted, unit)) * share
                self.loss += output.item()
            self._pending[unit] = leaf, before, output, sums
        return None if self._has_loss else output.detach()

    def backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        unit = micro_batch, segment
        with lasting(self._duration_s(Action(Op.BACKWARD, self._stage, *unit))):
            leaf, before, output, sums = self._pending.pop(unit)
            after = self._after.get(micro_batch, torch.zeros_like(sums))
            torch.autograd.backward((output, sums), (gradient, after))
            self._after[micro_batch] = before.grad
        return None if self._stage == 0 else leaf.grad

    def input_gradient(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        unit = micro_batch, segment
        with lasting(self._duration_s(Action(Op.INPUT_GRADIENT, self._stage, *unit))):
            leaf, before, *outputs = self._pending.pop(unit)
            gradients = gradient, self._after.get(micro_batch, torch.zeros_like(outputs[1]))
            leaf_gradient, self._after[micro_batch] = torch.autograd.grad(
                outputs, (leaf, before), gradients, retain_graph=True
            )
            self._split[unit] = outputs, gradients
        return None if self._stage == 0 else leaf_gradient

    def weight_gradients(self, micro_batch: int, segments: Sequence[int]) -> None:
        durations_s = (self._duration_s(Action(Op.WEIGHT_GRADIENT, self._stage, micro_batch, k)) for k in segments)
        with lasting(sum(durations_s)):
            for segment in segments:
                outputs, gradients = self._split.pop((micro_batch, segment))
                torch.autograd.backward(outputs, gradients, inputs=list(self.mixer.parameters()))

    def _part(self, x: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
        micro_batch, segment = unit
        start, stop = self._ends[segment]
        return x[micro_batch : micro_batch + 1, start:stop]


class WholeStage(nn.Module):
    """A stage as DeepSpeed takes one: a module of hidden states ``[1, S, W]``, whose gradient autograd asks for."""

    def __init__(self, work: Work, stage: int, chunks: int = 1) -> None:
        super().__init__()
        self.mixer = work.mixer(stage, chunks)
        self._stage, self._duration_s = stage, work.whole_cost(chunks)

    def begin(self, recorder: UnitProfiler) -> None:
        """Count micro-batches anew; ``recorder`` sees each unit from now on."""
        self._recorder = recorder
        self._counts = {op: itertools.count() for op in (Op.FORWARD, Op.BACKWARD)}

    @contextmanager
    def unit(self, op: Op) -> Iterator[None]:
        """Enter for the time of the next unit; 1F1B runs micro-batches in order, forward and backward."""
        action = Action(op, self._stage, next(self._counts[op]), 0)
        with self._recorder.observe(action), lasting(self._duration_s(action)):
            yield

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Whole.apply(hidden, self.mixer.weight, self.mixer.mix, self)


class _Whole(torch.autograd.Function):
    """Forward and backward of a stage, each a unit."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, _: torch.Tensor, __: torch.Tensor, stage: WholeStage) -> torch.Tensor:
        with stage.unit(Op.FORWARD), torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            output = stage.mixer(hidden)
            ctx.stage, ctx.kept = stage, (hidden, output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, output = ctx.kept
        with ctx.stage.unit(Op.BACKWARD):
            parameters = ctx.stage.mixer.parameters()
            of_hidden, *of_parameters = torch.autograd.grad(output, (hidden, *parameters), gradient)
        return of_hidden if ctx.needs_input_grad[0] else None, *of_parameters, None


class TimedStage(pipelining.PipelineStage):
    """One of a rank's stages as torch's schedules take them, each part of whose units lasts as long as it should."""

    def __init__(self, work: Work, stage: int, chunks: int) -> None:
        self._duration_s = work.whole_cost(chunks)
        super().__init__(work.mixer(stage, chunks), stage, work.stages * chunks, torch.device("cpu"))

    def begin(self, recorder: UnitProfiler) -> None:
        self._recorder = recorder

    @contextmanager
    def _unit(self, op: Op, micro_batch: int) -> Iterator[None]:
        action = Action(op, self.stage_index, micro_batch, 0)
        with self._recorder.observe(action), lasting(self._duration_s(action)):
            yield

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._unit(Op.FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._unit(Op.BACKWARD if full_backward else Op.INPUT_GRADIENT, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._unit(Op.WEIGHT_GRADIENT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class CuboidRuntime(Pipeline):
    def __init__(
        self,
        entry: Entry,
        work: Work,
        channels: dict[tuple[int, int], Channel],
        head: SpreadHead | None = None,
        more_weights: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(work)
        chosen = entry.chosen(work)
        self._shape, self._channels, self._head = chosen.shape, channels, head
        durations_s = None if head is None else work.cost(entry.lengths(work), entry.chunks)
        self._program = lower(chosen.schedule, chosen.shape, durations_s)[self.number]
        local_stages = [stage for stage, rank in enumerate(chosen.rank_of) if rank == self.number]
        self._stages = {stage: SegmentedStage(work, entry.lengths(work), stage, entry.chunks) for stage in local_stages}
        weights = [weight for stage in self._stages.values() for weight in stage.mixer.parameters()]
        self.optimizer = torch.optim.SGD([*weights, *more_weights], lr=work.learning_rate)

    def step(self) -> None:
        for stage in self._stages.values():
            stage.begin()
        Interpreter(self._stages, self._channels, self._recorder.observe, self._head).run(self._program, self._shape)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = sum(stage.loss for stage in self._stages.values())


# --- the case ---

#: The label that everything carries.
EMULATED = "computing emulated by sleeping"
#: How far a float32 loss or gradient norm may be from float64, relatively; they are at 1e-6 and below.
AGREEMENT = 1e-5
#: Whom every contestant is compared with.
YARDSTICKS = {"own_1f1b": Entry("cuboid"), "torch": Entry("torch"), "deepspeed": Entry("deepspeed")}
#: Schedules of two stages on each rank, and the sequences of its share that a rank may keep.
_CHUNKED = [("zero_bubble-interleaved", 2.0), ("zero_bubble-interleaved", 1.5), ("zero_bubble-v", 2.0)]


def entries(segments: Sequence[int]) -> list[Entry]:
    """Everyone: Cuboid with whole sequences, each number of segments and both cuts, split backwards, and the peers."""
    most = max(segments)
    split = [Entry("cuboid", "zero_bubble", most, limit=2.0)]
    split += [Entry("cuboid", name, most, chunks=2, limit=limit) for name, limit in _CHUNKED]
    return [Entry("cuboid", "gpipe"), *YARDSTICKS.values(), *PEERS_CHUNKED, *cuts(segments), *split]


class EmulatedPipeline(Case):
    """Each step must have the loss and the gradient norm that plain autograd in float64 gives."""

    name = "pipeline_emulated"
    sources = freshness.SCHEDULES
    repeats, limit_s = 5, 600.0
    cores = "{cores} cores for all stages"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--stages", type=int, choices=[2, 4, 8, 16, 32], nargs="+", help="(default 8 16)")
        parser.add_argument("--micro-batches", type=at_least(1), nargs="+", metavar="M", help="(default 8 16)")
        parser.add_argument("--segments", type=at_least(2), nargs="+", metavar="K", help="beside 1 (default 2 4 8)")

    def check(self, args: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        args.stages = args.stages or ([4] if args.quick else [8, 16])
        args.micro_batches = args.micro_batches or ([4] if args.quick else [8, 16])
        args.segments = args.segments or ([2, 4] if args.quick else [2, 4, 8])

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        forward_s = 0.02 if args.quick else Work.forward_s
        works = {p: [Work(p, count, forward_s) for count in args.micro_batches] for p in args.stages}
        everyone = entries(args.segments)
        result.update(emulated=EMULATED, workload=works[args.stages[0]][0].numbers())
        records: list[Record] = []

        def write_rows() -> None:
            result["rows"] = [_row(record, records) for record in records]
            write()

        for stages, of_stages in works.items():
            with forked_ranks(Loopback(stages), _keep) as ranks:
                for work in of_stages:
                    reference = functools.cache(work.reference)
                    able = [Record((entry, work), entry.name) for entry in everyone if is_able(entry, work)]
                    for record in able:
                        # The first step connects, and PyTorch tries each stage out in it.
                        first = together(ranks.call("prepare", record.entry))
                        check_agreement(record, first, reference(record.entry[0].chunks))
                    records += able
                    watch = Watch(args.limit)
                    step = partial(timed_step, ranks, watch, figures=partial(step_figures, reference))
                    run_rounds(able, args.repeats, watch, step)
                    write_rows()
                    ranks.call("discard")

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        return [
            f"Emulated: {sizes['layers']} layers like Llama-2-7B's (hidden {sizes['hidden']}, MLP "
            f"{sizes['intermediate']}), sequences of {sizes['length']} tokens; the forward of a whole sequence sleeps "
            f"for {1e3 * sizes['forward_s']:g} ms on each stage.",
            f"Messages: {sizes['width']} float32 numbers a token; loopback.",
        ]

    def remarks(self, result: Row) -> list[str]:
        said = [
            "Computing is emulated: a unit sleeps for as long as its operations say. Schedules, messages and "
            "everything else between two units are real.",
            *self.busy(result),
        ]
        return [*said, "On loopback messages cost hardly any time."]

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("", _name, "l"),
            Column("step, s", lambda row: ranged(row["step_s"])),
            Column("simulated, s", lambda row: known(row["simulated_s"], ".2f"), on_page=False),
            Column("÷ 1F1B", lambda row: ranged(row["ratios"].get("own_1f1b"))),
            Column("simulated", lambda row: known(row["ratio_simulated"], ".2f")),
            Column("theory", lambda row: known(row["ratio_theory"], ".2f"), on_page=False),
            Column("÷ torch", lambda row: ranged(row["ratios"].get("torch")), on_page=False),
            Column("÷ DeepSpeed", lambda row: ranged(row["ratios"].get("deepspeed")), on_page=False),
            Column("bubble", lambda row: f"{100 * row['bubble']['median']:.1f} %"),
            Column("simulated bubble", lambda row: known(row["bubble_simulated"], ".1f", unit=0.01, end=" %")),
            Column(
                "theory of the bubble",
                lambda row: known(row["bubble_theory"], ".1f", unit=0.01, end=" %"),
                on_page=False,
            ),
            Column("sequences in flight", lambda row: f"{max(row['sequences_in_flight']):.2f}"),
        ]
        tables = []
        for (stages, count), rows in grouped(result["rows"], "stages", "micro_batches").items():
            title, file = f"{stages} stages, M = {count} ({EMULATED})", f"_{stages}_stages_m{count}"
            tables.append(Table(columns, rows, title, file=file, page_rows=fastest_of_each(rows)))
        return tables


def _keep(_: int) -> Link:
    """What a rank keeps: whatever is built."""

    def built(key: tuple[Entry, Work]) -> Pipeline:
        entry, work = key
        if entry.kind != "cuboid":
            return build(key)
        return CuboidRuntime(entry, work, connected(place_stages(entry.schedule, work.stages, entry.chunks))[1])

    return Link(Loopback(dist.get_world_size()), built)


@functools.cache
def connected(placement: tuple[int, ...]) -> tuple[Mesh, dict[tuple[int, int], Channel]]:
    """This rank's view of a pipeline, and its channels, which contestants share."""
    mesh = Mesh(MeshShape(), pipe=dist.get_world_size(), placement=placement)
    mesh.connect()
    return mesh, open_channels(mesh, torch.device("cpu"))


def step_figures(reference: Callable[[int], Row], record: Record, steps: Sequence[Step]) -> Row:
    """Check a step, and see how it went; ``reference`` tells what is right for so many stages a rank."""
    squares, loss = (sum(step.figures[key] for step in steps) for key in ("squares", "loss"))
    check_agreement(record, {"loss": loss, "gradient_norm": math.sqrt(squares)}, reference(record.entry[0].chunks))
    timeline = Timeline(tuple(step.figures["spans"] for step in steps), (0,) * len(steps))
    record.facts["timeline"] = timeline
    step_s = max(step.duration_s for step in steps)
    # The part of the step, over all stages, in which no unit was under way.
    return {"bubble": 1 - sum(timeline.busy_s) / (step_s * len(steps))}


def check_agreement(record: Record, actual: Row, reference: Row) -> None:
    """Make sure that a step did the same as the reference."""
    error = check_equal(record.name, actual, "plain autograd without a pipeline", reference, AGREEMENT)
    record.error = max(record.error, error)


def _row(record: Record, records: Sequence[Record]) -> Row:
    entry, work = record.entry
    row = pipeline_row(record, records, YARDSTICKS)
    quiet, lengths = undisturbed(record.samples), row["lengths"]
    ran = [[span.action for span in spans] for spans in record.facts["timeline"].spans]

    def kept(action: Action) -> float:
        return lengths[action.segment] / work.length / entry.chunks

    return {
        **row,
        "error": record.error,
        "bubble": spread([sample.figures["bubble"] for sample in quiet]),
        "sequences_in_flight": [peak_bytes(actions, kept, INPUT_GRADIENT_FREES) for actions in ran],
        "sequences_in_flight_simulated": list(entry.chosen(work).timeline.peak_bytes) if entry.is_known else None,
    }


def _name(row: Row) -> str:
    if row["kind"] != "cuboid" or row.get("limit"):
        return row_name(row)
    return f"`{row['schedule']}`" + (f", {row_name(row)}" if row["segments"] > 1 else "")


CASE = EmulatedPipeline()

if __name__ == "__main__":
    sys.exit(CASE.main())
