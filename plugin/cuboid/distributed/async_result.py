"""A collective that was started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
U = TypeVar("U")


class AsyncResult(Generic[T]):
    """What a collective will give: a ``T``.

    With NCCL the collective runs on a stream of its own, and waiting makes only the current stream wait; with gloo it
    runs on threads of its own.

    Args:
        result: complete only once :meth:`wait` has returned.
        works: of torch.distributed; all of them are waited for.
        finish: what is left to do on this side when they are through.
        holds: buffers that must live as long.
        change: what to make of the result once it is complete, for :meth:`wait` to return.
    """

    __slots__ = ("_change", "_finish", "_holds", "_result", "_works")

    def __init__(
        self,
        result: Any,
        works: Sequence[dist.Work | None] = (),
        finish: Callable[[], object] | None = None,
        holds: object = None,
        change: Callable[[Any], T] | None = None,
    ) -> None:
        self._result: Any = result
        self._works = works
        self._finish = finish
        self._holds = holds
        self._change = change

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
        if self._change is not None:
            change, self._change = self._change, None
            self._result = change(self._result)
        return cast("T", self._result)

    def incomplete(self) -> T:
        """The result, for whoever makes sure that nobody reads it before :meth:`wait`."""
        assert self._change is None, "a change is made of a complete result"
        return cast("T", self._result)

    def giving(self, result: U) -> AsyncResult[U]:
        """This, with another result: one that is complete when the first is."""
        self._result = result
        return cast("AsyncResult[U]", self)
