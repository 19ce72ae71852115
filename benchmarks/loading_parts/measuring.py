"""Rounds of loads, each in processes of its own, and what must be true before they count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from network.calm import Bystanders
from network.networks import Loopback
from network.ranks import forked_ranks
from quiet import Judged
from rounds import in_turn, undisturbed_sample

from cuboid.errors import CuboidError
from loading_parts.checkpoint import LoadingWorkload, warm, weights_bytes
from loading_parts.footprint import Footprint
from loading_parts.loaders import Way, ways
from loading_parts.rank import Load, LoadingRank, PlainRank

#: How far losses and gradient norms may be apart, relatively.
AGREEMENT = 1e-4
TIMEOUT_S = 900.0
#: What must stay free of the machine's memory, as a part of what a way needs.
_SPARE = 0.15


@dataclass(frozen=True)
class Sample(Judged):
    """One load by all ranks.

    Args:
        load_s: of the slowest rank.
        computing_s: processor time of all ranks together.
        footprints: of the ranks.
        foreign: part of the machine that other processes took.
    """

    load_s: float
    computing_s: float
    footprints: list[Footprint]
    foreign: float


@dataclass
class Record:
    """All about one way on so many ranks.

    Args:
        loss, gradient_norm: of the model that the first load gave.
        left_out: why it wasn't measured, if it wasn't.
        samples: by round.
        rejected: loads that were measured again.
    """

    ranks: int
    way: Way
    loss: float | None = None
    gradient_norm: float | None = None
    left_out: str | None = None
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0


def plain(workload: LoadingWorkload, checkpoint: Path) -> tuple[float, float]:
    """Loss and gradient norm that every way must give, of plain transformers in one process."""
    with forked_ranks(Loopback(1), lambda _: PlainRank(workload, checkpoint), timeout_s=TIMEOUT_S) as ranks:
        (found,) = ranks.call("check", timeout_s=TIMEOUT_S)
    return found


def measure(
    workload: LoadingWorkload,
    checkpoint: Path,
    rank_counts: list[int],
    repeats: int,
    bystanders: Bystanders,
    after_round: Callable[[list[Record]], None],
) -> list[Record]:
    """All ways on each number of ranks, in turn.

    Raises:
        CuboidError: a way loaded something else than plain transformers.
    """
    expected = plain(workload, checkpoint)
    records: list[Record] = []
    for count in rank_counts:
        own = [Record(count, way) for way in ways(count).values()]
        records += own
        for number in range(repeats):
            for record in in_turn(own, number):
                record.left_out = record.left_out or _too_large(record, workload)
                if record.left_out is None:
                    load = partial(_load, record, workload, checkpoint, bystanders, expected)
                    record.samples.append(undisturbed_sample(load, bystanders, record))
            after_round(records)
    return records


def _too_large(record: Record, workload: LoadingWorkload) -> str | None:
    """Why this machine can't hold all that a way may hold, in a sentence."""
    needed = weights_bytes(workload) * (record.ranks + 1 if record.way.everywhere else 2) * (1 + _SPARE)
    free = psutil.virtual_memory().available
    if needed <= free:
        return None
    return f"it may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


def _load(
    record: Record, workload: LoadingWorkload, checkpoint: Path, bystanders: Bystanders, expected: tuple[float, float]
) -> Sample:
    def build(_: int) -> LoadingRank:
        return LoadingRank(workload, checkpoint, record.way.name)

    warm(checkpoint)
    with forked_ranks(Loopback(record.ranks), build, timeout_s=TIMEOUT_S) as ranks:
        # Again, for the ranks have only just started.
        bystanders.wait()
        bystanders.start()
        loads: list[Load] = ranks.call("load", timeout_s=TIMEOUT_S)
        computing_s = sum(load.computing_s for load in loads)
        foreign = bystanders.share(sum(load.all_computing_s for load in loads))
        if record.loss is None:
            found = ranks.call("check", timeout_s=TIMEOUT_S)[0]
            check_agreement(record.way.name, found, expected)
            record.loss, record.gradient_norm = found
    return Sample(max(load.duration_s for load in loads), computing_s, [load.footprint for load in loads], foreign)


def check_agreement(name: str, found: tuple[float, float], expected: tuple[float, float]) -> None:
    """Make sure that the right model was loaded.

    Raises:
        CuboidError: its loss or gradient norm isn't that of plain transformers.
    """
    for what, own, other in zip(("loss", "gradient norm"), found, expected, strict=True):
        if not abs(own - other) <= AGREEMENT * abs(other):
            raise CuboidError(f"{name} has {what} {own}, but plain transformers has {other}: it didn't load the same")
