"""Keys and values of one micro-batch on one stage, for the segments to come, and the gradients that those send back.

Buffers hold the whole sequence and are written in place, each segment at its own positions. Autograd keeps views of
them between a segment's forward and its backward, in which time later segments are written elsewhere in the same
buffer. Writes therefore go through ``.data``, which doesn't count as a change of the views.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch

from cuboid.errors import UnsupportedModelError
from cuboid.seq1f1b.attention.recurrent_states import RecurrentStates

#: What gradients of keys and values are added up in: at least float32, or the dtype of the keys and values.
GradientDtype = Literal["fp32", "parameter"]
_Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class KVCachePool:
    """Buffers that are free to be used again.

    There are never more of one kind (heads, head dim, dtype, device) than were once in use at the same time: a free
    buffer of another length is freed before a new one is allocated.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[torch.Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer ``[B, H, S, D]`` with anything in it."""
        free = self._free.setdefault(_kind(shape, dtype, device), [])
        for index, buffer in enumerate(free):
            if buffer.shape == shape:
                return free.pop(index)
        if free:
            free.pop(0)
        return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. Nothing may read or write it afterwards."""
        self._free.setdefault(_kind(buffer.shape, buffer.dtype, buffer.device), []).append(buffer)

    @property
    def free_bytes(self) -> int:
        """Of all buffers that wait here."""
        return sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)


def _kind(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Kind:
    return (shape[1], *shape[3:]), dtype, device


@dataclass
class _Layer:
    """Keys first, values second, of all positions up to ``stop``. Gradients are there from the first backward on that
    has a past."""

    buffers: tuple[torch.Tensor, torch.Tensor]
    stop: int = 0
    gradients: tuple[torch.Tensor, torch.Tensor] | None = None


class KVCache:
    """Keys and values of every layer of one stage, for one micro-batch.

    Args:
        length: S, positions of the whole sequence with its padding.
        pool: where buffers come from and go to.
        gradients: what gradients are added up in.

    Attributes:
        states: what recurrent layers hand from segment to segment.
    """

    def __init__(self, length: int, pool: KVCachePool, gradients: GradientDtype = "fp32") -> None:
        self.length = length
        self._pool = pool
        self._gradients = gradients
        self._layers: dict[Hashable, _Layer] = {}
        self.states = RecurrentStates()

    def write(self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a segment's keys and values in their place. A recompute writes the same once more, which changes nothing.

        Args:
            layer: names a layer of this stage.
            start: position of the first of the L that are given.
            key: ``[B, Hkv, L, D]``.
            value: ``[B, Hkv, L, Dv]``.

        Raises:
            UnsupportedModelError: there are positions before that were never written.
        """
        entry = self._layers.get(layer)
        if entry is None:
            entry = self._layers[layer] = _Layer((self._allocate(key), self._allocate(value)))
        if start > entry.stop:
            raise UnsupportedModelError(
                f"a layer attends in the segment from position {start} on as it didn't in the segments before, whose "
                'keys and values are missing; write "segments": 1'
            )
        entry.stop = max(entry.stop, start + key.shape[2])
        for buffer, part in zip(entry.buffers, (key, value), strict=True):
            buffer.data[:, :, start : start + part.shape[2]].copy_(part.detach())

    def read(self, layer: Hashable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, Hkv, stop - start, D]`` of some positions, not copied."""
        key, value = self._layers[layer].buffers
        # Twice ``.data``: neither a view in autograd's sense, nor changed by what is written later.
        return key.data[:, :, start:stop].data, value.data[:, :, start:stop].data

    def add_gradients(self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add what a segment sends back to the keys and values before it.

        Args:
            layer: as for :meth:`write`.
            start: position of the first.
            key: ``[B, Hkv, past, D]``, may be empty.
            value: ``[B, Hkv, past, Dv]``.
        """
        if key.shape[2] == 0:
            return
        entry = self._layers[layer]
        if entry.gradients is None:
            buffers = entry.buffers
            entry.gradients = (self._allocate_gradient(buffers[0]), self._allocate_gradient(buffers[1]))
        for total, part in zip(entry.gradients, (key, value), strict=True):
            total[:, :, start : start + part.shape[2]].add_(part)

    def with_gradients(
        self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole gradients of a segment's own keys and values.

        Segments run backward in reverse order, so those of all later segments are in by now.

        Args:
            layer, start: as for :meth:`write`.
            key: ``[B, Hkv, L, D]``, what the segment's own positions contributed.
            value: ``[B, Hkv, L, Dv]``.
        """
        gradients = self._layers[layer].gradients
        if gradients is None:
            return key, value
        whole = [
            (total[:, :, start : start + own.shape[2]] + own).to(own.dtype)
            for total, own in zip(gradients, (key, value), strict=True)
        ]
        return whole[0], whole[1]

    def free_layer(self, layer: Hashable) -> None:
        """Give a layer's buffers back, if it has any: its first segment's backward is done."""
        entry = self._layers.pop(layer, None)
        if entry is not None:
            for buffer in (*entry.buffers, *(entry.gradients or ())):
                self._pool.give(buffer)

    def free(self) -> None:
        """Give all buffers back: the micro-batch is done, or was only evaluated."""
        for layer in list(self._layers):
            self.free_layer(layer)
        self.states.free()

    @property
    def held_bytes(self) -> int:
        """Of all buffers in use."""
        entries = self._layers.values()
        own = sum(buffer.nbytes for e in entries for buffer in (*e.buffers, *(e.gradients or ())))
        return own + self.states.held_bytes

    def _allocate(self, part: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*part.shape[:2], self.length, part.shape[3]))
        return self._pool.take(shape, part.dtype, part.device)

    def _allocate_gradient(self, buffer: torch.Tensor) -> torch.Tensor:
        widen = self._gradients == "fp32" and buffer.dtype.itemsize < torch.float32.itemsize
        dtype = torch.float32 if widen else buffer.dtype
        return self._pool.take(buffer.shape, dtype, buffer.device).zero_()
