"""What eight ranks measure: what everyone computes, sends, saves and holds, and how long they take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from quiet import Judged, gather
from rounds import in_turn, undisturbed_sample

from three_d.cases import Case
from three_d.instruments import Collective, Meter, Saved
from three_d.places import write_pieces
from three_d.sides import Side
from three_d.watch import Watch


@dataclass
class Sample(Judged):
    """One forward and backward.

    Args:
        step_s: of each rank.
        foreign: part of the cores that other processes took.
    """

    step_s: list[float]
    foreign: float

    @property
    def slowest_s(self) -> float:
        """Of the slowest rank."""
        return max(self.step_s)


@dataclass
class Figures:
    """All about one contestant on one rank.

    Args:
        key: of the contestant.
        collectives: calls in one forward and backward.
        counted_bytes: what the contestant counted itself meanwhile, by mesh axes; None if it doesn't count.
        saved_bytes: see :class:`three_d.instruments.Saved`.
        peak_bytes: see :class:`three_d.instruments.Meter`.
        samples: by round; the same on all ranks.
        rejected: steps that were measured again.
    """

    key: str
    collectives: dict[Collective, int]
    counted_bytes: dict[str, int] | None
    saved_bytes: dict[str, int]
    peak_bytes: int
    samples: list[Sample] = field(default_factory=list)
    rejected: int = 0


def compare(
    case: Case, build: Sequence[Callable[[Case], Side]], core: int | None, repeats: int, limit_s: float, folder: Path
) -> list[Figures]:
    """Everything about one case, on one rank.

    Args:
        case: what is computed.
        build: make the contestants.
        core: to which the rank is pinned; None where it isn't.
        repeats: rounds, each with a step of every contestant.
        limit_s: how long to go on repeating steps that were disturbed.
        folder: gets what this rank computed, a file for each contestant; see :func:`outcome_path`.
    """
    sides = [each(case) for each in build]
    whole_x, whole_dy = case.tensors()
    given = [(side.local(whole_x).requires_grad_(), side.local(whole_dy)) for side in sides]
    del whole_x, whole_dy
    paths = [outcome_path(folder, case, side.key, dist.get_rank()) for side in sides]
    figures = [_examine(side, *each, path) for side, each, path in zip(sides, given, paths, strict=True)]
    gc.collect()
    watch = Watch(core, limit_s)
    for number in range(repeats):
        for side, own, tensors in in_turn(list(zip(sides, figures, given, strict=True)), number):
            own.samples.append(undisturbed_sample(partial(_time_step, side, *tensors, watch), watch, own))
    return figures


def outcome_path(folder: Path, case: Case, key: str, rank: int) -> Path:
    """Where a rank writes what a contestant computed."""
    return folder / f"{case.part}_{key}_{rank}.safetensors"


def _examine(side: Side, x: torch.Tensor, dy: torch.Tensor, path: Path) -> Figures:
    """The first steps, which warm up, and in which all but the time is measured."""
    parameters = [parameter for parameter, _ in side.parameters.values()]
    y = side.step(x, dy)
    write_pieces(side.pieces(x, y), path)
    side.clear(x)
    if side.sent_bytes is not None:
        side.sent_bytes()
    with Meter([x, dy, *parameters]) as meter:
        side.step(x, dy)
    counted = None if side.sent_bytes is None else side.sent_bytes()
    side.clear(x)
    with Saved(side.module, side.linear, side.gathered, parameters) as saved:
        y = side.forward(x)
    y.backward(dy)
    side.clear(x)
    return Figures(side.key, dict(meter.collectives), counted, saved.bytes, meter.peak_bytes)


def _time_step(side: Side, x: torch.Tensor, dy: torch.Tensor, watch: Watch) -> Sample:
    dist.barrier()
    watch.start()
    start_s = time.perf_counter()
    side.step(x, dy)
    own_s = time.perf_counter() - start_s
    foreign = watch.share()
    side.clear(x)
    each = gather([own_s, foreign])
    return Sample(each[:, 0].tolist(), each[:, 1].mean().item())
