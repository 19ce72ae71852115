"""A device that every operation synchronises, whose sends and receives are kernels: what CUDA does at its worst.

A kernel that isn't loaded yet, an allocation for which cached memory is freed, the first collective of a group: each
makes the host wait until all that the device has begun is through, messages included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.models.pipeline import training_pipeline as pipeline
from cuboid.seq1f1b.runtime.p2p import Arrival, Channel


class _Message:
    """A message that is on its way, until somebody has waited for it; gloo's can be waited for once only."""

    def __init__(self, work: dist.Work, device: SynchronisedDevice) -> None:
        self._work, self._device = work, device
        self._device.under_way.append(self)

    def is_completed(self) -> bool:
        return self not in self._device.under_way

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.is_completed():
            self._work.wait(*([] if timeout is None else [timeout]))
            self._device.under_way.remove(self)


class _WatchedChannel(Channel):
    """Tells a device of what it sends and receives."""

    def __init__(self, device: SynchronisedDevice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._device = device

    def post_receive(self, *arguments: Any) -> Arrival:
        arrival = super().post_receive(*arguments)
        arrival._work = _Message(arrival._work, self._device)  # type: ignore[assignment]
        return arrival

    def send(self, tensor: torch.Tensor) -> None:
        super().send(tensor)
        work, sent = self._sending.pop()
        self._sending.append((_Message(work, self._device), sent))  # type: ignore[arg-type]


class SynchronisedDevice(TorchDispatchMode):
    """Inside, pipelines' messages are kernels, and operations of this thread synchronise the device.

    Args:
        first_only: whether only the first operation of each kind and shape does so: the one that loads a kernel.
        timeout_s: after which a message that hasn't come never will.

    Attributes:
        under_way: messages.
        synchronised: operations that found some.
    """

    def __init__(self, *, first_only: bool = False, timeout_s: float = 20.0) -> None:
        super().__init__()
        self.under_way: list[_Message] = []
        self.synchronised = 0
        self._first_only, self._timeout = first_only, timedelta(seconds=timeout_s)
        self._known: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or func._schema.name.split("::")[1] not in ("send", "recv_"):
            shapes = tuple(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))
            if not self._first_only or (func, shapes) not in self._known:
                self._known.add((func, shapes))
                self.synchronise(func)
        return func(*args, **(kwargs or {}))

    def synchronise(self, what: object) -> None:
        """Wait for all messages that are under way.

        Raises:
            AssertionError: one of them doesn't come.
        """
        self.synchronised += bool(self.under_way)
        for message in list(self.under_way):
            try:
                message.wait(self._timeout)
            except RuntimeError as error:
                raise AssertionError(f"{what} waits for ever: a message that is under way doesn't come") from error

    @contextmanager
    def in_use(self) -> Iterator[SynchronisedDevice]:
        """Pipelines that are made inside run on this device."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "Channel", lambda *arguments: _WatchedChannel(self, *arguments))
            with self:
                yield self
