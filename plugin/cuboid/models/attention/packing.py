"""Determines once whether a micro-batch's rows are packed sequences, rather than for each mask and each segment.

Without an ``attention_mask``, transformers reads the values of ``position_ids`` for every mask that it makes. Each read
is a device-to-host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """The positions that a forward gets, and the packed sequences in them.

    Args:
        positions: ``[B, S]`` or ``[1, S]``; None if the model counts positions by itself, so that none restart.
        packed: ``[B, S]`` or ``[1, S]``, the index of each position's packed sequence; None if rows aren't packed.
    """

    positions: torch.Tensor | None
    packed: torch.Tensor | None


#: Packing of the running forward, for transformers' mask functions.
_known: ContextVar[Packing | None] = ContextVar("cuboid_packing", default=None)


@contextmanager
def known_packing(positions: torch.Tensor | None, packed: torch.Tensor | None) -> Iterator[None]:
    """Within this context, masks are made for these positions; see :class:`Packing`."""
    token = _known.set(Packing(positions, packed))
    try:
        yield
    finally:
        _known.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_unknown() -> bool:
    # Asked while a plain model is compiled, since reading a ContextVar would break its graph.
    return _known.get() is None


def packed_indices(
    position_ids: torch.Tensor, search: Callable[[torch.Tensor], torch.Tensor | None]
) -> torch.Tensor | None:
    """Replace transformers' ``find_packed_sequence_indices``, which is passed as ``search``.

    Returns:
        The known indices, if ``position_ids`` are columns of the known positions; otherwise the result of ``search``.
    """
    known = None if torch.compiler.is_compiling() and _is_unknown() else _known.get()
    if known is None:
        return search(position_ids)
    whole = known.positions
    if whole is None:
        return None
    # A segment's positions are a view of the whole ones, so metadata is enough to recognize them, without a sync.
    first = int(position_ids.storage_offset() - whole.storage_offset())
    is_part = (
        position_ids.untyped_storage()._cdata == whole.untyped_storage()._cdata
        and position_ids.dtype == whole.dtype
        and position_ids.stride(1) == whole.stride(1)
        and 0 <= first <= whole.shape[1] - position_ids.shape[1]
    )
    if not is_part:
        return search(position_ids)
    if known.packed is None:
        return None
    return known.packed[:, first : first + position_ids.shape[1]].expand(position_ids.shape[0], -1)
