"""Whether a micro-batch's rows are packed sequences: found out once, and not again for each mask and each segment.

transformers looks at the values of ``position_ids`` for every mask that it makes without an ``attention_mask``, for
which the host waits until the device is through with everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """What is known of the positions that a forward gets.

    Args:
        positions: ``[B, S]`` or ``[1, S]``; None if the model counts them by itself, so that none restart.
        packed: ``[B, S]`` or ``[1, S]``, the number of the packed sequence that a position belongs to; None for one.
    """

    positions: torch.Tensor | None
    packed: torch.Tensor | None


#: Of the forward that is running, for transformers' mask functions.
_known: ContextVar[Packing | None] = ContextVar("cuboid_packing", default=None)


@contextmanager
def known_packing(positions: torch.Tensor | None, packed: torch.Tensor | None) -> Iterator[None]:
    """Masks made inside are for such positions; see :class:`Packing`."""
    token = _known.set(Packing(positions, packed))
    try:
        yield
    finally:
        _known.reset(token)


def packed_indices(
    position_ids: torch.Tensor, search: Callable[[torch.Tensor], torch.Tensor | None]
) -> torch.Tensor | None:
    """In place of transformers' ``find_packed_sequence_indices``, which is ``search``.

    Returns:
        What is known of some columns of the known positions; of other positions what ``search`` finds.
    """
    known = _known.get()
    if known is None:
        return search(position_ids)
    whole = known.positions
    if whole is None:
        return None
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
