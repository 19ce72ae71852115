"""Rows in fp8 with their scales: what stands for a tensor in bf16 where both have been found already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import start_all_gather
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.fp8 import rowwise

#: Bytes of a scale.
SCALE_BYTES = 4


class Quantized:
    """Rows ``[..., K]`` in fp8 and their scales ``[..., 1]``, of which views are taken together.

    It has those of a tensor's methods that :mod:`cuboid.tensor3d.layers.output_reduce` calls.
    """

    __slots__ = ("scales", "values")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self.values, self.scales = values, scales

    @property
    def shape(self) -> torch.Size:
        """Of the rows."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Of both."""
        return self.values.device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> Quantized:
        return Quantized(self.values[index], self.scales[index])

    def stride(self, dim: int) -> int:
        """Of the rows; not of the last dim."""
        return self.values.stride(dim)

    def new_empty(self, size: Sequence[int]) -> torch.Tensor:
        """For a product."""
        return self.values.new_empty(size, dtype=torch.bfloat16)

    def unbind(self) -> list[Quantized]:
        """Along the first dim."""
        return [Quantized(*pair) for pair in zip(self.values.unbind(), self.scales.unbind(), strict=True)]

    def flatten(self, start: int, end: int) -> Quantized:
        """Dims before the last one."""
        return self._both(lambda x: x.flatten(start, end))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Quantized:
        """A dim before the last one."""
        return self._both(lambda x: x.unflatten(dim, sizes))

    def unsqueeze(self, dim: int) -> Quantized:
        """As of a tensor."""
        return self._both(lambda x: x.unsqueeze(dim))

    def transpose(self, dim: int, other: int) -> Quantized:
        """Dims before the last one."""
        return self._both(lambda x: x.transpose(dim, other))

    def movedim(self, source: int, target: int) -> Quantized:
        """Dims before the last one."""
        return self._both(lambda x: x.movedim(source, target))

    def narrow(self, dim: int, start: int, length: int) -> Quantized:
        """A dim before the last one."""
        return self._both(lambda x: x.narrow(dim, start, length))

    def expand(self, *sizes: int) -> Quantized:
        """Dims before the last one, whose size is -1."""
        return self._both(lambda x: x.expand(*sizes))

    def _both(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
        return Quantized(change(self.values), change(self.scales))


def packed(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Rows in fp8 and their scales as one message of bytes: all rows, whose number of bytes is a multiple of 16, then
    all scales.
    """
    tensors = [values for values, _ in parts] + [scales for _, scales in parts]
    return torch.cat([tensor.view(torch.uint8).flatten() for tensor in tensors])


def unpacked(slots: torch.Tensor, shapes: Sequence[Sequence[int]], scales: Sequence[int]) -> list[Quantized]:
    """The ranks' messages ``[ranks, bytes]`` as what was packed, views ``[ranks, *shape]`` and ``[ranks, rows, n]``.

    Args:
        slots: the messages.
        shapes: of the rows.
        scales: for each of them, how many a row has; with several their dim is the last one.
    """
    sizes, rows = [], [torch.Size(shape[:-1]).numel() for shape in shapes]
    for count, shape in zip(rows, shapes, strict=True):
        sizes.append(count * shape[-1])
    sizes += [SCALE_BYTES * count * number for count, number in zip(rows, scales, strict=True)]
    parts = slots.split(sizes, 1)
    results = []
    for place, (shape, number) in enumerate(zip(shapes, scales, strict=True)):
        values = parts[place].view(rowwise.DTYPE).unflatten(1, tuple(shape))
        of_rows = parts[len(shapes) + place].view(torch.float32)
        results.append(Quantized(values, of_rows.unflatten(1, (*shape[:-1], number))))
    return results


def start_gather(
    tensors: Sequence[torch.Tensor], along: AxisGroup, change: Callable[[list[Quantized]], Any]
) -> AsyncResult[Any]:
    """Round the rows of some tensors ``[..., K]``, and stack those of all ranks, as one all-gather.

    A row's scale depends on nothing but the row, so this gives the bits that rounding the gathered rows would give.

    Args:
        tensors: this rank's.
        along: the ranks.
        change: function of what was gathered, ``[ranks, ..., K]`` for each tensor, whose value is the result.
    """
    shapes = [x.shape for x in tensors]
    message = packed([rowwise.quantize(x.flatten(0, -2)) for x in tensors])
    return start_all_gather(message, along, lambda slots: change(unpacked(slots, shapes, [1] * len(shapes))))
