"""Collectives that are late, on a stream of their own, with NaN in their results until they are waited for.

NCCL runs them so; its ranks can't share one GPU, and messages that go through the host wait for it. Here the other
ranks of a pretended world have what this one has, so that a step in time and a late one must give the same. Whoever
reads a result early finds NaN, and whoever changes or frees an input early changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from proofs.replaced import replaced_collectives

#: How long a collective takes, in cycles of the device: about a millisecond.
_CYCLES = 2_000_000


class _Late:
    """A collective that was started.

    Args:
        outs: parts of its results, now NaN.
        compute: writes the results.
        device: of all.
        side: the stream for it on CUDA. Elsewhere it computes only when it is waited for.
        holds: what no caller has, and must live until then.
    """

    def __init__(
        self,
        outs: Sequence[torch.Tensor],
        compute: Callable[[], object],
        device: torch.device,
        side: Any,
        holds: object = None,
    ) -> None:
        for out in outs:
            out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)
        self._compute: Callable[[], object] | None = compute
        self._holds = holds
        if side is None:
            return
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(_CYCLES)
            compute()
            self._over = torch.cuda.Event()
            self._over.record(side)
        # It is under way, and keeps nothing of the caller's alive.
        self._compute = None
        self._device = device

    def wait(self, timeout: Any = None) -> bool:
        if self._compute is not None:
            self._compute()
            self._compute = None
        elif hasattr(self, "_over"):
            torch.cuda.current_stream(self._device).wait_event(self._over)
        return True


@contextmanager
def mirrored(device: torch.device, *, late: bool) -> Iterator[list[str]]:
    """Inside, all other ranks of a world that there isn't have what this one has.

    A sum has this rank's term only, so that numbers stay as large as they are.

    Args:
        device: of all tensors.
        late: whether collectives are late; else they are through when they return.

    Yields:
        The names of those that were started.
    """
    side = torch.cuda.Stream(device) if late and device.type == "cuda" else None
    started: list[str] = []

    def start(
        name: str,
        outs: Sequence[torch.Tensor],
        compute: Callable[[], object],
        is_async: bool,
        holds: object = None,
    ) -> _Late | None:
        started.append(name)
        if not late:
            compute()
            return _Late((), lambda: None, device, None) if is_async else None
        work = _Late(outs, compute, device, side, holds)
        return work if is_async else work.wait() and None

    def gather(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        places = list(out.view(group.size(), -1).unbind())
        # The rank's own part may lie in its place already, and stays there.
        others = [place for place in places if place.data_ptr() != x.data_ptr()]
        return start("all-gather", others, lambda: [place.copy_(x.view(-1)) for place in others], async_op)

    def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        block = x.view(group.size(), -1)[group.rank()]
        return start("reduce-scatter", [out], lambda: out.view(-1).copy_(block), async_op)

    def all_to_all(out: torch.Tensor, x: torch.Tensor, *_: Any, group: Any = None, async_op: bool = False) -> Any:
        block = x.view(group.size(), -1)[group.rank()]
        return start("all-to-all", [out], lambda: out.view(group.size(), -1).copy_(block), async_op)

    def all_reduce(x: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        value = x.clone()
        return start("all-reduce", [x], lambda: x.copy_(value), async_op, value)

    with replaced_collectives(gather, reduce_scatter, all_to_all, all_reduce):
        yield started
