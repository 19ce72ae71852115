"""A backend whose collectives never end by themselves, as NCCL's don't where a rank is gone; aborting it ends them."""

import threading

import torch.distributed as dist


class StuckWork(dist.Work):
    """Of a collective for which some rank never comes."""

    def __init__(self, aborted: threading.Event) -> None:
        super().__init__()
        self._aborted = aborted

    def wait(self, timeout=None):
        self._aborted.wait()
        raise RuntimeError("NCCL communicator was aborted on rank 1.")


class StuckGroup(dist.ProcessGroup):
    """All of whose all-reduces are stuck."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._aborted = threading.Event()

    def allreduce(self, tensors, opts=None):
        return StuckWork(self._aborted)

    def abort(self):
        self._aborted.set()

    def getBackendName(self):
        return "stuck"


def register() -> None:
    """Make ``"stuck"`` known as a backend."""
    dist.Backend.register_backend("stuck", lambda _store, rank, size, _timeout: StuckGroup(rank, size), devices=["cpu"])
