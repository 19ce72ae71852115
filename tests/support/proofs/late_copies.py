"""Copies between device and host that run as late as events allow, and NaN where they have yet to write.

Whoever reads a copy early finds NaN; whoever changes or frees a tensor under a running copy is found out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class _Copy:
    """A copy that was started, and runs once somebody waits for it."""

    name: str
    run: Callable[[], None] | None
    after: _Copy | None

    def finish(self) -> None:
        if self.after is not None:
            self.after.finish()
        if self.run is not None:
            self.run()
        self.run = self.after = None


class LateCopies:
    """Implements :class:`cuboid.seq1f1b.runtime.host_store.Copies`.

    Attributes:
        order: what was started and waited for; copies are numbered by the memory on the host.
    """

    def __init__(self, _: torch.device | None = None) -> None:
        self.order: list[str] = []
        self._numbers: dict[int, int] = {}

    def start_out(self, source: torch.Tensor, target: torch.Tensor, after: _Copy | None) -> _Copy:
        return self._start("out", source, target, target, after)

    def start_back(self, source: torch.Tensor, target: torch.Tensor, after: _Copy | None) -> _Copy:
        return self._start("back", source, target, source, after)

    def wait(self, event: _Copy) -> None:
        self.order.append(f"wait {event.name}")
        event.finish()

    def _start(
        self, what: str, source: torch.Tensor, target: torch.Tensor, host: torch.Tensor, after: _Copy | None
    ) -> _Copy:
        number = self._numbers.setdefault(host.untyped_storage().data_ptr(), len(self._numbers))
        name = f"{what} {number}"
        self.order.append(name)
        if after is not None and what == "out":
            # The memory may still be read by the copy before, which must come first.
            after.finish()
        on_device = source if what == "out" else target
        target.fill_(float("nan"))
        return _Copy(name, _late(what, host, weakref.ref(on_device), name), after)


def _late(what: str, host: torch.Tensor, device: weakref.ref[torch.Tensor], name: str) -> Callable[[], None]:
    def run() -> None:
        tensor = device()
        assert tensor is not None, f"the device's memory was freed under the copy {name}"
        if what == "out":
            host.copy_(tensor)
        else:
            tensor.copy_(host)

    return run
