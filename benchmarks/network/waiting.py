"""How long a rank's computing waits for messages."""

from __future__ import annotations

import time

from cuboid.distributed.async_result import AsyncResult


class Waiting:
    """Measures all waiting of this process from now on: it puts a clock around :meth:`AsyncResult.arrive`."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        arrive = AsyncResult.arrive

        def timed(pending: AsyncResult[object]) -> None:
            start_s = time.perf_counter()
            arrive(pending)
            self._waited_s += time.perf_counter() - start_s

        AsyncResult.arrive = timed  # type: ignore[method-assign, assignment]

    def take(self) -> float:
        """Seconds since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s
