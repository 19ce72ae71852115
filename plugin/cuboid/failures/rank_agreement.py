"""How ranks fail together: a failure on any rank is raised on all of them."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_stack
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.failures.exit_messages import place_in_script
from cuboid.failures.rank_failure import described, is_lost
from cuboid.failures.rendezvous import MAIN_LANE, Peers
from cuboid.failures.startup import report_early_failure

T = TypeVar("T")

#: The current thread's lane: background threads number their meetings separately from the main thread.
_lane: ContextVar[str] = ContextVar("cuboid_agreement_lane", default=MAIN_LANE)


def run_on_all_ranks(action: Callable[[], T], mesh: Mesh | None = None, *, what: str) -> T:
    """Run an action on every rank; if it fails on any, raise on all. Collective over the world.

    Every exception counts. Where it arose, a :class:`CuboidError` is raised as it is and any other is chained to a
    :class:`RankError` (an ``OSError`` to a :class:`CheckpointError`) by ``from``; on the other ranks an error with the
    same message is raised, whose ``rank`` is where it arose. ``KeyboardInterrupt`` and ``SystemExit`` are re-raised
    where they arose. Calls may be nested.

    Before there is a process group the ranks can't meet: a failure is raised where it arises, and reported to the
    others when they start the group (:mod:`cuboid.failures.startup`).

    Args:
        action: what to do.
        mesh: this rank's mesh, if there is one yet. A mesh whose world is a single rank meets nobody.
        what: name of the action in messages, in words, the same on all ranks.

    Raises:
        CuboidError: the first rank's failure. Also where the ranks make different calls, or one of them ended or
            didn't come within the timeout of the process group.
    """
    try:
        result = action()
    except BaseException as error:
        if not getattr(error, "shared", False):
            _report(error, mesh, what)
        raise
    peers = _peers(mesh)
    if peers is not None:
        peers.meet(what, None, _lane.get())
    return result


def raise_on_all_ranks(error: Exception | None, mesh: Mesh, *, what: str = "a check") -> None:
    """If ``error`` isn't None on some rank, raise on all of them; collective over the world.

    Raises:
        CuboidError: the first rank's failure, as :func:`run_on_all_ranks` raises it.
    """

    def check() -> None:
        if error is not None:
            raise error

    run_on_all_ranks(check, mesh, what=what)


def gather_objects(item: T, mesh: Mesh, *, what: str = "exchange of objects") -> list[T]:
    """Gather one object from each rank, in rank order; collective over the world.

    Raises:
        CuboidError: as :func:`run_on_all_ranks`, if another rank doesn't call this.
    """
    # The collective alone would wait for a missing rank without naming it.
    peers = _peers(mesh)
    if peers is not None:
        peers.meet(what, None, _lane.get())
    if mesh.topology.world_size == 1:
        return [item]
    # Makes the group if nothing has yet.
    mesh.connect_host()
    items: list[Any] = [None] * mesh.topology.world_size
    dist.all_gather_object(items, item, group=mesh.host_group)
    return items


class StepGuard:
    """A context around a part of a training step without rank agreement, whose failures reach the other ranks too.

    It costs nothing without a failure. A rank that fails writes the reason to the store before it raises, and ranks
    that then lose the connection to it raise the same error: with gloo when its process ends, with NCCL once they have
    read the reason and aborted their groups. A timeout bounds the wait in any case. If a process ended without a
    report, the error names it and what the others waited for; likewise if one enters it alone. ``what`` names that part
    in messages.
    """

    def __init__(self, mesh: Mesh, what: str) -> None:
        self._mesh, self._what = mesh, what

    def __enter__(self) -> None:
        # Every step comes here: call nothing.
        progress = self._mesh.progress
        progress.begun += 1
        progress.running = self._what
        progress.is_inside = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._mesh.progress.is_inside = False
        if error is None:
            # Every step comes here: read what is known, and call nothing.
            group = dist.group.WORLD
            peers = None if group is None else _peers_by_group.get(group)
            if peers is not None and peers.aborted_for is not None:
                peer_error = peers.aborted_for.error()
                peer_error.cuboid_told = True  # type: ignore[attr-defined]
                raise peer_error
            return
        self._mesh.progress.is_broken = True
        # StopIteration, the end of the data, is not a failure.
        if not isinstance(error, Exception) or isinstance(error, StopIteration) or hasattr(error, "cuboid_told"):
            return
        peers = _peers(self._mesh)
        raised = error if peers is None else peers.failed_in_step(self._what, error)
        raised.cuboid_told = True  # type: ignore[attr-defined]
        if raised is not error:
            raise raised from error


def lost_rank_error(error: BaseException, what: str) -> BaseException:
    """What to raise for an exception of a collective ``what`` that no guard surrounds: why a rank was lost, if one was.

    That is what the lost rank reported, or that it ended; any other exception is returned as it is. Waits a few
    seconds, and reports the loss to the other ranks.
    """
    peers = _known_peers()
    if peers is None or not isinstance(error, Exception) or hasattr(error, "cuboid_told") or not is_lost(error):
        return error
    raised = peers.failed_in_step(what, error)
    raised.cuboid_told = True  # type: ignore[attr-defined]
    return raised


def naming_lost_ranks(function: Callable[..., T], what: str) -> Callable[..., T]:
    """A function that calls collectives of another package; ``what`` names it in messages.

    Of a rank that is lost meanwhile it raises what :class:`StepGuard` would.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            raised = lost_rank_error(error, f"{what}{place_in_script(walk_stack(sys._getframe()))}")
            if raised is error:
                raise
            raise raised from error
        peers = _known_peers()
        if peers is not None and peers.aborted_for is not None:
            # The result may be that of an aborted collective.
            raise peers.aborted_for.error()
        return result

    return call


def report_before_group(error: Exception, what: str) -> None:
    """Report a failure to the other ranks if there is no process group yet; once for each exception.

    A :class:`CuboidError` that not all ranks are known to raise gets this rank as its ``rank``, so that this rank
    prints it: the others may never learn of it. ``what`` names the action that failed.
    """
    if dist.is_initialized() or hasattr(error, "cuboid_told"):
        return
    error.cuboid_told = True  # type: ignore[attr-defined]
    is_everywhere = report_early_failure(f"{what}: {described(error)}")
    rank = os.environ.get("RANK", "")
    if isinstance(error, CuboidError) and not is_everywhere and rank.isdigit():
        error.arising_on(int(rank))


def begin_update(mesh: Mesh, number: int) -> None:
    """Record that the replicas' gradients are about to be reduced for the ``number``-th optimizer step, from 1.

    Doesn't wait. From the records, a replica that has left training sees that others are still training, and those see
    which replica left before them.
    """
    peers = _peers(mesh) if mesh.topology.data > 1 else None
    if peers is not None:
        peers.updates.begin(mesh, number)


def end_together() -> None:
    """End this rank's part in what all ranks do together, before its process group is destroyed; collective.

    The store may end with rank 0's process, which therefore waits until no other rank asks it anything.
    """
    peers = _peers(None)
    if peers is not None:
        peers.leave()


@contextmanager
def agreement_lane(name: str) -> Iterator[None]:
    """Inside, meetings are numbered separately: for a background thread that all ranks have."""
    token = _lane.set(name)
    try:
        yield
    finally:
        _lane.reset(token)


def _report(error: BaseException, mesh: Mesh | None, what: str) -> None:
    """Report to the other ranks, and raise the error that all of them raise; return if that is ``error``."""
    peers = _peers(mesh)
    if peers is not None:
        peers.meet(what, error, _lane.get())
        if isinstance(error, CuboidError) and not error.shared:
            # The store is gone, and the others can't have learned of it.
            error.arising_on(peers.rank)
    elif mesh is None and isinstance(error, Exception):
        report_before_group(error, what)


#: By default process group; an entry lives as long as its group.
_peers_by_group: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()
_peers_lock = threading.Lock()


def _known_peers() -> Peers | None:
    """The ranks that this one has met already."""
    group = dist.group.WORLD
    return None if group is None else _peers_by_group.get(group)


def _peers(mesh: Mesh | None) -> Peers | None:
    """The ranks to meet; None where there are no others, or no process group yet."""
    alone = mesh is not None and (mesh.topology.world_size == 1 or mesh.in_threads)
    if alone or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    with _peers_lock:
        if group not in _peers_by_group:
            _peers_by_group[group] = Peers(dist.get_rank(), dist.get_world_size(), _get_default_store())
        return _peers_by_group[group]
