"""Frozen weights that are stored in 4 bits and multiplied in more (QLoRA, arXiv 2305.14314).

:data:`BLOCK` consecutive elements of a weight, row after row, have one scale, their largest magnitude, and each is
rounded to one of 16 values. Shards are cut at multiples of it, so that they are rounded as the whole weight is.
bitsandbytes' operators round and restore; whoever makes a :class:`FourBits` has imported it.
"""

from __future__ import annotations

import math

import torch

from cuboid.distributed.topology import MeshShape
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec

#: Elements that have one scale: bitsandbytes' default, which transformers leaves as it is.
BLOCK = 64
#: Elements that are rounded at once. On a CPU, some versions take a float32 for each of the 16 values of each element.
_CHUNK = 1 << 16


class FourBits:
    """How the shards ``[rows, I]`` of one weight are stored.

    A shard is a row of bytes, and so is the message that gathers it: two elements in each byte, row after row, and then
    the scales in float32.

    Args:
        values: the 16 values, ``"nf4"`` or ``"fp4"``.
        restored: the dtype that the elements had, in which they are restored.
        dtype: what a block is cast to then, to be multiplied.
        shape: of a shard, whose elements are a multiple of :data:`BLOCK`.
    """

    def __init__(self, values: str, restored: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.values, self.restored, self.dtype = values, restored, dtype
        self._height, self._width = shape
        #: Bytes of a shard's elements; those of its scales follow.
        self._bytes = math.prod(shape) // 2

    @property
    def nbytes(self) -> int:
        """Bytes of a shard."""
        return self._bytes + self._bytes * 2 // BLOCK * torch.float32.itemsize

    def pack(self, shard: torch.Tensor) -> torch.Tensor:
        """Round a shard to its bytes."""
        elements, scales = [], []
        for part in shard.flatten().split(_CHUNK):
            rounded, largest = torch.ops.bitsandbytes.quantize_4bit(part, BLOCK, self.values, torch.uint8)
            elements.append(rounded.flatten())
            scales.append(largest.float().flatten())
        return joined(torch.cat(elements), torch.cat(scales))

    def scales(self, packed: torch.Tensor) -> torch.Tensor:
        """The scales in a shard's bytes, one after the other; a view."""
        return packed[self._bytes :].view(torch.float32)

    def restore(self, packed: torch.Tensor) -> torch.Tensor:
        """The shards' bytes ``[ranks, bytes]`` to ``[ranks · rows, I]``."""
        elements, scales = packed[:, : self._bytes], packed[:, self._bytes :]
        restored: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            elements.reshape(-1, 1),
            scales.contiguous().view(torch.float32).flatten(),
            BLOCK,
            self.values,
            (len(packed) * self._height, self._width),
            self.restored,
        )
        return restored

    def block(self, packed: torch.Tensor) -> torch.Tensor:
        """The shards' bytes to the block that their rows make, as it is multiplied."""
        return self.restore(packed).to(self.dtype)


def joined(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A shard's bytes: those of its elements, and its scales in float32."""
    return torch.cat([elements.flatten(), scales.flatten().view(torch.uint8)])


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter of a model is a shard's bytes."""
    return parameter.dtype == torch.uint8


def scales_spec(spec: ShardingSpec, mesh: MeshShape) -> ShardingSpec | None:
    """How the scales of a weight ``[O, I]`` are cut, as a matrix.

    Its rows are those of the weight or, where I is no multiple of :data:`BLOCK`, as many of them as the scales of some
    rows together come out even.

    Returns:
        None if a rank would have a part of the elements of one scale.
    """
    (rows, width), (block_rows, block_width) = spec.shape, spec.block_shape(mesh)
    together = BLOCK // math.gcd(block_width, BLOCK)
    # Wherever parts of rows begin and end.
    heights = block_rows // spec.parts[0], spec.shard_shape(mesh)[0]
    if together > 1 and (block_width < width or any(height % together for height in heights)):
        return None
    return ShardingSpec((rows // together, width * together // BLOCK), spec.tp_axes, spec.parts)
