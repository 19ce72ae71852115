"""Ranks that fail together: every exception, in whatever order the ranks come, and calls that don't match."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError, ConfigError, CuboidError, PeerLostError, RankError
from cuboid.failures import rank_agreement, rendezvous
from cuboid.failures.rank_agreement import (
    StepGuard,
    agreement_lane,
    end_together,
    gather_objects,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from cuboid.verify.workers.pool import WorkerError
from fresh_ranks import endings_of

TIMEOUT_S = 60.0


def _mesh():
    mesh = Mesh(MeshShape(1, 2, 1))
    mesh.connect_host()
    return mesh


def _raises(error):
    raise error


def _tell(event):
    dist.distributed_c10d._get_default_store().set(event, "")


def _await(event):
    """Until another rank tells of it."""
    dist.distributed_c10d._get_default_store().wait([event], timedelta(seconds=TIMEOUT_S))


def _outcome(action, mesh, **kwargs):
    """What a call ended with on this rank: the class, the words, the rank, and the class that it was raised from."""
    try:
        return run_on_all_ranks(action, mesh, **{"what": action.__qualname__, **kwargs})
    except BaseException as error:
        return type(error), str(error), getattr(error, "rank", None), type(error.__cause__)


# --- every exception -----------------------------------------------------------------------------------------------

ERRORS = [
    ConfigError("a key"),
    CheckpointError("a file"),
    RuntimeError("in a loader"),
    MemoryError(),
    KeyError("x"),
    StopIteration(),
    FileNotFoundError(2, "No such file", "model"),
]


def _every_exception():
    mesh, seen = _mesh(), []
    for number, error in enumerate(ERRORS):
        failing = number % 2
        fails = mesh.rank == failing
        seen.append((failing, _outcome(lambda e=error, f=fails: _raises(e) if f else 7, mesh, what="work")))
        # The next call isn't one behind.
        assert _outcome(lambda: number, mesh, what=f"call {number}") == number  # noqa: B023
    return seen


def test_every_exception_on_one_rank_is_raised_on_all_and_the_next_call_is_in_step(pool):
    by_rank = pool.run(2, _every_exception, timeout_s=TIMEOUT_S)
    expected = [
        (ConfigError, "a key", ConfigError),
        (CheckpointError, "a file", CheckpointError),
        (RankError, "work: RuntimeError: in a loader", RuntimeError),
        (RankError, "work: MemoryError", MemoryError),
        (RankError, "work: KeyError: 'x'", KeyError),
        (RankError, "work: StopIteration", StopIteration),
        (CheckpointError, "model: No such file", FileNotFoundError),
    ]
    for rank, seen in enumerate(by_rank):
        for (failing, (kind, text, origin, cause)), (wanted, words, original) in zip(seen, expected, strict=True):
            assert (kind, text, origin) == (wanted, words, failing)
            where_it_arose = rank == failing and original is not wanted
            assert cause is (original if where_it_arose else type(None))


def _alike_and_interrupted():
    mesh = _mesh()
    alike = _outcome(lambda: _raises(ConfigError("the same")), mesh)
    interrupted = _outcome(lambda: _raises(KeyboardInterrupt()) if mesh.rank else None, mesh, what="work")
    ended = _outcome(lambda: _raises(SystemExit(3)) if mesh.rank else None, mesh, what="work")
    try:
        raise_on_all_ranks(CheckpointError("mine") if mesh.rank == 0 else None, mesh)
        raised = None
    except CheckpointError as error:
        raised = (str(error), error.rank)
    return alike, interrupted, ended, raised, gather_objects(mesh.rank, mesh)


def test_what_all_fail_with_has_no_rank_and_interrupts_go_on_where_they_arose(pool):
    for rank, (alike, interrupted, ended, raised, gathered) in enumerate(
        pool.run(2, _alike_and_interrupted, timeout_s=TIMEOUT_S)
    ):
        assert alike == (ConfigError, "the same", None, type(None))
        told = "work: was stopped by"
        assert interrupted[:3] == ((RankError, f"{told} KeyboardInterrupt", 1), (KeyboardInterrupt, "", None))[rank]
        assert ended[:3] == ((RankError, f"{told} SystemExit: 3", 1), (SystemExit, "3", None))[rank]
        assert raised == ("mine", 0)
        assert gathered == [0, 1]


def _gather_before_there_are_groups():
    mesh = Mesh(MeshShape(1, 2, 1))
    return gather_objects(mesh.rank, mesh), gather_objects("again", mesh)


def test_objects_are_gathered_from_all_ranks_whose_groups_are_not_made_yet(pool):
    assert pool.run(2, _gather_before_there_are_groups, timeout_s=TIMEOUT_S) == [([0, 1], ["again", "again"])] * 2


# --- nested calls --------------------------------------------------------------------------------------------------


def _nested():
    mesh = _mesh()

    def outer(fails_before):
        if fails_before and mesh.rank == 1:
            raise ValueError("between")
        inner = run_on_all_ranks(lambda: mesh.rank, mesh, what="inner")
        assert gather_objects(inner, mesh) == [0, 1]
        run_on_all_ranks(lambda: _raises(OSError("late")) if mesh.rank == 0 else None, mesh, what="inner too")

    seen = [_outcome(lambda n=fails: outer(n), mesh, what="outer") for fails in (True, False, True)]
    with agreement_lane("another thread"):
        seen.append(_outcome(lambda: "done", mesh))
    return [*seen, _outcome(lambda: "done", mesh)]


def test_a_rank_that_fails_outside_of_what_the_others_are_in_ends_them_too(pool):
    for seen in pool.run(2, _nested, timeout_s=TIMEOUT_S):
        between = (RankError, "outer: ValueError: between", 1)
        assert [failure[:3] for failure in seen[:3]] == [between, (CheckpointError, "late", 0), between]
        assert seen[3:] == ["done", "done"]


# --- calls that don't match, and ranks that don't come ------------------------------------------------------------


def _one_behind():
    mesh = _mesh()
    first = _outcome(lambda: 1, mesh, what="load" if mesh.rank == 0 else "save")
    return first, _outcome(lambda: 2, mesh, what="go on")


def test_ranks_that_make_different_calls_are_told_so(pool):
    for first, second in pool.run(2, _one_behind, timeout_s=TIMEOUT_S):
        assert first[0] is RankError
        assert "another rank is in" in first[1]
        assert second == 2


def _one_ends():
    mesh = _mesh()
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    if mesh.rank == 1:
        os._exit(9)
    try:
        run_on_all_ranks(lambda: None, mesh, what="a save")
    except PeerLostError as error:
        raise CuboidError(f"told: {error}") from error


def test_a_rank_that_ended_is_named(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _one_ends, timeout_s=TIMEOUT_S)
    # The pool has seen it end before the other rank does.
    assert caught.value.kind == "Died"


def _one_does_not_come():
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=2)
    # Without groups, to whose making all ranks would have to come in that time.
    mesh = Mesh(MeshShape(1, 2, 1))
    if mesh.rank == 1:
        _await("given up")
    outcome = _outcome(lambda: None, mesh, what="a save")
    if mesh.rank == 0:
        _tell("given up")
    return outcome


def test_a_rank_that_does_not_come_is_named_when_the_groups_timeout_is_over(pool):
    for outcome in pool.run(2, _one_does_not_come, timeout_s=TIMEOUT_S):
        assert outcome[0] is PeerLostError
        assert outcome[1].startswith("rank 1 of 2 didn't come to a save within 2 s")


# --- a rank that ends before it has decided on the outcome ---------------------------------------------------------


def _end_without_a_word():
    _tell("ended")
    os.kill(os.getpid(), signal.SIGKILL)


def _arrive_and_tell(self, arrive=rendezvous.Rendezvous._arrive):
    count = arrive(self)
    _tell("arrived")
    return count


def _mesh_on_two_machines(ranks, timeout_s):
    """A mesh in a process that ends by itself, after a first meeting; rank 1's is on another machine."""
    if os.environ["RANK"] == "1":
        rendezvous.host_identity = lambda _: "another machine"
    return _mesh_on_one_machine(ranks, timeout_s)


def _mesh_on_one_machine(ranks, timeout_s):
    rendezvous._LEAVE_S = 0.1
    dist.init_process_group("gloo")
    mesh = Mesh(MeshShape(1, ranks, 1))
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    # Only now, so that a slow start isn't taken for a rank that is lost.
    rank_agreement._peers(mesh).timeout_s = timeout_s
    return mesh


def _meet_one_that_ends(make_mesh, arrives, timeout_s):
    """Rank 1 ends without a decision: as the first to fail, or as the last to arrive."""
    mesh = make_mesh(2, timeout_s)
    if mesh.rank == 0:
        rendezvous.Rendezvous._arrive = _arrive_and_tell
        if arrives == "first":
            _await("ended")
        run_on_all_ranks(lambda: None, mesh, what="a save")
        return run_on_all_ranks(lambda: None, mesh, what="a load")
    if arrives == "first":
        rendezvous.Rendezvous._decide_failure = lambda _: _end_without_a_word()
        return run_on_all_ranks(lambda: _raises(ValueError("boom")), mesh, what="a save")
    _await("arrived")
    rendezvous.Rendezvous._decide = lambda *_: _end_without_a_word()
    return run_on_all_ranks(lambda: None, mesh, what="a save")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make_mesh", "arrives", "timeout_s", "kind", "text"),
    [
        (_mesh_on_one_machine, "first", 60, RankError, "a save: ValueError: boom"),
        (_mesh_on_one_machine, "last", 60, PeerLostError, "rank 1 ended while the others waited for it in a save"),
        # It isn't seen that it ended. All had come to the save, and it is missing at the load.
        (_mesh_on_two_machines, "last", 1.5, PeerLostError, "rank 1 of 2 didn't come to a load within 1.5 s"),
    ],
    ids=["the first to fail", "the last to arrive", "the last to arrive, on another machine"],
)
def test_a_rank_that_ends_before_it_decides_is_named_by_those_that_wait(make_mesh, arrives, timeout_s, kind, text):
    survivor, killed = endings_of(2, _meet_one_that_ends, make_mesh, arrives, timeout_s, timeout_s=TIMEOUT_S)
    assert killed is None
    assert (survivor.kind, survivor.rank) == (kind.__name__, 1)
    assert survivor.text.startswith(text)


def _fail_with_one_that_ends():
    """Of three ranks, rank 1 fails first in a step and ends, on another machine; rank 2 is at work."""
    mesh = _mesh_on_two_machines(3, 1.5)
    if mesh.rank == 2:
        return _await("decided")
    if mesh.rank == 1:
        rendezvous.Rendezvous._decide_failure = lambda _: _end_without_a_word()
    else:
        _await("ended")
    try:
        with StepGuard(mesh, "forward"):
            raise ValueError("boom" if mesh.rank == 1 else "a consequence")
    finally:
        _tell("decided")


@pytest.mark.ci
def test_a_late_decision_about_a_step_blames_no_rank_that_is_at_work():
    later, killed, _ = endings_of(3, _fail_with_one_that_ends, timeout_s=TIMEOUT_S)
    assert killed is None
    assert (later.kind, later.text, later.rank) == ("RankError", "forward: ValueError: boom", 1)
    assert later.cause == "ValueError", "its own"


def _leave():
    dist.init_process_group("gloo")
    mesh = Mesh(MeshShape(1, 2, 1))
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    if mesh.rank == 1:
        _await("rank 0 leaves")
        _tell("rank 1 leaves")
    else:
        _tell("rank 0 leaves")
    end_together()
    has_seen_rank_1 = dist.distributed_c10d._get_default_store().check(["rank 1 leaves"])
    return rank_agreement._peers(mesh)._listener.is_alive(), has_seen_rank_1


@pytest.mark.ci
def test_the_rank_that_hosts_the_store_leaves_last_and_nobody_asks_it_then():
    assert [ending.text for ending in endings_of(2, _leave, timeout_s=TIMEOUT_S)] == [(False, True)] * 2


def test_without_other_ranks_an_error_goes_on_as_it_is():
    mesh = Mesh(MeshShape(), rank=0, world_size=1)
    with pytest.raises(KeyError):
        run_on_all_ranks(lambda: {}["x"], mesh, what="a look")
    assert run_on_all_ranks(lambda: torch.ones(1).item(), what="a look") == 1
