"""Masks for a segment: Hugging Face's own patterns, applied to positions of the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.transformers_names import (
    Pattern,
    mask_function,
    parts_of,
    within_packed,
    without_packed,
)
from cuboid.models.attention.forward_context import Unit

FLASH = ("flash_attention_2", "flash_attention_3")
#: Kernels that are causal by themselves if they get no mask.
_CAUSAL_BY_THEMSELVES = ("sdpa", *FLASH)


def segment_mask(name: str, unit: Unit, arguments: dict[str, Any]) -> Any:
    """Return the mask of a unit, in the form that one attention implementation takes.

    Args:
        name: name of the attention implementation.
        unit: the running unit.
        arguments: arguments that the model passed to the mask function, with the lengths of its part of the sequence.

    Returns:
        None for plain causal attention, which :func:`cuboid.seq1f1b.attention.chunked_attention.attend_segment` can do.
        Otherwise a mask over the keys up to the segment's end: all of them, or the last ones that a window reaches. If
        positions see later ones, a mask of no elements, which can't be used: decoders also make such a mask for an
        encoder, even if they have none.

    Raises:
        UnsupportedModelError: the pattern can't be cut into segments.
    """
    pattern = _causal_pattern(arguments, unit)
    if not unit.is_whole and not _only_looks_back(pattern):
        return torch.empty(0, device=arguments.get("device"))
    if arguments.get("use_vmap") and not unit.is_whole:
        raise UnsupportedModelError("the model adds a mask function of its own, which has no rule with segments")
    window = arguments.get("local_size")
    if window is not None and unit.stop <= window:
        window = None
    padding = None if unit.attention_mask is None else unit.attention_mask[:, : unit.stop]
    if name in FLASH:
        return _flash_mask(unit, padding)
    # Models that add to the mask, as ALiBi does, don't allow it to be skipped.
    has_to_be = arguments.get("allow_is_causal_skip") is False
    if name in _CAUSAL_BY_THEMSELVES and not has_to_be and window is None and padding is None and unit.packed is None:
        return None
    first = 0 if window is None else max(0, unit.start - window + 1)
    sizes = {
        "q_length": unit.stop - unit.start,
        "q_offset": unit.start,
        "kv_length": unit.stop - first,
        "kv_offset": first,
        "attention_mask": padding,
        "mask_function": _within_packed(pattern, unit, arguments["batch_size"]),
        "allow_is_causal_skip": False,
    }
    mask = mask_function(name)(**{**arguments, **sizes})
    if padding is not None and isinstance(mask, torch.Tensor) and mask.is_floating_point():
        _check_rows(mask, unit)
    return mask


def _flash_mask(unit: Unit, padding: torch.Tensor | None) -> torch.Tensor | None:
    # These kernels align the causal pattern with the last key, and handle windows and (whole) packed sequences.
    if unit.packed is not None and not unit.is_whole:
        raise UnsupportedModelError(
            'packed sequences (position_ids that restart) in segments have no rule with flash attention; use "sdpa"'
        )
    return None if padding is None or unit.stop <= unit.visible else padding


def _causal_pattern(arguments: dict[str, Any], unit: Unit) -> Pattern:
    """Return the model's pattern without the part for packed sequences, which it detected in the segment alone."""
    pattern: Pattern = arguments.get("mask_function", causal_mask_function)
    of_one_sequence = without_packed(pattern)
    if of_one_sequence is not None:
        pattern = of_one_sequence
    elif _restarts_inside(unit):
        raise UnsupportedModelError(
            "position_ids restart as in packed sequences, but this model doesn't look at them for its mask, so that "
            "the sequences would run into one another; give each sequence a row of its own"
        )
    return pattern


def _restarts_inside(unit: Unit) -> bool:
    return unit.packed is not None and bool(torch.diff(unit.packed[:, unit.start : unit.stop]).any())


def _only_looks_back(pattern: Pattern) -> bool:
    return pattern is causal_mask_function or any(_only_looks_back(part) for part in parts_of(pattern))


def _within_packed(pattern: Pattern, unit: Unit, rows: int) -> Pattern:
    if unit.packed is None:
        return pattern
    packed = unit.packed.expand(rows, -1)
    index = torch.arange(packed.shape[1], device=packed.device).expand_as(packed)
    begins = torch.diff(packed, prepend=packed[:, :1]) != 0
    positions = index - (index * begins).cummax(dim=1).values
    return within_packed(pattern, positions, packed)


def _check_rows(mask: torch.Tensor, unit: Unit) -> None:
    """Reject positions that may see nothing: under an additive mask they attend equally to all, even to later ones.

    Raises:
        UnsupportedModelError: there is such a position, and the unit's keys may not be exactly those of the user's
            sequence: the unit is only a segment, or every row ends with padding, which may have been added here.
    """
    assert unit.attention_mask is not None
    blind = (mask == torch.finfo(mask.dtype).min).all(dim=-1).any()
    padded_on_the_right = not unit.attention_mask[:, -1].any()
    if bool(blind) and (padded_on_the_right or not unit.is_whole):
        raise UnsupportedModelError(
            "attention_mask has positions that may see nothing, as in padding on the left. Under attn_implementation "
            '"eager" they see all positions alike, which has no rule in a pipeline; pad on the right, or use "sdpa"'
        )
