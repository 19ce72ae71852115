"""Determines once whether a micro-batch's rows are packed sequences, rather than for each mask and each segment.

Without an ``attention_mask``, transformers reads the values of ``position_ids`` for every mask that it makes. Each read
is a device-to-host sync.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuboid.models.attention.forward_context import forward_context, is_outside


def packed_indices(
    position_ids: torch.Tensor, search: Callable[[torch.Tensor], torch.Tensor | None]
) -> torch.Tensor | None:
    """Replace transformers' ``find_packed_sequence_indices``, which is passed as ``search``.

    Returns:
        The known indices, if ``position_ids`` are columns of the known positions; otherwise the result of ``search``.
    """
    known = None if torch.compiler.is_compiling() and is_outside() else forward_context().packing
    if known is None:
        return search(position_ids)
    all_positions = known.positions
    if all_positions is None:
        return None
    # A segment's positions are a view of the whole ones, so metadata is enough to recognize them, without a sync.
    first = int(position_ids.storage_offset() - all_positions.storage_offset())
    is_part = (
        position_ids.untyped_storage()._cdata == all_positions.untyped_storage()._cdata
        and position_ids.dtype == all_positions.dtype
        and position_ids.stride(1) == all_positions.stride(1)
        and 0 <= first <= all_positions.shape[1] - position_ids.shape[1]
    )
    if not is_part:
        return search(position_ids)
    if known.packed is None:
        return None
    return known.packed[:, first : first + position_ids.shape[1]].expand(position_ids.shape[0], -1)
