"""Measures when each action of a step ran, on one clock for all stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cuboid.seq1f1b.schedule.actions import Action

_PINGS = 8


class UnitProfiler:
    """Records the start and the end of each computation of one step on this rank.

    On CUDA, where the host runs ahead, times come from events on the stream, which are read after the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: list[Action] = []
        self._host_s: list[tuple[float, float]] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(device))
            torch.cuda.synchronize(device)
        # The stream has just reached the origin event, so the host's time now is nearly the event's.
        self._origin_s = time.perf_counter()

    @contextmanager
    def observe(self, action: Action) -> Iterator[None]:
        """Context manager around an action's computation."""
        self._actions.append(action)
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._host_s.append((start_s, time.perf_counter()))
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._events.append((start, end))

    def times_s(self) -> tuple[list[Action], list[tuple[float, float]]]:
        """Return the actions in order, and the start and end of each on this process's ``time.perf_counter`` clock."""
        if self._device.type != "cuda":
            return self._actions, self._host_s
        torch.cuda.synchronize(self._device)
        return self._actions, [(self._read_s(start), self._read_s(end)) for start, end in self._events]

    def _read_s(self, event: torch.cuda.Event) -> float:
        return self._origin_s + self._origin.elapsed_time(event) / 1e3


@dataclass(frozen=True)
class GatheredTimes:
    """Times of all ranks of a group on one clock.

    Attributes:
        ranks: for each rank, the start and the end of each of its actions, in seconds on the first rank's clock.
        clock_error_s: times of different ranks are compared to this precision at worst.
    """

    ranks: list[list[tuple[float, float]]]
    clock_error_s: float


def gather_times(times_s: list[tuple[float, float]], group: dist.ProcessGroup, device: torch.device) -> GatheredTimes:
    """Return every rank's times on the clock of the group's first rank; every rank returns the same.

    Collective over the group; all ranks must pass equally many times.
    """
    offset_s, error_s = _clock_offset(group, device)
    times = torch.tensor(times_s, dtype=torch.float64, device=device).view(-1, 2) - offset_s
    mine = torch.cat((times.flatten(), torch.tensor([error_s], dtype=torch.float64, device=device)))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    ranks = [[(start, end) for start, end in rank[:-1].view(-1, 2).tolist()] for rank in gathered]
    # Two ranks' clocks are compared by way of the first one's, so that their errors add up.
    return GatheredTimes(ranks, sum(sorted(rank[-1].item() for rank in gathered)[-2:]))


def _clock_offset(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return this process's clock minus that of the group's first rank, and by how much that is wrong at most.

    The first rank asks each other rank for its time, and assumes that the reply was made halfway between the request
    and the arrival of the reply. Of several exchanges, the quickest is the most accurate (Cristian, 1989).
    """
    first, *others = dist.get_process_group_ranks(group)
    offset_and_error_s = torch.zeros(2, dtype=torch.float64, device=device)
    for other in others:
        if dist.get_rank() == first:
            offset_and_error_s.copy_(torch.tensor(_ask(other, group, device), dtype=torch.float64))
            dist.send(offset_and_error_s, other, group=group)
        elif dist.get_rank() == other:
            _answer(first, group, device)
            dist.recv(offset_and_error_s, first, group=group)
    if dist.get_rank() == first:
        return 0.0, 0.0
    offset_s, error_s = offset_and_error_s.tolist()
    return offset_s, error_s


def _ask(other: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    quickest_s, offset_s = float("inf"), 0.0
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_PINGS):
        asked_s = time.perf_counter()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        peer_s, answered_s = message.item(), time.perf_counter()
        if answered_s - asked_s < quickest_s:
            quickest_s, offset_s = answered_s - asked_s, peer_s - (asked_s + answered_s) / 2
    return offset_s, quickest_s / 2


def _answer(first: int, group: dist.ProcessGroup, device: torch.device) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_PINGS):
        dist.recv(message, first, group=group)
        message.item()  # on CUDA, recv doesn't block the host: wait until the request has arrived
        message.fill_(time.perf_counter())
        dist.send(message, first, group=group)
