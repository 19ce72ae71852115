"""A process group for several ranks on one GPU: gloo, with every message staged through the host.

NCCL allows only one rank per GPU, and gloo has few collectives for GPU tensors. This group has all collectives that
Cuboid and the frameworks call, so that a mesh can run on a single GPU: kernels, streams and autograd's threads are
real, and only the times of communication are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

#: Name of the backend in ``torch.distributed``.
STAGED = "staged"


def register_staged() -> None:
    """Register the backend with ``torch.distributed``. Later calls do nothing."""
    if not hasattr(dist.Backend, STAGED.upper()):
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])


class _StagedWork(dist.Work):
    """A collective whose results are on the device only after :meth:`wait`."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish
        self._is_finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Wait for gloo, and copy the results to the device."""
        if not self._is_finished:
            self._work.wait()
            self._finish()
            self._is_finished = True
        return True

    def is_completed(self) -> bool:
        """Whether gloo has finished; the copy to the device happens in :meth:`wait`."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether gloo succeeded."""
        return bool(self._work.is_success())


#: As ``Any``, because its methods are overloaded in C++, of which subclasses in Python, torch's own too, override one
#: form each.
_ProcessGroup: Any = dist.ProcessGroup


class StagedGroup(_ProcessGroup):
    """See the module. CPU tensors are handed to gloo directly."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo = gloo
        # torch 2.13 has other names for these than earlier versions.
        self._all_gather_single = getattr(gloo, "all_gather_single", None) or gloo._allgather_base
        self._reduce_scatter_single = getattr(gloo, "reduce_scatter_single", None) or gloo._reduce_scatter_base
        self._all_to_all_single = getattr(gloo, "all_to_all_single", None) or gloo.alltoall_base

    def getBackendName(self) -> str:
        """Name of the backend."""
        return STAGED

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002
        # For code that reads the backend's timeout.
        return self._gloo

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has to go through the host."""
        return tensor.device.type != "cpu"

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        """Broadcast in place."""
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        """All-reduce in place."""
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts))

    def allgather(
        self, outs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any
    ) -> dist.Work:
        """All-gather into one list of tensors for each input."""
        hosts = [[self._empty(x) for x in of_input] for of_input in outs]
        work = self._gloo.allgather(hosts, self._to_host(tensors), opts)
        flat = [x for of_input in outs for x in of_input]
        return self._returning(work, flat, [x for of_input in hosts for x in of_input])

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """All-gather into one tensor, rank after rank."""
        host = self._empty(out)
        work = self._all_gather_single(host, self._to_host([tensor])[0], opts)
        return self._returning(work, [out], [host])

    def gather(self, outs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        """Gather into one list of tensors on the destination rank; ``outs`` is empty on the others."""
        hosts = [[self._empty(x) for x in of_input] for of_input in outs]
        work = self._gloo.gather(hosts, self._to_host(tensors), opts)
        flat = [x for of_input in outs for x in of_input]
        return self._returning(work, flat, [x for of_input in hosts for x in of_input])

    def scatter(self, outs: Sequence[torch.Tensor], tensors: Sequence[Sequence[torch.Tensor]], opts: Any) -> dist.Work:
        """Scatter one list of tensors from the source rank; ``tensors`` is empty on the others."""
        hosts = [self._empty(x) for x in outs]
        work = self._gloo.scatter(hosts, [self._to_host(tensor) for tensor in tensors], opts)
        return self._returning(work, outs, hosts)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        """Reduce in place."""
        return self._in_place(tensors, lambda host: self._gloo.reduce(host, opts))

    def reduce_scatter(
        self, outs: Sequence[torch.Tensor], tensors: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> dist.Work:
        """Reduce-scatter one list of tensors into each output."""
        hosts = [self._empty(x) for x in outs]
        work = self._gloo.reduce_scatter(hosts, [self._to_host(tensor) for tensor in tensors], opts)
        return self._returning(work, outs, hosts)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """Reduce-scatter one tensor, cut into a slice per rank."""
        host = self._empty(out)
        work = self._reduce_scatter_single(host, self._to_host([tensor])[0], opts)
        return self._returning(work, [out], [host])

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: list[int] | None, sizes: list[int] | None, opts: Any
    ) -> dist.Work:
        """Exchange slices of one tensor, of the given sizes or else of equal ones."""
        host = self._empty(out)
        work = self._all_to_all_single(host, self._to_host([tensor])[0], out_sizes or [], sizes or [], opts)
        return self._returning(work, [out], [host])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: Sequence[torch.Tensor], target: int, tag: int) -> dist.Work:
        """Send to one rank."""
        return self._gloo.send(self._to_host(tensors), target, tag)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Receive from one rank."""
        hosts = [self._empty(x) for x in tensors]
        return self._returning(self._gloo.recv(hosts, source, tag), tensors, hosts)

    def barrier(self, opts: Any) -> dist.Work:
        """Synchronize the processes; kernels that they launched before may still be running."""
        return self._gloo.barrier(opts)

    def _in_place(self, tensors: Sequence[torch.Tensor], start: Callable[[list[torch.Tensor]], dist.Work]) -> dist.Work:
        hosts = self._to_host(tensors)
        return self._returning(start(hosts), tensors, hosts)

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The copy blocks until the current stream has computed the tensor.
        return [x.to("cpu", copy=True) if self.is_staged(x) else x for x in tensors]

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu") if self.is_staged(tensor) else tensor

    def _returning(self, work: dist.Work, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> dist.Work:
        """``work``; if any tensor was staged, waiting for it also copies the results from the host."""
        pairs = [(x, host) for x, host in zip(tensors, hosts, strict=True) if self.is_staged(x)]
        if not pairs:
            return work

        def finish() -> None:
            # Through ``.data``, which leaves the version counter alone: autograd would take a new version for an
            # in-place change of a saved tensor.
            for x, host in pairs:
                x.data.copy_(host)

        return _StagedWork(work, finish)
