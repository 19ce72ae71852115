"""Blocks of small parameters, such as norms', that stay unsharded over several forwards without a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Kept:
    blocks: Sequence[torch.Tensor]
    #: What they were gathered from. These views keep the memory from being used again for other values.
    shards: Sequence[torch.Tensor]
    versions: Sequence[int]


class KeptBlocks:
    """By what has unsharded them, the blocks of small parameters whose values haven't changed since.

    All ranks change their parameters alike, so they agree on what must be gathered again.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """The blocks of these shards; None if they must be gathered."""
        kept = self._kept.get(key)
        if kept is None or len(kept.shards) != len(shards):
            return None
        for shard, before, version in zip(shards, kept.shards, kept.versions, strict=True):
            if shard._version != version or shard.dtype != before.dtype or shard.data_ptr() != before.data_ptr():
                return None
        return kept.blocks

    def keep(self, key: Hashable, shards: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> None:
        """Keep the blocks that these shards were gathered to."""
        self._kept[key] = _Kept(blocks, [shard.data for shard in shards], [shard._version for shard in shards])


_kept_blocks: ContextVar[KeptBlocks | None] = ContextVar("cuboid_kept_blocks", default=None)
#: Where this thread's forwards keep blocks; None if they don't.
kept_blocks: Callable[[], KeptBlocks | None] = _kept_blocks.get


@contextmanager
def keeping_blocks() -> Iterator[None]:
    """In the ``with`` block, forwards without a graph keep blocks of small parameters until it ends."""
    token = _kept_blocks.set(KeptBlocks())
    try:
        yield
    finally:
        _kept_blocks.reset(token)
