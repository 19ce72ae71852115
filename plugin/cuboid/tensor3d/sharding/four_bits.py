"""Frozen weights that are stored in 4 bits and multiplied in more (QLoRA, arXiv 2305.14314).

:data:`BLOCK` consecutive elements of a row have one scale, their largest magnitude, and each is rounded to one of 16
values. Shards are cut at multiples of it, so that they are rounded as the whole weight is. bitsandbytes' operators
round and restore; whoever makes a :class:`FourBits` has imported it.
"""

from __future__ import annotations

import torch

#: Elements that have one scale: bitsandbytes' default, which transformers leaves as it is.
BLOCK = 64
#: Elements that are rounded at once. On a CPU, some versions take a float32 for each of the 16 values of each element.
_CHUNK = 1 << 20


class FourBits:
    """How the shards ``[rows, I]`` of one weight are stored.

    A shard is a row of bytes, and so is the message that gathers it: two elements in each byte, row after row, and then
    the scales in float32.

    Args:
        values: the 16 values, ``"nf4"`` or ``"fp4"``.
        dtype: what a block is restored in, to be multiplied.
        shape: of a shard; I is a multiple of :data:`BLOCK`.
    """

    def __init__(self, values: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.values, self.dtype = values, dtype
        self._height, self._width = shape
        #: Bytes of a shard's elements; those of its scales follow.
        self._bytes = self._height * self._width // 2

    def pack(self, shard: torch.Tensor) -> torch.Tensor:
        """Round a shard to its bytes."""
        elements, scales = [], []
        for rows in shard.split(max(1, _CHUNK // self._width)):
            rounded, largest = torch.ops.bitsandbytes.quantize_4bit(rows.contiguous(), BLOCK, self.values, torch.uint8)
            elements.append(rounded.flatten())
            scales.append(largest.float().flatten())
        return torch.cat([*elements, torch.cat(scales).view(torch.uint8)])

    def scales(self, packed: torch.Tensor) -> torch.Tensor:
        """The scales in a shard's bytes, ``[rows, I / BLOCK]``; a view."""
        return packed[self._bytes :].view(torch.float32).view(self._height, -1)

    def block(self, packed: torch.Tensor) -> torch.Tensor:
        """The shards' bytes ``[ranks, bytes]`` to the block that their rows make, ``[ranks · rows, I]``."""
        elements, scales = packed[:, : self._bytes], packed[:, self._bytes :]
        restored: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            elements.reshape(-1, 1),
            scales.contiguous().view(torch.float32).flatten(),
            BLOCK,
            self.values,
            (len(packed) * self._height, self._width),
            self.dtype,
        )
        return restored
