"""What two ranks measure: whether all contestants compute the same, what they keep, and how long they take."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import Contestant, Entry
from quiet import QUIET, Timed, Watch, gather, pin
from rounds import in_turn, undisturbed_sample
from workload import Workload

from cuboid.errors import CuboidError
from cuboid.seq1f1b.runtime.memory import LiveActivations
from cuboid.seq1f1b.schedule.simulator import Timeline

#: How far losses and gradient norms of two contestants may be apart, relatively.
AGREEMENT = 1e-5


@dataclass
class Sample(Timed):
    """One step.

    Args:
        step_s: of the slower rank.
        idle: for each rank the part of the step in which it didn't compute.
        foreign: part of the ranks' cores that other processes took.
    """

    step_s: float
    idle: list[float]
    foreign: float


@dataclass
class Record:
    """All about one contestant with one number of micro-batches.

    Args:
        loss, gradient_norm: of the first step.
        peak_bytes: of live activations, for each stage.
        timeline: of one step, measured by the pipeline itself.
        samples: by round.
        rejected: steps that were measured again.
    """

    entry: Entry
    micro_batches: int
    loss: float
    gradient_norm: float
    peak_bytes: list[int]
    timeline: Timeline | None
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0


def measure(
    workload: Workload, contestants: list[Entry], micro_batches: list[int], repeats: int, limit_s: float, traces: Path
) -> list[Record]:
    """Everything, on one rank of two; the same records on both, but for the timelines, which are on the first.

    Args:
        workload: what is trained.
        contestants: who takes part; the first one is the yardstick of losses and norms.
        micro_batches: M, one after another.
        repeats: rounds, each with a step of every contestant.
        limit_s: how long to go on repeating steps that were disturbed.
        traces: folder for what pipelines write of themselves.
    """
    core = pin(dist.get_rank())
    records = []
    for count in micro_batches:
        watch = Watch(core, limit_s)
        ready = [_prepare(entry, workload, count, traces, watch) for entry in contestants]
        built, own = [each for each, _ in ready], [record for _, record in ready]
        check_agreement(own)
        _run_rounds(built, own, repeats, watch)
        for each in built:
            each.close()
        del ready, built
        gc.collect()
        records += own
    return records


def examine(workload: Workload, contestants: list[Entry], micro_batches: int, traces: Path) -> list[Record]:
    """What doesn't depend on time, on one rank of any number; otherwise as :func:`measure`."""
    records = []
    for entry in contestants:
        contestant, record = _prepare(entry, workload, micro_batches, traces, Watch(None, 0))
        contestant.close()
        records.append(record)
    check_agreement(records)
    return records


def _prepare(
    entry: Entry, workload: Workload, micro_batches: int, traces: Path, watch: Watch
) -> tuple[Contestant, Record]:
    """Build a contestant and have its first steps, which warm up, and in which all but the usual time is measured."""
    while True:
        contestant = entry.build(workload, micro_batches, traces)
        loss, norm, peaks = _examine(contestant)
        watch.wait()
        watch.start()
        contestant.step()
        foreign = gather([watch.share()]).mean()
        if not contestant.records_itself or foreign <= QUIET or watch.is_over():
            return contestant, Record(entry, micro_batches, loss, norm, peaks, contestant.timeline())
        # It records one step of its life only.
        contestant.close()


def _examine(contestant: Contestant) -> tuple[float, float, list[int]]:
    """Loss, gradient norm, and each stage's peak of live activations in the contestant's first step."""
    parameters = [p for group in contestant.optimizer.param_groups for p in group["params"]]
    squares = torch.zeros((), dtype=torch.float64)

    def note(*_: object) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                squares.add_(parameter.grad.double().square().sum())

    hook = contestant.optimizer.register_step_pre_hook(note)
    with LiveActivations(parameters, contestant.pool) as live:
        loss = contestant.step()
    hook.remove()
    each = gather([0.0 if loss is None else loss.item(), squares.item(), live.peak_bytes])
    return each[-1, 0].item(), each[:, 1].sum().sqrt().item(), [int(peak) for peak in each[:, 2].tolist()]


def check_agreement(records: list[Record]) -> None:
    """Make sure that all did the same work.

    Raises:
        CuboidError: a loss or a gradient norm isn't the first one's.
    """
    first = records[0]
    for record in records[1:]:
        for name in ("loss", "gradient_norm"):
            one, other = getattr(first, name), getattr(record, name)
            if not abs(one - other) <= AGREEMENT * abs(one):
                raise CuboidError(
                    f"{record.entry.name} has {name} {other}, but {first.entry.name} has {one}: they don't do the same"
                )


def _run_rounds(built: list[Contestant], records: list[Record], repeats: int, watch: Watch) -> None:
    """Rounds in which everyone has a step, so that what changes slowly on the machine touches all alike."""
    for number in range(repeats):
        for contestant, record in in_turn(list(zip(built, records, strict=True)), number):
            record.samples.append(undisturbed_sample(partial(_time_step, contestant, watch), watch, record))


def _time_step(contestant: Contestant, watch: Watch) -> Sample:
    dist.barrier()
    watch.start()
    start_s, computing_s = time.perf_counter(), time.thread_time()
    contestant.step()
    # A thread that waits for a message sleeps, so its own clock stands still.
    computed_s, own_s = time.thread_time() - computing_s, time.perf_counter() - start_s
    foreign = watch.share()
    each = gather([own_s, computed_s, foreign])
    step_s = each[:, 0].max().item()
    return Sample(step_s, [1 - busy_s / step_s for busy_s in each[:, 1].tolist()], each[:, 2].mean().item())
