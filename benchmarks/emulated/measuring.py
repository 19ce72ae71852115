"""Rounds of steps of all contestants in turn, each of which must give the reference's loss and gradient norm."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from network.calm import Bystanders
from network.ranks import Ranks
from network.rate import LEAD_S
from quiet import Timed
from rounds import in_turn, undisturbed_sample

from cuboid.errors import CuboidError
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.simulator import Timeline
from emulated.entries import Entry
from emulated.rank import Step
from emulated.work import Work

#: How far a float32 loss or gradient norm may be from float64, relatively; they are at 1e-6 and below.
AGREEMENT = 1e-5
#: For the longest step and what it takes to build a pipeline.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sample(Timed):
    """One step of all ranks.

    Args:
        step_s: from the start that all ranks were told to the end of the last one.
        bubble: the part of this, over all stages, in which no unit was under way.
        late: by how much units took longer than they should, as a part of that.
        computing_s: processor time of all ranks together.
        foreign: part of the machine that other processes took.
    """

    step_s: float
    bubble: float
    late: float
    computing_s: float
    foreign: float


@dataclass
class Record:
    """All about one contestant and one work.

    Args:
        error: how far loss and gradient norm were from the reference at most, relatively.
        timeline: of the last step.
        samples: by round.
        rejected: steps that were measured again.
    """

    entry: Entry
    work: Work
    error: float = 0.0
    timeline: Timeline | None = None
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0


class Measurement:
    """All contestants with one work, on ranks that keep a :class:`~emulated.rank.StageRank`.

    Args:
        ranks: as many as the work has stages.
        work: what everyone does.
        entries: who can do it.
        bystanders: tells when to measure.

    Raises:
        CuboidError: a contestant computes something else.
    """

    def __init__(self, ranks: Ranks, work: Work, entries: list[Entry], bystanders: Bystanders) -> None:
        self._ranks, self._work, self._bystanders = ranks, work, bystanders
        self._reference = work.reference()
        self.records = [Record(entry, work) for entry in entries]
        for record in self.records:
            ranks.call("build", record.entry, work, timeout_s=TIMEOUT_S)
            # The first step connects, and PyTorch tries each stage out in it.
            self._check(record, self._steps(record))

    def run_rounds(self, repeats: int, after_round: Callable[[], None]) -> None:
        """Rounds in which everyone has a step, so that what changes slowly on the machine touches all alike.

        Raises:
            CuboidError: a contestant computes something else.
        """
        for number in range(repeats):
            for record in in_turn(self.records, number):
                record.samples.append(undisturbed_sample(partial(self._sample, record), self._bystanders, record))
            after_round()

    def close(self) -> None:
        """Let go of the contestants."""
        self._ranks.call("close_all", timeout_s=TIMEOUT_S)

    def _sample(self, record: Record) -> Sample:
        self._bystanders.start()
        steps = self._steps(record)
        computing_s = sum(step.computing_s for step in steps)
        foreign = self._bystanders.share(computing_s)
        self._check(record, steps)
        record.timeline = timeline = Timeline(tuple(step.spans for step in steps), (0,) * len(steps))
        check_complete(record, timeline)
        step_s = max(step.duration_s for step in steps)
        duration_s = self._work.duration_s(record.entry.lengths(self._work))
        wanted_s = sum(duration_s(span.action) for step in steps for span in step.spans)
        busy_s = sum(timeline.busy_s)
        return Sample(step_s, 1 - busy_s / (step_s * len(steps)), busy_s / wanted_s - 1, computing_s, foreign)

    def _steps(self, record: Record) -> list[Step]:
        return self._ranks.call("step", record.entry, time.perf_counter() + LEAD_S, timeout_s=TIMEOUT_S)

    def _check(self, record: Record, steps: list[Step]) -> None:
        norm = math.sqrt(sum(step.squares for step in steps))
        check_agreement(record, (steps[-1].loss, norm), self._reference)


def check_agreement(record: Record, own: tuple[float, float], reference: tuple[float, float]) -> None:
    """Make sure that a step did the same as the reference; loss and gradient norm of both are given.

    Raises:
        CuboidError: with who didn't.
    """
    for name, ours, right in zip(("loss", "gradient norm"), own, reference, strict=True):
        error = abs(ours / right - 1)
        if not error <= AGREEMENT:
            raise CuboidError(
                f"{record.entry.name} has {name} {ours}, but without a pipeline it is {right}: it doesn't do the same"
            )
        record.error = max(record.error, error)


def check_complete(record: Record, timeline: Timeline) -> None:
    """Make sure that every unit ran forward and backward once, for else no time means anything.

    Raises:
        CuboidError: with the unit.
    """
    ran = Counter(span.action for spans in timeline.spans for span in spans)
    work = record.work
    units = product(range(work.stages), range(work.micro_batches), range(record.entry.segments))
    for action in (Action(op, *unit) for unit in units for op in (Op.FORWARD, Op.BACKWARD)):
        count = ran.pop(action, 0)
        if count != 1:
            raise CuboidError(f"{record.entry.name} ran {action} {count} times instead of once")
    if ran:
        raise CuboidError(f"{record.entry.name} ran {next(iter(ran))}, which isn't part of the step")
