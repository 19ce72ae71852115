"""How many requests ranks send to the one store that answers all of them: not more per rank where there are more."""

import heapq
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from cuboid.distributed.step_progress import StepProgress
from cuboid.errors import CuboidError, PeerLostError
from cuboid.failures import rendezvous, startup, whereabouts
from cuboid.failures.bounded_store import BoundedStore
from cuboid.failures.rendezvous import MAIN_LANE, Peers, Rendezvous
from cuboid.failures.startup import Launch, await_all_ranks
from cuboid.failures.whereabouts import Position

FEW, MANY = 64, 192


class VirtualTime:
    """The time of threads that sleep: it goes on to when the next one wakes, once all of them sleep or have ended."""

    def __init__(self, threads):
        self._now, self._awake, self._sleeping = 0.0, threads, []
        self._lock, self._numbers = threading.Lock(), itertools.count()

    def monotonic(self):
        return self._now

    def sleep(self, seconds):
        woken = threading.Event()
        with self._lock:
            heapq.heappush(self._sleeping, (self._now + seconds, next(self._numbers), woken))
            self._end_turn()
        woken.wait()

    def end(self):
        with self._lock:
            self._end_turn()

    def _end_turn(self):
        self._awake -= 1
        if not self._awake and self._sleeping:
            self._now, _, woken = heapq.heappop(self._sleeping)
            self._awake = 1
            woken.set()


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store, count):
        self._store, self._count = store, count

    def __getattr__(self, name):
        if name != "has_extended_api":
            next(self._count)
        return getattr(self._store, name)


def _on_thread_ranks(ranks, function):
    """The requests per rank of ``function(rank, open_store, clock)`` on so many threads, and what it returned."""
    clock, count, store = VirtualTime(ranks), itertools.count(), dist.HashStore()

    def bounded(_, timeout_s, size):
        return BoundedStore(lambda: CountingStore(dist.PrefixStore("counted", store), count), timeout_s, size)

    def run(rank):
        try:
            return function(rank, store, clock)
        finally:
            clock.end()

    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        for module in (rendezvous, startup):
            patch(module, "time", clock)
            patch(module, "BoundedStore", bounded)
        patch(Peers, "_listen", lambda *_: None)
        patch(Launch, "_answers", lambda *_: True)
        # Each rank's thread is its main thread, and all ranks hold a copy of a model together.
        patch(threading, "main_thread", threading.current_thread)
        patch(whereabouts, "progress_by_copy", lambda _: {tuple(range(ranks)): StepProgress()})
        with ThreadPoolExecutor(ranks) as threads:
            results = list(threads.map(run, range(ranks)))
    return next(count) / ranks, results


def _requests(function):
    """Of each of few and of many ranks."""
    return [_on_thread_ranks(ranks, lambda *where, n=ranks: function(n, *where))[0] for ranks in (FEW, MANY)]


LATE_S = 3.0


def _meet_late_ranks(ranks, rank, store, clock):
    """Half of the ranks wait for the others, which have written where they are."""
    peers = Peers(rank, ranks, store)
    if rank % 2:
        position = Position(0, {}, {}, is_comparable=True, place=1, time=1)
        peers._store.set(f"position/{rank}", json.dumps(asdict(position)))
        clock.sleep(LATE_S)
    peers.meet("a save", None, MAIN_LANE)
    assert clock.monotonic() >= LATE_S


def _one_does_not_come(ranks, rank, store, clock):
    peers = Peers(rank, ranks, store)
    peers.timeout_s = 1.0
    if rank == ranks - 1:
        return
    with pytest.raises(PeerLostError, match=rf"rank {ranks - 1} of {ranks} didn't come to a save within 1 s"):
        peers.meet("a save", None, MAIN_LANE)


def _all_fail(ranks, rank, store, clock):
    error = CuboidError("the same")
    Peers(rank, ranks, store).meet("a save", error, MAIN_LANE)
    assert (error.shared, error.rank) == (True, None)


def _all_lose_one(ranks, rank, store, clock):
    peers = Peers(rank, ranks, store)
    # Each rank is a replica.
    coordinate, topology = SimpleNamespace(data=rank), SimpleNamespace(data=ranks)
    mesh = SimpleNamespace(coordinate=coordinate, topology=topology, rank=rank, copy_ranks=[rank])
    peers.updates.begin(mesh, 3)
    outcome = Rendezvous(peers, peers._store, "step/0", "a step").hold_after_loss(RuntimeError("closed by peer"))
    assert outcome.text.startswith("another rank went away")


def _start_without_one(ranks, rank, store, clock):
    if rank == ranks - 1:
        return
    with pytest.raises(PeerLostError, match=rf"rank {ranks - 1} of {ranks} didn't come to .* within 1 s"):
        await_all_ranks(Launch(rank, ranks, "127.0.0.1", 1), timeout_s=1.0)


def _count(name):
    return _requests(globals()[name])


@pytest.mark.ci
@pytest.mark.parametrize("scene", [_meet_late_ranks, _one_does_not_come, _all_fail, _all_lose_one, _start_without_one])
def test_more_ranks_make_no_more_requests_each(pool, scene):
    ((few, many),) = pool.run(1, _count, scene.__name__)
    assert many <= 1.1 * few
