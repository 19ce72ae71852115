"""Rounds of steps on all meshes in turn, each on a quiet machine, and what must be true before they count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from quiet import Timed
from rounds import in_turn, undisturbed_sample

from cuboid.errors import CuboidError
from network.calm import Bystanders
from network.layer_rank import Step
from network.networks import Network
from network.ranks import Ranks
from network.rate import LEAD_S, verify_rate

#: How far a float32 layer may be from float64, relatively; it is at 1e-5 and below.
AGREEMENT = 1e-4
#: For one step of the slowest mesh.
TIMEOUT_S = 900.0
#: Steps on links without a limit.
_FLOOR_STEPS = 3


@dataclass(frozen=True)
class Sample(Timed):
    """One step of all ranks.

    Args:
        step_s: from the start that all ranks were told to the end of the last one.
        computing_s: processor time of all ranks together.
        counted_bytes: that a rank sent, by Cuboid's counter; the mean of the ranks.
        interface_bytes: likewise by the interfaces; None on loopback.
        foreign: part of the machine that other processes took.
        waited_s: for messages, of the rank that waited longest; None where that isn't measured.
    """

    step_s: float
    computing_s: float
    counted_bytes: float
    interface_bytes: float | None
    foreign: float
    waited_s: float | None = None


@dataclass
class Record:
    """All about one mesh.

    Args:
        mesh: as asked for, ``"auto"`` too.
        shape: what it is.
        error: of the rank that is farthest from float64.
        calls: collectives of a step, by axes.
        floor: samples on links without a limit; empty on loopback, where all samples are that.
        samples: by round.
        rejected: steps that were measured again.
    """

    mesh: str
    shape: str
    error: float
    calls: dict[str, int] = field(default_factory=dict)
    floor: list[Sample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0


def prepare(ranks: Ranks, meshes: Iterable[str]) -> list[Record]:
    """Build the layer on every mesh and compare it with float64.

    Raises:
        CuboidError: a mesh computes something else.
    """
    records = []
    for mesh in meshes:
        answers = ranks.call("prepare", mesh, timeout_s=TIMEOUT_S)
        record = Record(mesh, answers[0][0], max(error for _, error in answers))
        if not record.error <= AGREEMENT:
            raise CuboidError(f"mesh {record.shape} is {record.error:.1e} away from float64: it doesn't do the same")
        records.append(record)
    return records


def run_rounds(
    ranks: Ranks,
    records: list[Record],
    repeats: int,
    bystanders: Bystanders,
    into: Callable[[Record], list[Sample]],
    after_round: Callable[[], None] = lambda: None,
) -> None:
    """Rounds in which every mesh has a step, so that what changes slowly on the machine touches all alike.

    Args:
        ranks: who keep a :class:`~network.layer_rank.LayerRank`.
        records: of the meshes.
        repeats: number of rounds.
        bystanders: tells when to measure.
        into: where a record's samples go.
        after_round: called when a round is complete.
    """
    for number in range(repeats):
        for record in in_turn(records, number):
            into(record).append(undisturbed_sample(partial(_step, ranks, record, bystanders), bystanders, record))
        after_round()


def limit_rate(
    network: Network, ranks: Ranks, records: list[Record], rate_mbit: float, repeats: int, bystanders: Bystanders
) -> float:
    """Measure what the processors take alone, with steps on links without a limit; then set the rate.

    Returns:
        The rate that was found, in Mbit/s.
    """
    run_rounds(ranks, records, min(_FLOOR_STEPS, repeats), bystanders, lambda record: record.floor)
    network.set_rate(rate_mbit)
    return verify_rate(network, ranks)


def _step(ranks: Ranks, record: Record, bystanders: Bystanders) -> Sample:
    bystanders.start()
    steps: list[Step] = ranks.call("step", record.mesh, time.perf_counter() + LEAD_S, timeout_s=TIMEOUT_S)
    computing_s = sum(step.computing_s for step in steps)
    foreign = bystanders.share(computing_s)
    record.calls = steps[0].calls
    carried = [step.interface_bytes for step in steps if step.interface_bytes is not None]
    waited = [step.waited_s for step in steps if step.waited_s is not None]
    counted = sum(step.counted_bytes for step in steps) / len(steps)
    return Sample(
        step_s=max(step.duration_s for step in steps),
        computing_s=computing_s,
        counted_bytes=counted,
        interface_bytes=sum(carried) / len(steps) if carried else None,
        foreign=foreign,
        waited_s=max(waited, default=None),
    )
