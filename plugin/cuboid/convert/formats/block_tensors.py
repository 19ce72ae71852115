"""Tensors that are read in blocks of rows, wherever they are, and are cast or renamed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from cuboid.checkpoint.format.tensor_header import TensorSpec, row_blocks
from cuboid.errors import CheckpointError

#: Of a block of rows, unless one row is longer.
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Tensors:
    """Tensors of which one block is in memory at a time.

    Attributes:
        specs: by name.
        blocks: gives consecutive rows of a tensor, at least one block; one without dims is a block by itself.
    """

    specs: Mapping[str, TensorSpec]
    blocks: Callable[[str], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Some of the tensors under other names: for each new name the present one."""
        return Tensors({new: self.specs[old] for new, old in names.items()}, lambda new: self.blocks(names[new]))

    def cast(self, dtype: torch.dtype | None) -> Tensors:
        """All floating tensors in another dtype; the others, and all of them for None, as they are.

        Reading raises a :class:`CheckpointError` where a finite number would become infinite.
        """
        if dtype is None:
            return self
        specs = {name: TensorSpec(_after(spec.dtype, dtype), spec.shape) for name, spec in self.specs.items()}

        def blocks(name: str) -> Iterator[torch.Tensor]:
            for block in self.blocks(name):
                yield _cast(name, block, specs[name].dtype)

        return Tensors(specs, blocks)


def row_ranges(spec: TensorSpec) -> Iterator[slice]:
    """Consecutive ranges of rows that make up a tensor; see :func:`row_blocks`."""
    return row_blocks(spec, BLOCK_BYTES)


def differ(tensors: Tensors, first: str, second: str) -> bool:
    """Whether two tensors have different values anywhere, or different shapes."""
    if tensors.specs[first] != tensors.specs[second]:
        return True
    pairs = zip(tensors.blocks(first), tensors.blocks(second), strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)


def _after(before: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if before.is_floating_point else before


def _cast(name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if block.dtype == dtype:
        return block
    cast = block.to(dtype)
    reaches = torch.finfo(dtype).max >= torch.finfo(block.dtype).max
    if not reaches and not cast.isfinite().all() and (cast.isinf() & ~block.isinf()).any():
        largest = block[block.isfinite()].abs().max().item()
        text = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} holds {largest:g}, but the largest number of {text} is {torch.finfo(dtype).max:g}; bfloat16 and "
            "float32 reach further"
        )
    return cast
