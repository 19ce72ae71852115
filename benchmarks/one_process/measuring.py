"""Steps in turn on one quiet core, of trainings that were found to compute the same; and what a step consists of."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from quiet import Judged, Watch
from rounds import in_turn, undisturbed_sample
from torch.profiler import ProfilerActivity, profile

from cuboid.errors import CuboidError
from one_process.contestants import Contestant, Entry, Workload

#: How far two losses, and the gradients' difference as a part of the gradients, may be apart.
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2}
#: Steps that are profiled together.
_PROFILED_STEPS = 3
#: In a profile, what isn't any operator's: Python, mostly.
OUTSIDE = "outside of operators"


@dataclass(frozen=True)
class Sample(Judged):
    """One step.

    Args:
        step_s: from the beginning of forward to the end of AdamW.
        processor_s: what the process computed of it; on a quiet core all of it.
        foreign: part of the core that other processes took.
    """

    step_s: float
    processor_s: float
    foreign: float


@dataclass(frozen=True)
class Share:
    """What one operator takes of a step.

    Args:
        seconds: without the operators that it calls.
        calls: of it.
    """

    seconds: float
    calls: float


@dataclass
class Record:
    """All about one training.

    Args:
        loss: of the first step.
        gradients: of the first step, end to end; empty once they were compared.
        samples: by round.
        rejected: steps that were measured again.
        shares: of each operator; empty unless asked for.
    """

    entry: Entry
    loss: float
    gradients: torch.Tensor
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0
    shares: dict[str, Share] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A training without Cuboid and with it.

    Args:
        plain, ours: the two.
        loss_difference: relative, in the first step.
        gradient_difference: norm of the difference, as a part of the gradients' norm.
    """

    plain: Record
    ours: Record
    loss_difference: float
    gradient_difference: float


def compare(entries: tuple[Entry, Entry], workload: Workload, repeats: int, watch: Watch, *, profiled: bool) -> Pair:
    """Everything about two trainings.

    Args:
        entries: without Cuboid, and with it.
        workload: what is trained.
        repeats: rounds, each with a step of both.
        watch: tells when the core is quiet.
        profiled: whether to find out what a step consists of, after the rounds.

    Raises:
        CuboidError: they don't compute the same.
    """
    built = [entry.build(workload) for entry in entries]
    plain, ours = (_examine(entry, each) for entry, each in zip(entries, built, strict=True))
    pair = Pair(plain, ours, *differences(plain, ours))
    for record, each in zip((plain, ours), built, strict=True):
        record.gradients = torch.empty(0)
        each.step()
    for number in range(repeats):
        for record, each in in_turn(list(zip((plain, ours), built, strict=True)), number):
            record.samples.append(undisturbed_sample(partial(_time_step, each, watch), watch, record))
    if profiled:
        for record, each in zip((plain, ours), built, strict=True):
            record.shares = _shares(each)
    del built
    gc.collect()
    return pair


def _examine(entry: Entry, contestant: Contestant) -> Record:
    with contestant.noting_gradients() as noted:
        loss = contestant.step()
    return Record(entry, loss.item(), torch.cat(noted))


def differences(plain: Record, ours: Record) -> tuple[float, float]:
    """Relative ones of loss and gradients.

    Raises:
        CuboidError: they are too large.
    """
    names, allowed = f"{plain.entry.name} and {ours.entry.name}, {plain.entry.dtype}", AGREEMENT[plain.entry.dtype]
    if plain.gradients.shape != ours.gradients.shape:
        raise CuboidError(
            f"{names}: {plain.gradients.numel()} and {ours.gradients.numel()} elements have gradients: they don't "
            "train the same"
        )
    loss = abs(ours.loss - plain.loss) / abs(plain.loss)
    gradients = ((ours.gradients - plain.gradients).norm() / plain.gradients.norm()).item()
    for what, difference in (("losses", loss), ("gradients", gradients)):
        if not difference <= allowed:
            raise CuboidError(f"{names}: {what} are {difference:.1e} apart, more than {allowed:.0e}: they differ")
    return loss, gradients


def _time_step(contestant: Contestant, watch: Watch) -> Sample:
    # What one training leaves to be collected, the other one mustn't pay for.
    gc.collect()
    watch.start()
    start_s, processor_s = time.perf_counter(), time.process_time()
    contestant.step()
    processor_s = time.process_time() - processor_s
    return Sample(time.perf_counter() - start_s, processor_s, watch.share())


def _shares(contestant: Contestant) -> dict[str, Share]:
    """What the operators take of a step, by name, and what is left."""
    start_s = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED_STEPS):
            contestant.step()
        whole_s = (time.perf_counter() - start_s) / _PROFILED_STEPS
    shares = {
        event.key: Share(event.self_cpu_time_total / 1e6 / _PROFILED_STEPS, event.count / _PROFILED_STEPS)
        for event in profiler.key_averages()
    }
    return {**shares, OUTSIDE: Share(whole_s - sum(share.seconds for share in shares.values()), 1)}


def largest_differences(pair: Pair, count: int) -> list[tuple[str, Share, Share]]:
    """Operators whose time differs most, without Cuboid and with it."""
    names: Sequence[str] = list({**pair.plain.shares, **pair.ours.shares})
    none = Share(0.0, 0)
    both = [(name, pair.plain.shares.get(name, none), pair.ours.shares.get(name, none)) for name in names]
    return sorted(both, key=lambda each: -abs(each[2].seconds - each[1].seconds))[:count]
