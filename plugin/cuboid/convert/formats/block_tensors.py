"""A lazy dict of tensors that are read in blocks of rows from any source, with renaming and casting on the fly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec, row_blocks
from cuboid.errors import CheckpointError

#: Size of a block of rows, unless one row is larger.
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class BlockTensors:
    """Tensors that are read one block at a time.

    Attributes:
        specs: dtype and shape by name.
        blocks: yields a tensor's rows in consecutive blocks ``[rows, *shape[1:]]``, at least one; a tensor without
            dims is one block.
    """

    specs: Mapping[str, TensorSpec]
    blocks: Callable[[str], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Total size."""
        return sum(spec.nbytes for spec in self.specs.values())

    def renamed(self, names: Mapping[str, str]) -> BlockTensors:
        """Select and rename tensors; ``names`` maps each new name to the present one."""
        return BlockTensors({new: self.specs[old] for new, old in names.items()}, lambda new: self.blocks(names[new]))

    def cast(self, dtypes: Mapping[str, torch.dtype]) -> BlockTensors:
        """Cast tensors while they are read, each to the dtype that ``dtypes`` has for it; others stay as they are.

        Reading raises a :class:`CheckpointError` if a finite number would become infinite.
        """
        specs = {name: TensorSpec(dtypes.get(name, spec.dtype), spec.shape) for name, spec in self.specs.items()}

        def blocks(name: str) -> Iterator[torch.Tensor]:
            for block in self.blocks(name):
                yield _cast(name, block, specs[name].dtype)

        return BlockTensors(specs, blocks)


def row_ranges(spec: TensorSpec) -> Iterator[slice]:
    """The blocks of a tensor as ranges of rows; see :func:`row_blocks`."""
    return row_blocks(spec, BLOCK_BYTES)


def differ(tensors: BlockTensors, first: str, second: str) -> bool:
    """Whether two tensors differ in dtype, shape or any value."""
    if tensors.specs[first] != tensors.specs[second]:
        return True
    pairs = zip(tensors.blocks(first), tensors.blocks(second), strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)


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
