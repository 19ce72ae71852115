"""Counts the memory of tensors as an allocator would see it."""

import functools
import weakref
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cuboid.distributed.thread_ranks import ThreadGroup


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of all tensors made inside, now and at most.

    Args:
        before: tensors that were there before, of which operators return views.
    """

    def __init__(self, before=()):
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for x in before)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage() not in self._seen:
                storage = x.untyped_storage()
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size):
        self.now -= size


def fullest_moment(model, loss_of):
    """Bytes at the fullest moment of a backward; of the second one, which adds in place to gradients that are there."""
    for _ in range(2):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as live:
            loss = loss_of()
            live.most = live.now
            loss.backward()
            del loss
    return live.most


@contextmanager
def uncounted_exchanges():
    """What ranks that are threads copy for each other isn't counted: a backend has no such tensors."""
    names = ("allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single")
    names += ("_allgather_base", "alltoall_base")

    def without_modes(method):
        @functools.wraps(method)
        def run(*arguments):
            with _disable_current_modes():
                return method(*arguments)

        return run

    with ExitStack() as stack:
        for name in names:
            method = without_modes(getattr(ThreadGroup, name))
            stack.enter_context(mock.patch.object(ThreadGroup, name, method))
        yield
