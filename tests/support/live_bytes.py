"""Counts the memory of tensors as an allocator would see it."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of all tensors made inside, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet()

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
