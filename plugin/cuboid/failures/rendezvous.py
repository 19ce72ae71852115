"""Where ranks meet: in the store of their process group, without collectives.

A rank that fails reports it there and raises at once, even while the others are still busy. A waiting rank learns of a
failure on any rank, of a rank that makes another call than the others, and of a process that ended.

Each meeting has a number, which every rank counts by itself, and a name. A rank that fails inside an action that the
others continue joins their next meeting in place of its own, so that all ranks stay at the same number.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cuboid.distributed.host_identity import host_identity
from cuboid.distributed.mesh import group_timeout
from cuboid.distributed.process_groups import abort_groups, waits_for_lost_ranks
from cuboid.errors import CuboidError, PeerLostError, RankError
from cuboid.failures.bounded_store import BoundedStore, StoreTimeoutError, answers_within, interval_s, pauses
from cuboid.failures.exit_messages import end_alone
from cuboid.failures.rank_failure import RankFailure, is_lost
from cuboid.failures.replica_updates import ReplicaUpdates
from cuboid.failures.whereabouts import CONFIRMED_S, Whereabouts

#: The lane of the main threads' meetings; meetings of background threads are numbered separately.
MAIN_LANE = "main"
#: Prefix of the meetings of ranks whose step fails.
_STEP = "step"
#: How long the first rank that fails waits for the others, to learn whether they all fail alike.
_GRACE_S = 2.0
#: How long a rank that lost the connection to another one waits for a report from it; and then, if that one wasn't of
#: its machine, for one of a rank that has seen its process end.
_LOSS_S = 1.0
#: When a waiting rank first checks whether missing ranks still run, and whether others are still training; and the
#: longest time between two checks.
_LOOK_AROUND_S, _LONGEST_LOOK_AROUND_S = 2.0, 30.0
#: Interval at which a process checks whether a step has failed elsewhere, and looks at what its main thread does.
_LISTEN_S = 0.5
#: How many ranks, those that came first to a meeting, read how far the replicas are.
_EARLY = 2
#: How long rank 0, which may host the store, waits for the others to read an outcome.
_LEAVE_S = 5.0
#: How long a rank that failed may ask the store what happened on the others. Its host may be what was lost.
POST_MORTEM_S = 10.0
#: How long a rank that failed waits for the first one that did to decide, before it decides itself.
_DECISION_S = 2 * _GRACE_S


class Peers:
    """The ranks of one process group, and the state of this rank's meetings with the others."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size = rank, size
        timeout = group_timeout()
        #: Timeout of the process group, in seconds.
        self.timeout_s = math.inf if timeout is None else timeout.total_seconds()
        self._store = BoundedStore(lambda: PrefixStore("cuboid/agreement", store), self.timeout_s, size)
        self.updates = ReplicaUpdates(self._store)
        self.whereabouts = Whereabouts(rank, self._store)
        #: Two ranks of a machine are enough to look around: one of them may have ended.
        self.looks_around = os.environ.get("LOCAL_RANK", "0") in ("0", "1")
        self._numbers: dict[str, int] = {}
        #: Number of steps in which all ranks failed, so that training may go on.
        self._broken_steps = 0
        self._host = f"host/{host_identity('pid')}"
        self._store.post_line(self._host, f"{rank} {os.getpid()}")
        #: The last failed step's failure that the listener has read, with the number of broken steps at that time.
        self._heard: tuple[int, RankFailure] | None = None
        #: Whether this rank must abort its groups itself if another one fails in a step.
        self._aborts = waits_for_lost_ranks()
        #: The failure for which it did so, if it did.
        self.aborted_for: RankFailure | None = None
        #: Interval at which it reads whether one has.
        self._listen_s = max(_LISTEN_S, interval_s(size))
        #: Whether an outcome can't be read any more, or isn't noticed, when this rank needs it.
        self._hears = self._aborts or _ends_with_rank_0(store)
        self._hosts_store = rank == 0 and _ends_with_rank_0(store)
        self._has_left = threading.Event()
        group = weakref.ref(dist.group.WORLD)
        self._listener = threading.Thread(target=self._listen, args=(group,), name="cuboid failures", daemon=True)
        self._listener.start()

    def _listen(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        """Poll the store for a step's failure while the store is there: it may end with rank 0. And look at what this
        process's main thread does.

        The process's other threads may be waiting in a collective. With gloo, they return when the failed rank's
        process ends; with NCCL, only at the timeout. So with NCCL this aborts the groups, and those threads go on.
        """
        try:
            while group() is not None and group() is dist.group.WORLD and not self._has_left.is_set():
                if self._hears:
                    self._hear()
                alone = self._look()
                if alone is not None:
                    self._end_alone(RankFailure(self.rank, RankError.__name__, alone))
                self._has_left.wait(self._listen_s)
        except (dist.DistError, RuntimeError):
            # The store is gone: there is nothing more to read.
            return

    def _look(self) -> str | None:
        """Why the main thread waits for what will never come, if that is certain."""
        try:
            return self.whereabouts.look()
        except RuntimeError:
            # Without the store, hearing ends too; but nothing else that fails here may keep this rank from hearing.
            return None

    def _hear(self) -> None:
        step = self._broken_steps
        if self._heard is not None and self._heard[0] == step:
            return
        key = f"step/{step}/outcome"
        failure = RankFailure.decode(self._store.get(key)) if self._store.check(key) else None
        self._heard = None if failure is None else (step, failure)
        if failure is not None and not failure.everywhere and failure.rank != self.rank:
            self._abort(failure)

    def _end_alone(self, failure: RankFailure) -> None:
        """End a step of the main thread that can't end by itself, and the process with it if nothing else does."""
        self.break_step(failure)
        if self._aborts:
            self._abort(failure)
            return
        end_alone(f"{failure.kind}: {failure.text}", self.rank)

    def _abort(self, failure: RankFailure) -> None:
        """Abort the groups, if threads that wait in them wouldn't learn of a failure otherwise."""
        if self._aborts and self.aborted_for is None:
            # Set first, so that no thread uses the incomplete result of an aborted collective.
            self.aborted_for = failure
            abort_groups()

    def leave(self) -> None:
        """Ask the store nothing more; the rank with whose process it ends waits until the others don't either."""
        self._has_left.set()
        with contextlib.suppress(dist.DistError), answers_within(_LEAVE_S):
            self._listener.join(_LEAVE_S)
            self._store.add("ended", 1)
            polls = pauses(1)
            while self._hosts_store and self._store.add("ended", 0) < self.size:
                time.sleep(next(polls))

    def meet(self, what: str, error: BaseException | None, lane: str) -> None:
        """Join the next meeting of a lane, and raise the failure of any rank."""
        number = self._numbers.get(lane, 0)
        self._numbers[lane] = number + 1
        has_agreed = False
        meeting = Rendezvous(self, self._store, f"{lane}/{number}", what)
        if meeting.is_of_main_thread:
            self.whereabouts.begin_meeting()
        try:
            with answers_within(math.inf if error is None else POST_MORTEM_S):
                outcome = meeting.hold(error)
            has_agreed = outcome is None
        except dist.DistError as lost:
            # DistError is what torch's stores raise.
            if error is not None:
                return
            raise PeerLostError(f"{what}: {_store_lost(lost)}: {lost}").arising_on(0) from lost
        finally:
            if meeting.is_of_main_thread:
                self.whereabouts.end_meeting(has_agreed=has_agreed)
        if outcome is not None:
            self._raise(outcome, error)
        if number > 0:
            self._forget(f"{lane}/{number - 1}")

    def _raise(self, outcome: RankFailure, error: BaseException | None) -> None:
        """Raise the outcome on this rank; return if it is this rank's ``error`` itself, which the caller re-raises."""
        if error is not None and not isinstance(error, Exception):
            error.shared = True  # type: ignore[attr-defined]
            return
        arose_here = error is not None and (outcome.alike or outcome.rank == self.rank)
        if arose_here and isinstance(error, CuboidError):
            if not outcome.alike:
                error.arising_on(self.rank)
            error.shared = True
            return
        raised = outcome.error()
        raised.shared = True
        raise raised from error

    def _forget(self, key: str) -> None:
        # All ranks came to the meeting that has just succeeded, so none still reads the keys of the one before.
        if self.rank == 0:
            for name in ("what", "arrived", "left", "outcome"):
                self._store.delete_key(f"{key}/{name}")
            self._store.delete_lines(f"{key}/at")

    def ended(self) -> list[int]:
        """The ranks whose process ran on this machine and has ended."""
        members = (line.split() for line in self._store.lines(self._host))
        pids = {int(rank): int(pid) for rank, pid in members}
        return sorted(rank for rank, pid in pids.items() if not _runs(pid))

    def failed_in_step(self, what: str, error: Exception) -> Exception:
        """Report a failure inside a step to the other ranks, and return the error to raise."""
        if isinstance(error, CuboidError) and error.shared:
            return error
        if self.aborted_for is not None:
            return self.aborted_for.error()
        meeting = Rendezvous(self, self._store, f"{_STEP}/{self._broken_steps}", what)
        try:
            with answers_within(POST_MORTEM_S):
                outcome = meeting.hold_after_loss(error) if is_lost(error) else meeting.report(error)
        except dist.DistError as gone:
            return self._failed_without_store(what, error, gone)
        if self.rank == 0 and not outcome.everywhere:
            # Let the others read the outcome before the store ends with this process.
            time.sleep(2 * self._listen_s)
        if outcome.everywhere:
            self._broken_steps += 1
        else:
            # Collectives that this rank has started would keep its process from ending.
            self._abort(outcome)
        if outcome.rank != self.rank and not outcome.alike:
            return outcome.error()
        if isinstance(error, CuboidError):
            error.shared = outcome.everywhere
            return error if outcome.alike else error.arising_on(self.rank)
        if outcome.kind == PeerLostError.__name__:
            # The backend's own message doesn't say what was waited for.
            return outcome.error()
        error.add_note(f"in {what} on rank {self.rank}")
        return error

    def _failed_without_store(self, what: str, error: Exception, store_error: dist.DistError) -> Exception:
        """The error to raise for a failure inside a step if the store is gone, or out of reach."""
        if self._heard is not None and self._heard[0] == self._broken_steps:
            return self._heard[1].error()
        # Collectives that this rank has started would keep its process from ending.
        self._abort(RankFailure.of(error, self.rank, what))
        if not is_lost(error):
            return error
        if isinstance(store_error, StoreTimeoutError):
            who = f"another rank didn't answer in time while rank {self.rank} waited for it in {what}"
            text = f"{who}, and {_store_lost(store_error)}; see the messages on the other hosts ({error})"
            return RankFailure(self.rank, PeerLostError.__name__, text).error()
        return self.lost([0], "", what, error).error()

    def lost(self, gone: list[int], behind: str, what: str, error: Exception) -> RankFailure:
        """The failure to report if the connection to another rank was lost."""
        who = f"rank {_listed(gone)} ended" if gone else "another rank went away or didn't answer in time"
        rank = gone[0] if gone else self.rank
        text = f"{who} while rank {self.rank} waited for it in {what}{behind}; see its own messages ({error})"
        return RankFailure(rank, PeerLostError.__name__, text)

    def break_step(self, failure: RankFailure) -> None:
        """Set the current step's outcome, for the ranks that are still in it."""
        self._store.compare_set(f"step/{self._broken_steps}/outcome", "", failure.encode())
        if self.rank == 0:
            # Let them read it before the store ends with this process.
            time.sleep(2 * self._listen_s)


class Rendezvous:
    """One meeting of all ranks, which ends with the same outcome on each of them.

    ``key`` is the prefix of its keys in the ranks' store, ``what`` the name of the action in messages.
    """

    def __init__(self, peers: Peers, store: BoundedStore, key: str, what: str) -> None:
        self._peers, self._store, self._key, self._what = peers, store, key, what
        # A background thread's ranks may be late for reasons other than training.
        self._is_main = key.startswith(f"{MAIN_LANE}/")
        self._in_step = key.startswith(f"{_STEP}/")
        #: Whether this rank is one of the first that came.
        self._is_early = False
        #: Whether the main thread waits in it, whose steps and collectives are known. A thread of a script's may save
        #: while the main thread trains, and be late on one rank alone.
        self.is_of_main_thread = self._is_main and threading.current_thread() is threading.main_thread()

    def hold(self, error: BaseException | None) -> RankFailure | None:
        """Report this rank's success or failure, and wait for the outcome."""
        rank = self._peers.rank
        failure = self._check_call() if error is None else RankFailure.of(error, rank, self._what)
        try:
            if failure is not None:
                if self._enter_failed(failure):
                    self._decide_failure()
            else:
                is_last = self._arrive() == self._peers.size
                if is_last and not self._store.check(f"{self._key}/first"):
                    self._decide("ok")
            return self._await_outcome(self._peers.timeout_s if failure is None else _DECISION_S)
        except BaseException as interruption:
            if not isinstance(interruption, dist.DistError):
                # Such as Ctrl-C: the others needn't wait for a rank that no longer takes part.
                with contextlib.suppress(dist.DistError), answers_within(POST_MORTEM_S):
                    self._decide(RankFailure.of(interruption, rank, f"waiting in {self._what}").encode())
            raise

    def report(self, error: Exception) -> RankFailure:
        """Report a failure to the ranks that join; the outcome also says whether all ranks fail alike."""
        failure = RankFailure.of(error, self._peers.rank, self._what)
        if self._enter_failed(failure):
            self._decide_failure()
        return self._await_outcome(_DECISION_S) or failure

    def hold_after_loss(self, error: Exception) -> RankFailure:
        """The failure that the lost rank reported, if it did; else that of a rank of its machine, or of the first."""
        peers, is_decided = self._peers, self._is_decided_within(_LOSS_S)
        gone = [] if is_decided else peers.ended()
        if not is_decided and not gone:
            is_decided = self._is_decided_within(_LOSS_S)
        behind = ""
        if not is_decided and (gone or self._store.add(f"{self._key}/lost", 1) == 1):
            behind = peers.updates.behind()
        failure = peers.lost(gone, behind, self._what, error)
        self._decide(failure.encode())
        return self._await_outcome(_DECISION_S) or failure

    def _is_decided_within(self, seconds: float) -> bool:
        """Wait so long for the outcome; returns whether there is one."""
        deadline, polls = time.monotonic() + seconds, self._store.pauses()
        while not self._store.check(f"{self._key}/outcome"):
            if time.monotonic() > deadline:
                return False
            time.sleep(next(polls))
        return True

    def _enter_failed(self, failure: RankFailure) -> bool:
        """Join with a failure; returns whether this rank, as the first to fail, decides on the outcome."""
        rank = self._peers.rank
        self._store.enter(f"{self._key}/failed", f"{rank} {failure.encode()}")
        # Before `arrived`: the last rank to arrive checks `first`, and must not decide that all went well.
        first = self._store.compare_set(f"{self._key}/first", "", str(rank)) == str(rank).encode()
        self._arrive()
        return first

    def _arrive(self) -> int:
        """Record that this rank has come; returns how many have."""
        # In this order: the last of those that others see here has been counted, so that one of them can decide.
        arrived = self._store.add(f"{self._key}/arrived", 1)
        self._store.enter(f"{self._key}/at", str(self._peers.rank))
        self._is_early = arrived <= _EARLY
        return arrived

    def _missing(self) -> list[int]:
        """The ranks that haven't come."""
        present = set(self._store.lines(f"{self._key}/at"))
        return [rank for rank in range(self._peers.size) if str(rank) not in present]

    def _check_call(self) -> RankFailure | None:
        other_call = self._store.compare_set(f"{self._key}/what", "", self._what).decode()
        if other_call == self._what:
            return None
        return RankFailure(
            self._peers.rank,
            RankError.__name__,
            f"rank {self._peers.rank} is in {self._what}, while another rank is in {other_call}: all ranks must make "
            "the same calls in the same order",
        )

    def _decide(self, outcome: str) -> None:
        """Set the outcome, unless there is one."""
        self._store.compare_set(f"{self._key}/outcome", "", outcome)

    def _decide_failure(self) -> None:
        """Wait a moment for the others, then set the outcome from what was reported."""
        deadline, polls = time.monotonic() + _GRACE_S, pauses(1)
        while time.monotonic() < deadline and self._store.add(f"{self._key}/arrived", 0) < self._peers.size:
            time.sleep(next(polls))
        self._decide_from(self._failures())

    def _failures(self) -> dict[int, RankFailure]:
        """What has been reported so far, by the rank that did."""
        reports = dict(line.split(" ", 1) for line in self._store.lines(f"{self._key}/failed"))
        failures = {int(rank): RankFailure.decode(report.encode()) for rank, report in reports.items()}
        return {rank: failure for rank, failure in failures.items() if failure is not None}

    def _decide_from(self, failures: dict[int, RankFailure]) -> None:
        """Set the outcome: all fail alike, or the failure to raise on all ranks.

        In a step that is the first one in time, because others may be its consequences. Where all ranks meet, it is
        that of the lowest rank, so that the same mistake gives the same error each time.
        """
        key = f"{self._key}/first"
        first = int(self._store.get(key)) if self._in_step and self._store.check(key) else None
        # A lost rank is named only if nothing else went wrong.
        named = min(failures, key=lambda rank: (failures[rank].kind == PeerLostError.__name__, rank != first, rank))
        everywhere = len(failures) == self._peers.size
        by_themselves = everywhere and all(failure.rank == rank for rank, failure in failures.items())
        alike = by_themselves and len({failure.text for failure in failures.values()}) == 1
        failure = failures[named]
        self._decide(RankFailure(failure.rank, failure.kind, failure.text, alike, everywhere).encode())

    def _await_outcome(self, patience_s: float) -> RankFailure | None:
        """Wait for the outcome; after so many seconds, see to it that there is one."""
        started, waited_s, look_s, polls = time.monotonic(), 0.0, _LOOK_AROUND_S, self._store.pauses()
        while not self._store.check(f"{self._key}/outcome"):
            time.sleep(next(polls))
            waited_s = time.monotonic() - started
            is_late = waited_s > patience_s
            if not is_late and waited_s <= look_s:
                continue
            # Read before who is missing: a rank arrives after it has reported its failure.
            have_all_come = self._store.add(f"{self._key}/arrived", 0) == self._peers.size
            missing = self._missing()
            if is_late or self._peers.looks_around or self._is_early:
                self._look_around(missing, is_late=is_late, have_all_come=have_all_come)
            soon = self.is_of_main_thread and self._look_elsewhere(missing)
            look_s = look_s + CONFIRMED_S if soon else min(2 * look_s, look_s + _LONGEST_LOOK_AROUND_S)
        outcome = RankFailure.decode(self._store.get(f"{self._key}/outcome"))
        # The outcome holds, whatever comes now.
        with contextlib.suppress(dist.DistError):
            self._store.add(f"{self._key}/left", 1)
            if self._peers.rank == 0:
                self._let_others_leave()
        return outcome

    def _let_others_leave(self) -> None:
        """Wait until the ranks that came here have read the outcome: the store may end with this process."""
        deadline, polls = time.monotonic() + _LEAVE_S, pauses(1)
        while self._store.add(f"{self._key}/left", 0) < self._store.add(f"{self._key}/arrived", 0):
            time.sleep(next(polls))
            if time.monotonic() > deadline:
                return

    def _look_around(self, missing: list[int], *, is_late: bool, have_all_come: bool) -> None:
        """Set an outcome if some ranks will never come, or if the one that should decide doesn't.

        The latter is the first to fail, or the last to arrive, and may be killed before it decides.
        """
        ended = self._peers.ended()
        failures = self._failures() if ended or is_late else {}
        if failures:
            self._decide_from(failures)
        elif ended:
            text = f"rank {_listed(ended)} ended while the others waited for it in {self._what}; see its own messages"
            self._decide(RankFailure(ended[0], PeerLostError.__name__, text).encode())
        elif ahead := self._peers.updates.ahead(self._what) if missing and self._is_main and self._is_early else None:
            failure = RankFailure(self._peers.rank, RankError.__name__, ahead)
            self._decide(failure.encode())
            # The other replica isn't in this meeting; it reads that when it loses the connection to this one.
            self._peers.break_step(failure)
        elif is_late and have_all_come:
            # All succeeded. If the last to arrive was killed, on another machine, the next meeting misses it.
            self._decide("ok")
        elif is_late and missing:
            text = (
                f"rank {_listed(missing)} of {self._peers.size} didn't come to {self._what} within "
                f"{self._peers.timeout_s:g} s, the timeout of the process group (DEEPSPEED_TIMEOUT in minutes, or "
                "init_process_group's own argument)"
            )
            self._decide(RankFailure(missing[0], PeerLostError.__name__, text).encode())

    def _look_elsewhere(self, missing: list[int]) -> bool:
        """Set an outcome if a rank is where it waits for this one to come; returns whether that may be certain soon."""
        near = [rank for rank in self._peers.whereabouts.near() if rank in missing]
        far = [rank for rank in missing if rank not in near] if self._peers.looks_around else []
        why, may_be_soon = self._peers.whereabouts.elsewhere(near, far, self._what)
        if why is not None:
            failure = RankFailure(self._peers.rank, RankError.__name__, why)
            self._decide(failure.encode())
            # They aren't in this meeting, and read it when they lose the connection to this rank.
            self._peers.break_step(failure)
        return may_be_soon


def _ends_with_rank_0(store: Store) -> bool:
    """Whether a store ends with rank 0: not if the launcher (torchrun) hosts it, nor if it is a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _store_lost(error: dist.DistError) -> str:
    """What a request's failure says about the store of the process group, which rank 0 or the launcher hosts."""
    if isinstance(error, StoreTimeoutError):
        return (
            "the store of the process group doesn't answer: rank 0 or the launcher, which hosts it, is stopped, or its "
            "host can't be reached"
        )
    return "the store of the process group went away, and with it rank 0 or the launcher"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
