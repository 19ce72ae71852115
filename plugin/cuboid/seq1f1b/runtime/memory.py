"""Measures the bytes that this rank keeps for backward: tensors saved by autograd, and buffers of KV caches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType

import torch

from cuboid.seq1f1b.attention.kv_cache import KVCachePool


class MeteredPool(KVCachePool):
    """A pool that keeps track of the buffers in use.

    Attributes:
        on_take: called after each :meth:`take`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_take: Callable[[], None] = _do_nothing
        self._used_bytes: dict[int, int] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :class:`~cuboid.seq1f1b.attention.kv_cache.KVCachePool`."""
        buffer = super().take(shape, dtype, device)
        self._used_bytes[storage_id(buffer)] = buffer.untyped_storage().nbytes()
        self.on_take()
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """See :class:`~cuboid.seq1f1b.attention.kv_cache.KVCachePool`."""
        del self._used_bytes[storage_id(buffer)]
        super().give(buffer)

    def holds(self, place: int) -> bool:
        """Whether the storage with this id is a buffer in use."""
        return place in self._used_bytes

    @property
    def used_bytes(self) -> int:
        """Total size of all buffers in use."""
        return sum(self._used_bytes.values())


class _SavedTensor:
    """Held by the autograd graph in place of a saved tensor. A storage counts until its last holder is freed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a graph node that holds its own output with its history would be a reference cycle, never freed.
        self.tensor = tensor.detach()


class LiveActivations:
    """Context manager that counts the bytes of activations that are alive because their backward is still to come.

    Whole storages are counted, each one once no matter how many views of it are saved, from the first save until the
    last graph that needs it is freed. Tensors that aren't saved by autograd (the current chunk of logits, buffers of
    messages) aren't counted. Use it on one rank at a time, around a whole step; it slows the step down a little.

    Args:
        parameters: tensors that aren't counted, although graphs save them.
        pool: provides the KV caches' buffers, which count as long as they are in use.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], pool: MeteredPool | None = None) -> None:
        self._excluded = {storage_id(parameter) for parameter in parameters}
        self._pool = pool
        #: By storage id: its bytes, and the number of saved tensors that share it.
        self._live: dict[int, list[int]] = {}
        self._saved_bytes = 0
        #: Maximum of :attr:`live_bytes` so far, updated whenever autograd saves a tensor or a buffer is taken from the
        #: pool: the gradients of keys and values take theirs in backward.
        self.peak_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now."""
        if self._pool is None:
            return self._saved_bytes
        # Buffers of the pool that graphs save too would count twice.
        shared = sum(size for place, (size, _) in self._live.items() if self._pool.holds(place))
        return self._saved_bytes - shared + self._pool.used_bytes

    def __enter__(self) -> LiveActivations:
        self._hooks.__enter__()
        if self._pool is not None:
            self._pool.on_take = self._note_peak
            self._note_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.on_take = _do_nothing
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        place = storage_id(tensor)
        if place not in self._excluded:
            self._add(place, tensor.untyped_storage().nbytes())
            weakref.finalize(saved, self._remove, place)
        return saved

    @staticmethod
    def _unpack(saved: _SavedTensor) -> torch.Tensor:
        return saved.tensor

    def _add(self, place: int, size: int) -> None:
        entry = self._live.setdefault(place, [size, 0])
        entry[1] += 1
        if entry[1] == 1:
            self._saved_bytes += size
        self._note_peak()

    def _remove(self, place: int) -> None:
        entry = self._live[place]
        entry[1] -= 1
        if entry[1] == 0:
            self._saved_bytes -= entry[0]
            del self._live[place]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _do_nothing() -> None:
    pass


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id that is unique among the living storages, even those without memory, unlike ``data_ptr``."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return, unused-ignore]
