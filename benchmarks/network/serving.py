"""A rank's side of the rig: an object that it keeps, whose methods it is told to call; steps begin on a word."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

#: From the word to the start, enough for the word to reach everyone.
LEAD_S = 0.3


class Reply(NamedTuple):
    """What a rank answers: a result, or the traceback of what it ran into and when."""

    result: Any = None
    failure: str | None = None
    at_s: float = 0.0


def serve(build: Callable[[], Any], connection: Connection) -> None:
    """A rank's life: build what it keeps, then call one method after another until one fails or the parent hangs up."""
    try:
        kept = build()
        connection.send(Reply())
        while True:
            method, arguments = connection.recv()
            connection.send(Reply(getattr(kept, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(Reply(failure=traceback.format_exc(), at_s=time.monotonic()))


def sleep_until(start_s: float) -> None:
    """On the clock of ``time.perf_counter``, which all processes of a machine share."""
    time.sleep(max(0.0, start_s - time.perf_counter()))


class Step(NamedTuple):
    """One step of one contestant on one rank."""

    duration_s: float  # since the start that all ranks were told
    computing_s: float  # processor time of all of the rank's threads
    thread_s: float  # of the thread that runs the step, which sleeps while it waits for a message
    interface_bytes: int | None  # sent, by the interface; None where it isn't the rank's own
    figures: dict[str, Any]  # what the contestant tells of the step


class Contestant:
    """What takes part, on one rank. All ranks call its methods together."""

    def first(self) -> Any:
        """The first steps, which connect and warm up, and what is to be checked of them."""

    def begin(self) -> None:
        """Forget the last step, before time counts."""

    def step(self) -> Any:
        """What is timed."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """What is to be known of the last step."""
        return {}

    def close(self) -> None:
        vars(self).clear()


class Host:
    """What a rank keeps: the contestants that were built, by their entries."""

    def __init__(self, build: Callable[[Any], Contestant], sent_bytes: Callable[[], int | None] = lambda: None) -> None:
        self._build, self._sent_bytes = build, sent_bytes
        self.kept: dict[Hashable, Contestant] = {}

    def prepare(self, entry: Hashable) -> Any:
        """Build a contestant, perhaps once more, and give what it tells of its first steps. Collective."""
        if entry in self.kept:
            self.kept.pop(entry).close()
        self.kept[entry] = self._build(entry)
        return self.kept[entry].first()

    def step(self, entry: Hashable, start_s: float) -> Step:
        """One step, beginning at a time that all ranks are told. Collective."""
        contestant = self.kept[entry]
        contestant.begin()
        before, computing_s, thread_s = self._sent_bytes(), time.process_time(), time.thread_time()
        sleep_until(start_s)
        contestant.step()
        duration_s = time.perf_counter() - start_s
        computing_s, thread_s = time.process_time() - computing_s, time.thread_time() - thread_s
        after = self._sent_bytes()
        carried = None if before is None or after is None else after - before
        return Step(duration_s, computing_s, thread_s, carried, contestant.figures())

    def discard(self) -> None:
        for contestant in self.kept.values():
            contestant.close()
        self.kept.clear()
