"""How many bytes this rank keeps for backward: what autograd saved, and the keys and values that segments share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType

import torch

from cuboid.seq1f1b.attention.kv_cache import KVCachePool


class MeteredPool(KVCachePool):
    """A pool of which it is known what is in use."""

    def __init__(self) -> None:
        super().__init__()
        self._used_bytes: dict[int, int] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :class:`~cuboid.seq1f1b.attention.kv_cache.KVCachePool`."""
        buffer = super().take(shape, dtype, device)
        self._used_bytes[storage_id(buffer)] = buffer.untyped_storage().nbytes()
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """See :class:`~cuboid.seq1f1b.attention.kv_cache.KVCachePool`."""
        del self._used_bytes[storage_id(buffer)]
        super().give(buffer)

    def holds(self, place: int) -> bool:
        """Whether the storage of this id is a buffer in use."""
        return place in self._used_bytes

    @property
    def used_bytes(self) -> int:
        """Of all buffers in use."""
        return sum(self._used_bytes.values())


class _Saved:
    """What a graph holds in place of a tensor that it saved. The storage counts until the last of these is gone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: a graph that holds one of its own outputs would never be freed.
        self.tensor = tensor.detach()


class LiveActivations:
    """Counts, inside a ``with``, the bytes of activations that are alive because a backward is still to come.

    Whole storages are counted, each once, however many views of it are saved; from the first save until the last graph
    that needs it is freed. Tensors that don't go through autograd (a chunk of logits while it is worked on, buffers of
    messages) aren't seen. Use it on one rank at a time, around a step from its beginning to its end; measured steps are
    a little slower.

    Args:
        parameters: not to be counted, though graphs save them.
        pool: of the key/value stores, whose buffers count as long as they are in use.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], pool: MeteredPool | None = None) -> None:
        self._excluded = {storage_id(parameter) for parameter in parameters}
        self._pool = pool
        #: By storage: bytes, and how many saved tensors share them.
        self._live: dict[int, list[int]] = {}
        self._saved_bytes = 0
        #: The most bytes so far.
        self.peak_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def live_bytes(self) -> int:
        """Bytes at present."""
        if self._pool is None:
            return self._saved_bytes
        shared = sum(size for place, (size, _) in self._live.items() if self._pool.holds(place))
        return self._saved_bytes - shared + self._pool.used_bytes

    def __enter__(self) -> LiveActivations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        place = storage_id(tensor)
        if place not in self._excluded:
            self._add(place, tensor.untyped_storage().nbytes())
            weakref.finalize(saved, self._remove, place)
        return saved

    @staticmethod
    def _unpack(saved: _Saved) -> torch.Tensor:
        return saved.tensor

    def _add(self, place: int, size: int) -> None:
        entry = self._live.setdefault(place, [size, 0])
        entry[1] += 1
        if entry[1] == 1:
            self._saved_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, place: int) -> None:
        entry = self._live[place]
        entry[1] -= 1
        if entry[1] == 0:
            self._saved_bytes -= entry[0]
            del self._live[place]


def storage_id(tensor: torch.Tensor) -> int:
    """Tells storages apart that are alive at the same time, also those that have no memory."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return, unused-ignore]
