"""The KV cache: keys and values of one micro-batch on one stage, and the gradients that later segments add to them.

A buffer holds the whole sequence, and each segment writes its own positions in place. Between a segment's forward and
its backward, autograd keeps views of the buffer while later segments write to other positions of it. Writes therefore
go through ``.data``, which doesn't increment the version counter that autograd checks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch

from cuboid.errors import UnsupportedModelError
from cuboid.seq1f1b.attention.recurrent_states import RecurrentStates

#: Dtype in which gradients of keys and values are summed: at least float32, or the dtype of the keys and values.
GradientDtype = Literal["fp32", "parameter"]
_Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class KVCachePool:
    """A pool of reusable buffers.

    For each kind (heads, head dim, dtype, device) it never holds more buffers than were in use at the same time: when
    no free buffer has the shape that is needed, one of another length is released before a new one is allocated.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[torch.Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer ``[B, H, S, D]``."""
        free = self._free.setdefault(_kind(shape, dtype, device), [])
        for index, buffer in enumerate(free):
            if buffer.shape == shape:
                return free.pop(index)
        if free:
            free.pop(0)
        # A normal tensor also where inference mode is on: training may take the buffer after an evaluation.
        with torch.inference_mode(mode=False):
            return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool. It must not be used afterwards."""
        self._free.setdefault(_kind(buffer.shape, buffer.dtype, buffer.device), []).append(buffer)


def _kind(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Kind:
    return (shape[1], *shape[3:]), dtype, device


@dataclass
class _Layer:
    """Keys and values of all positions before ``stop``, and their gradients from later segments, once there are any."""

    buffers: tuple[torch.Tensor, torch.Tensor]
    stop: int = 0
    gradients: tuple[torch.Tensor, torch.Tensor] | None = None


class KVCache:
    """Keys and values of every layer of one stage, for one micro-batch.

    Args:
        length: S, positions of the whole sequence including padding.
        pool: provides the buffers.
        gradients: dtype in which gradients are summed.

    Attributes:
        states: the recurrent layers' states, which are passed from segment to segment.
    """

    def __init__(self, length: int, pool: KVCachePool, gradients: GradientDtype = "fp32") -> None:
        self.length = length
        self._pool = pool
        self._gradients = gradients
        self._layers: dict[Hashable, _Layer] = {}
        self.states = RecurrentStates()

    def write(self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a segment's keys and values. A recomputed forward writes the same values again.

        Args:
            layer: identifies a layer of this stage.
            start: the first of the segment's L positions.
            key: ``[B, Hkv, L, D]``.
            value: ``[B, Hkv, L, Dv]``.

        Raises:
            UnsupportedModelError: earlier positions were never written.
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
        """Return keys ``[B, Hkv, stop - start, D]`` and values (with Dv) of some positions, without a copy."""
        key, value = self._layers[layer].buffers
        # The second ``.data`` gives the slice a version counter of its own, which later writes don't change.
        return key.data[:, :, start:stop].data, value.data[:, :, start:stop].data

    def add_gradients(self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the gradients that a segment's queries give to the keys and values before it.

        Args:
            layer: as for :meth:`write`.
            start: the first position that the gradients are for.
            key: ``[B, Hkv, past, D]``, may be empty.
            value: ``[B, Hkv, past, Dv]``.
        """
        if key.shape[2] == 0:
            return
        entry = self._layers[layer]
        if entry.gradients is None:
            of_key, of_value = entry.buffers
            entry.gradients = self._first_gradient(of_key, start, key), self._first_gradient(of_value, start, value)
            return
        for total, part in zip(entry.gradients, (key, value), strict=True):
            total[:, :, start : start + part.shape[2]].add_(part)

    def with_gradients(
        self, layer: Hashable, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the complete gradients of a segment's own keys and values, in their shapes.

        Segments run backward in reverse order, so all later segments have already added their part.

        Args:
            layer, start: as for :meth:`write`.
            key: ``[B, Hkv, L, D]``, the gradient from the segment's own queries.
            value: ``[B, Hkv, L, Dv]``, likewise.
        """
        gradients = self._layers[layer].gradients
        if gradients is None:
            return key, value
        complete = [
            (total[:, :, start : start + gradient.shape[2]] + gradient).to(gradient.dtype)
            for total, gradient in zip(gradients, (key, value), strict=True)
        ]
        return complete[0], complete[1]

    def free_layer(self, layer: Hashable) -> None:
        """Return a layer's buffers, if any, to the pool; called after its first segment's backward, the last to run."""
        entry = self._layers.pop(layer, None)
        if entry is not None:
            for buffer in (*entry.buffers, *(entry.gradients or ())):
                self._pool.give(buffer)

    def free(self) -> None:
        """Return all buffers to the pool; called when the micro-batch is done."""
        for layer in list(self._layers):
            self.free_layer(layer)
        self.states.free()

    @property
    def held_bytes(self) -> int:
        """Total size of all buffers and states in use."""
        entries = self._layers.values()
        buffer_bytes = sum(buffer.nbytes for e in entries for buffer in (*e.buffers, *(e.gradients or ())))
        return buffer_bytes + self.states.held_bytes

    def _allocate(self, part: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*part.shape[:2], self.length, part.shape[3]))
        return self._pool.take(shape, part.dtype, part.device)

    def _first_gradient(self, buffer: torch.Tensor, start: int, part: torch.Tensor) -> torch.Tensor:
        """Allocate the gradient of a buffer: ``part`` from position ``start`` on, and 0 elsewhere."""
        widen = self._gradients == "fp32" and buffer.dtype.itemsize < torch.float32.itemsize
        dtype = torch.float32 if widen else buffer.dtype
        total, stop = self._pool.take(buffer.shape, dtype, buffer.device), start + part.shape[2]
        total[:, :, start:stop] = part
        for other_positions in (total[:, :, :start], total[:, :, stop:]):
            other_positions.zero_()
        return total
