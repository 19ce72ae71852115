"""A collective that was started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")
U = TypeVar("U")


class AsyncResult(Generic[T]):
    """What a collective will give.

    With NCCL the collective runs on a stream of its own, and waiting makes only the current stream wait; with gloo it
    runs on threads of its own.

    Args:
        result: complete only once :meth:`wait` has returned.
        works: of torch.distributed.
        finish: what is left to do on this side when they are through.
        holds: buffers that must live as long.
    """

    def __init__(
        self,
        result: T,
        works: Sequence[dist.Work | None] = (),
        finish: Callable[[], None] | None = None,
        holds: object = None,
    ) -> None:
        self._result = result
        self._works = works
        self._finish = finish
        self._holds = holds

    def wait(self) -> T:
        """The result. Later calls return it at once."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._holds = None
        return self._result

    def incomplete(self) -> T:
        """The result, for whoever makes sure that nobody reads it before :meth:`wait`."""
        return self._result

    def giving(self, result: U) -> AsyncResult[U]:
        """The same, of which another result is wanted: one that is complete when this is."""

        def finish() -> None:
            self.wait()

        return AsyncResult(result, finish=finish)

    def then(self, change: Callable[[T], U]) -> AsyncResult[U]:
        """What ``change`` makes of the result; called once, when that is complete."""
        return _Changed(self, change)


class _Changed(AsyncResult[U]):
    """The result of another one, changed."""

    def __init__(self, source: AsyncResult[T], change: Callable[[T], U]) -> None:
        self._source: AsyncResult[T] | None = source
        self._change = change
        self._made: U | None = None

    def wait(self) -> U:
        if self._source is not None:
            # What it was made of goes first, so that buffers die as early as they can.
            source, self._source = self._source, None
            self._made = self._change(source.wait())
        return self._made  # type: ignore[return-value]

    def incomplete(self) -> U:
        raise AssertionError("a change is made of a complete result")
