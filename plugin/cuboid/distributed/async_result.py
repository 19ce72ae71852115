"""A collective in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
U = TypeVar("U")


class AsyncResult(Generic[T]):
    """The future result of a collective, a ``T``.

    With NCCL the collective runs on a stream of its own, and :meth:`wait` makes the current stream wait, not the host.
    With gloo it runs in threads of its own.

    Args:
        result: complete only after :meth:`wait`.
        works: handles of torch.distributed; :meth:`wait` waits for all of them.
        finish: called once all works are done.
        holds: buffers to keep alive until then.
        change: function of the complete result, whose value :meth:`wait` returns.
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
        """Wait for the result. Later calls return it at once."""
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
        """The result before it is complete. The caller must make sure that it isn't read before :meth:`wait`."""
        assert self._change is None, "a change is made of a complete result"
        return cast("T", self._result)

    def giving(self, result: U) -> AsyncResult[U]:
        """The same collective with another result, which must be complete when the first one is."""
        self._result = result
        return cast("AsyncResult[U]", self)
