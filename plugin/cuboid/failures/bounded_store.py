"""A process group's store whose requests end: also when its host is cut off or stopped.

torch's client waits for an answer without a timeout, in C++, where nothing can interrupt it. So a thread of the store's
own makes the requests; if one isn't answered in time, the thread is abandoned, and all later requests fail at once.

One process answers all ranks. So what concerns many of them is in a list, which is read by one request, and who waits
asks at intervals that grow with the number of ranks.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

#: When, by ``time.monotonic``, the requests of the current context must have been answered.
_deadline: ContextVar[float] = ContextVar("cuboid_store_deadline", default=math.inf)
#: How long the end of a store waits for the request under way.
_LAST_ANSWER_S = 5.0
#: Who waits for something asks at intervals that grow from the first to the second of these times, or so far that all
#: ranks together make so many requests per second.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-4, 0.02
REQUESTS_PER_S = 4000


class StoreTimeoutError(dist.DistStoreError):
    """The store's host didn't answer a request in time."""


@contextmanager
def answers_within(seconds: float) -> Iterator[None]:
    """Inside, no request to a store is made or waited for after so many seconds; the shortest bound counts."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def interval_s(ranks: int, requests: int = 1) -> float:
    """The interval at which each rank may make so many requests, if all do."""
    return requests * ranks / REQUESTS_PER_S


def pauses(ranks: int, requests: int = 1) -> Iterator[float]:
    """How long each of the ranks waits, again and again, before it makes so many requests to see if something has come.

    Each pause is half of the wait before it, up to the interval of all ranks.
    """
    pause, longest = _SHORTEST_PAUSE_S, max(_LONGEST_PAUSE_S, interval_s(ranks, requests))
    # Ranks that begin together shouldn't all ask at once; and the random numbers of the script stay as they are.
    numbers = random.Random()
    while True:
        yield pause * numbers.uniform(0.75, 1.25)
        pause = min(pause * 1.5, longest)


class BoundedStore:
    """The requests of a :class:`Store` that Cuboid makes, each of which is answered in time or raises.

    Args:
        open_store: returns the store; it may take a while to connect, which counts as a request.
        timeout_s: how long a request may take, unless :func:`answers_within` says less.
        ranks: how many ranks make requests to it.

    Raises:
        StoreTimeoutError: from each request, once one wasn't answered in time.
        dist.DistError: as the store itself raises them.
    """

    def __init__(self, open_store: Callable[[], Store], timeout_s: float, ranks: int = 1) -> None:
        self._timeout_s, self._ranks = timeout_s, ranks
        self._client = _Client()
        # A daemon thread that returns from C++ during the interpreter's finalization is unwound through frames that may
        # not throw: "terminate called without an active exception", and the process aborts. So it is ended before, at
        # the latest by ``atexit``; unless it is stuck, for then it won't return.
        weakref.finalize(self, self._client.end)
        self._ask(self._client.open, open_store)

    def check(self, key: str) -> bool:
        """Whether a key is there."""
        return bool(self._ask(self._client.call, "check", [key]))

    def get(self, key: str) -> bytes:
        """The value of a key that is known to be there."""
        return bytes(self._ask(self._client.call, "get", key))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(self._client.call, "set", key, value)

    def post(self, key: str, value: str) -> None:
        """Set a key without waiting, before all later requests; if that fails, the next request will."""
        self._client.submit(self._client.call, "set", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return the sum."""
        return int(self._ask(self._client.call, "add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value ("": isn't there), and return the value that it has then."""
        return bytes(self._ask(self._client.call, "compare_set", key, expected, desired))

    def delete_key(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._ask(self._client.call, "delete_key", key)

    def enter(self, name: str, line: str) -> None:
        """Add a line to a list, which may not exist yet."""
        self._ask(self._client.enter, name, line)

    def post_line(self, name: str, line: str) -> None:
        """As :meth:`enter`, without waiting; as :meth:`post` otherwise."""
        self._client.submit(self._client.enter, name, line)

    def lines(self, name: str) -> list[str]:
        """The lines of a list so far."""
        lines: list[str] = self._ask(self._client.lines, name)
        return lines

    def delete_lines(self, name: str) -> None:
        """Delete a list, if it is there."""
        self._ask(self._client.delete_lines, name)

    def pauses(self, requests: int = 1) -> Iterator[float]:
        """:func:`pauses` of the ranks, each of which makes so many requests in between."""
        return pauses(self._ranks, requests)

    def connect(self, prefix: str, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
        """A process group of the ranks that call this with the same prefix, apart from torch's default one."""
        group: dist.ProcessGroupGloo = self._ask(self._client.connect, prefix, rank, size, timedelta(seconds=timeout_s))
        return group

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        if self._client.is_stuck:
            raise StoreTimeoutError("the store's host hasn't answered an earlier request")
        patience_s = min(self._timeout_s, _deadline.get() - time.monotonic())
        if patience_s <= 0:
            raise StoreTimeoutError("there is no time left to ask the store")
        answer = self._client.submit(request, *args)
        try:
            return answer.result(None if math.isinf(patience_s) else patience_s)
        except TimeoutError:
            self._client.is_stuck = True
            raise StoreTimeoutError(f"the store's host didn't answer within {patience_s:.1f} s") from None


class _Client:
    """The thread that makes the requests of one store, in the order in which they are submitted."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._store: Store | None = None
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="cuboid store", daemon=True)
        self._thread.start()

    def submit(self, request: Callable[..., Any], *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(request(*args))
            except BaseException as error:
                answer.set_exception(error)

        self._requests.put(run)
        return answer

    def open(self, open_store: Callable[[], Store]) -> None:
        self._store = open_store()

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self._store, name)(*args)

    def enter(self, name: str, line: str) -> None:
        if self._appends():
            self.call("append", name, f"{line}\n")
        else:
            # In a file, for example. A rank that is killed here leaves a number without a line.
            self.call("set", f"{name}/{self.call('add', name, 1)}", line)

    def lines(self, name: str) -> list[str]:
        if self._appends():
            text = self.call("get", name) if self.call("check", [name]) else b""
            return list(text.decode().split("\n")[:-1])
        keys = [f"{name}/{number}" for number in range(1, 1 + self.call("add", name, 0))]
        return [self.call("get", key).decode() for key in keys if self.call("check", [key])]

    def delete_lines(self, name: str) -> None:
        for number in () if self._appends() else range(1, 1 + self.call("add", name, 0)):
            self.call("delete_key", f"{name}/{number}")
        self.call("delete_key", name)

    def _appends(self) -> bool:
        """Whether the store can append to a value: TCPStore and HashStore can."""
        return bool(self.call("has_extended_api"))

    def connect(self, prefix: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        assert self._store is not None, "it is opened first"
        return dist.ProcessGroupGloo(PrefixStore(prefix, self._store), rank, size, timeout)

    def end(self) -> None:
        self._requests.put(None)
        # The garbage collector may run on the thread itself.
        if not self.is_stuck and self._thread is not threading.current_thread():
            self._thread.join(_LAST_ANSWER_S)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None and not self.is_stuck:
            request()
            # Its result, such as an error with the frames of a script, isn't kept until the next request.
            del request
        self._store = None
