"""Where ranks are, seen from outside of their main threads: what one rank calls alone, the others never come to.

A collective that waits for them doesn't tell it from slow ranks. So a thread of each rank looks at what the main thread
does, which costs a step nothing, and writes into the store what has been the same for a while. From two such positions
follows that ranks wait for each other:

* One has begun a step that the other, with which it holds the model, hasn't, and the other is in the next meeting.
* One is in a meeting, or in a step or a collective of Cuboid's that the other hasn't begun, and the other waits for it
  in a collective of another group.

A rank waits for this one if it is in a collective that this rank hasn't begun: collectives are numbered in each group
and on each rank. Without these counts, a collective that only takes longer there, since a third rank or its network was
stopped, would look the same. Positions are written late: that of the other counts once it was written again in the
meantime. What isn't certain counts for nothing, since a mistake here would end a run that is only slow.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain

from cuboid.distributed.process_groups import waits_for_lost_ranks
from cuboid.distributed.step_progress import StepProgress, progress_by_copy
from cuboid.failures.bounded_store import BoundedStore
from cuboid.failures.waiting_call import BegunCollectives, WaitingCall, begun_collectives, waiting_call

#: After how long in one place a rank's position is written.
STILL_S = 3.0
#: Intervals at which a rank that is still in a step, or waits in a meeting, reads the positions of others, at most; and
#: after it has read one that is to be confirmed.
_LONGEST_LOOK_S, CONFIRMED_S = 30.0, 2.0
#: At most so many positions of others are read in one look, and so many again that are to be confirmed.
_READS = 4
#: The position of a rank that waits is written again after intervals that grow by this factor.
_REWRITES = 1.3
_EVERYWHERE = "all ranks must make the same calls in the same order, and not one alone, as under `if rank == 0`"


@dataclass(frozen=True)
class Position:
    """How far a rank has come.

    Attributes:
        meetings: how many meetings have ended on it.
        begun: by the ranks that hold a copy of a model together, how many steps it has begun since the last one.
        running: by the same, the last of them.
        is_comparable: whether none of them failed.
        call: the collective in which it waits, if it is in none of these steps.
        group: whose collective that is.
        number: which of this group's it is, by a lower bound.
        waits_for: for which ranks it does.
        calls: if it waits, how many collectives each group has begun on it at most, that one too.
        place, time: which of the places where it stayed this is, and how often the position was written.
    """

    meetings: int
    begun: dict[str, int]
    running: dict[str, str]
    is_comparable: bool
    call: str = ""
    group: str = ""
    number: int = 0
    waits_for: tuple[int, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    place: int = 0
    time: int = 0

    def step_ahead_of(self, other: Position) -> str | None:
        """A step that this rank has begun and the other hasn't, since the same meeting; None if there is none."""
        if self.meetings != other.meetings or not (self.is_comparable and other.is_comparable):
            return None
        ahead = (key for key, count in self.begun.items() if key in other.begun and count > other.begun[key])
        return next((self.running[key] for key in ahead), None)


class Whereabouts:
    """The position of this rank, and what follows from those of others.

    Args:
        rank: this rank.
        store: where positions are written.
    """

    def __init__(self, rank: int, store: BoundedStore) -> None:
        self._rank, self._store = rank, store
        self._main = threading.main_thread().ident
        self._in_meeting, self._has_agreed = False, True
        #: How many meetings have ended, and the steps begun by then: one object, which the thread reads at once.
        self._last_meeting = 0, self._counts()
        #: What the main thread does, for how long, and how often that was written.
        self._doing: tuple[Position, WaitingCall | None] | None = None
        self._since, self._place, self._times = 0.0, 0, 0
        self._next_write, self._next_look = 0.0, 0.0
        #: How often it has read the positions of others.
        self._looks = 0
        #: Positions of others that wait for this rank, as they were read first since it is where it is.
        self._to_confirm: dict[int, Position] = {}

    def begin_meeting(self) -> None:
        """The main thread is about to meet the others."""
        self._in_meeting, self._to_confirm = True, {}

    def end_meeting(self, *, has_agreed: bool) -> None:
        """It has met them; or it failed, so that until the next meeting ranks may do different things."""
        self._last_meeting, self._has_agreed = (self._last_meeting[0] + 1, self._counts()), has_agreed
        for progress in progress_by_copy(self._rank).values():
            progress.is_broken = False
        self._in_meeting = False

    def near(self) -> list[int]:
        """The other ranks of the copies of models that this one is of."""
        return sorted({rank for ranks in progress_by_copy(self._rank) for rank in ranks} - {self._rank})

    def elsewhere(self, near: Sequence[int], far: Sequence[int], what: str) -> tuple[str | None, bool]:
        """Why some ranks won't come to the meeting in which the main thread waits, if that is certain; and whether it
        may become so soon.

        ``near`` and ``far`` are those that haven't come, of the copies of models that this rank is of and others.
        """
        here, begun = self._position(progress_by_copy(self._rank)), functools.cache(begun_collectives)
        self._looks += 1
        for rank, there in chain(self._positions(near), self._positions(far)):
            step = there.step_ahead_of(here)
            if step is not None:
                return (
                    f"{self._here(what)}, and rank {rank} went on to {step} without it: {_EVERYWHERE}",
                    False,
                )
            if there.meetings == here.meetings and self._is_waited_for(rank, there, begun):
                return self._waiting(what, rank, there), False
        return None, bool(self._to_confirm)

    def look(self) -> str | None:
        """Look at the main thread, and write what has been the same for a while. Called twice a second by a thread.

        Returns:
            Why the step that this rank is in can't end, if that is certain.
        """
        if self._in_meeting:
            return None
        progress_by_ranks = progress_by_copy(self._rank)
        is_inside = any(progress.is_inside for progress in progress_by_ranks.values())
        call = None if is_inside or self._main is None else waiting_call(self._main)
        doing = (self._position(progress_by_ranks), call)
        if doing != self._doing:
            self._doing, self._since, self._to_confirm = doing, time.monotonic(), {}
            self._place, self._times, self._next_write, self._next_look = self._place + 1, 0, 0.0, 0.0
            return None
        still_s, here = time.monotonic() - self._since, doing[0]
        if still_s < STILL_S:
            return None
        if still_s >= self._next_write:
            self._write(here, call)
            # All ranks but one may wait for minutes, and one process has the store.
            again_s = min(still_s * _REWRITES, still_s + _LONGEST_LOOK_S)
            self._next_write = math.inf if call is None else again_s
        # Over NCCL, the host may have left the step's code.
        is_alone = is_inside or waits_for_lost_ranks() if call is None else call.is_of_cuboid
        if still_s < self._next_look or not is_alone:
            return None
        text = self._alone(here, call)
        self._next_look = still_s + (CONFIRMED_S if self._to_confirm else min(still_s, _LONGEST_LOOK_S))
        return text

    def _alone(self, here: Position, call: WaitingCall | None) -> str | None:
        """Why the step, or the collective of Cuboid's, that the main thread is in can't end, if that is certain."""
        begun = functools.cache(begun_collectives)
        self._looks += 1
        for rank, there in self._positions(self.near() if call is None else sorted({*call.ranks} - {self._rank})):
            what = here.step_ahead_of(there) if call is None else _call_ahead_of(there, call, begun())
            if what is not None and self._is_waited_for(rank, there, begun):
                return self._waiting(what, rank, there)
        return None

    def _waiting(self, what: str, rank: int, there: Position) -> str:
        return f"{self._here(what)}, and rank {rank} waits for it in {there.call}: {_EVERYWHERE}"

    def _here(self, what: str) -> str:
        return f"rank {self._rank} is in {what}"

    def _is_waited_for(self, rank: int, there: Position, begun: Callable[[], BegunCollectives]) -> bool:
        """Whether another rank is certain to wait for this one in a collective while this one is where it is."""
        if self._rank not in there.waits_for:
            return False
        if begun().at_most.get(there.group, math.inf) >= there.number:
            # Such as one that takes longer on other ranks than here, or that this rank has begun and not waited for.
            return False
        first = self._to_confirm.setdefault(rank, there)
        if first.place != there.place:
            self._to_confirm[rank] = there
        return first.place == there.place and first.time < there.time

    def _position(self, progress_by_ranks: dict[tuple[int, ...], StepProgress]) -> Position:
        begun, running = {}, {}
        meetings, begun_before = self._last_meeting
        for ranks, progress in progress_by_ranks.items():
            begun[_key(ranks)] = progress.begun - begun_before.get(ranks, 0)
            running[_key(ranks)] = progress.running
        is_comparable = self._has_agreed and not any(progress.is_broken for progress in progress_by_ranks.values())
        return Position(meetings, begun, running, is_comparable)

    def _counts(self) -> dict[tuple[int, ...], int]:
        return {ranks: progress.begun for ranks, progress in progress_by_copy(self._rank).items()}

    def _write(self, here: Position, call: WaitingCall | None) -> None:
        self._times += 1
        written = asdict(here) | {"place": self._place, "time": self._times}
        if call is not None:
            begun = begun_collectives()
            number = begun.at_least.get(call.group, 0)
            written |= {"call": call.name, "group": call.group, "number": number}
            written |= {"waits_for": call.ranks, "calls": begun.at_most}
        self._store.post(f"position/{self._rank}", json.dumps(written))

    def _positions(self, ranks: Sequence[int]) -> Iterator[tuple[int, Position]]:
        """The positions that other ranks have written: those to confirm, and a few that change with looks and ranks.

        Where ranks wait for each other, each of them is ahead of others or waits for others, so that a few looks of all
        of them are enough.
        """
        to_confirm = [rank for rank in ranks if rank in self._to_confirm]
        others = [rank for rank in ranks if rank not in self._to_confirm]
        first = (self._rank + self._looks) * _READS % max(len(others), 1)
        for rank in to_confirm[:_READS] + (others[first:] + others[:first])[:_READS]:
            if self._store.check(f"position/{rank}"):
                yield rank, Position(**json.loads(self._store.get(f"position/{rank}")))


def _call_ahead_of(there: Position, call: WaitingCall, begun: BegunCollectives) -> str | None:
    """The name of a collective if another rank, which waits in one of another group, hasn't begun it."""
    is_ahead = there.calls.get(call.group, 0) < begun.at_least.get(call.group, 0)
    return call.name if call.group != there.group and is_ahead else None


def _key(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))
