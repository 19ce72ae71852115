"""Micro-batches that show whether a model is computed correctly: lengths that cross its thresholds, padding, packing.

A model may change at some length: a window starts to hide keys, rotary embeddings rescale, a position table ends. A
test whose sequences stay below all these lengths can't cover that. Everything here follows from a config alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from cuboid.errors import ConfigError

#: Odd, so that most meshes have to pad it.
LONGEST = 31
_LEAST = 4
#: Where rows are padded; ``"rows"`` and ``"right rows"`` mix several kinds, the second without padding on the left.
Padding = Literal["none", "right", "left", "rows", "right rows"]
RowKind = Literal["whole", "right", "left", "without labels"]
#: The kinds of a micro-batch's rows, in turn. The difficult ones come first, because there may be few rows.
ROW_KINDS: dict[Padding, tuple[RowKind, ...]] = {
    "none": ("whole",),
    "right": ("right",),
    "left": ("left",),
    "rows": ("left", "right", "whole", "without labels"),
    "right rows": ("right", "whole", "without labels"),
}

#: Names in transformers' configs for the number of tokens of a window, of a chunk, or of a step of a scale.
_LENGTHS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
    "keep_window_size",
    "local_attention",
    "local_attention_window_len",
    "mamba_chunk_size",
    "chunk_size",
    "block_size",
    "floor_scale",
    "log_scaling_n_floor",
    "original_max_position_embeddings",
)
_LONGEST = ("max_position_embeddings", "max_seq_len")
_ORIGINAL = "original_max_position_embeddings"
#: Rotary embeddings that are the same at every length.
_UNSCALED_ROPE = {"default", "linear"}


@dataclass(frozen=True)
class Threshold:
    """A length at which a model changes.

    Args:
        key: its place in the config, such as ``"rope_parameters.full_attention.original_max_position_embeddings"``.
        tokens: the greatest length before the change.
        is_end: whether there are no positions beyond it, as with position tables that are learned or precomputed.
    """

    key: str
    tokens: int
    is_end: bool = False


@dataclass(frozen=True)
class Case:
    """One kind of micro-batch.

    Args:
        name: a description of what it tests.
        length: tokens of a row.
        padding: where rows are padded; the padding is a quarter of the row.
        packed: lengths of the sequences that are packed into a row, with position ids that restart; their sum is
            ``length``. Each row starts with a different one of them, in turn.
        first_position: the first position id.
    """

    name: str
    length: int
    padding: Padding = "none"
    packed: tuple[int, ...] = ()
    first_position: int = 0

    def row_kinds(self, rows: int, first: int = 0) -> list[RowKind]:
        """Return the kinds of ``rows`` rows, the first of which is row number ``first``."""
        kinds = ROW_KINDS[self.padding]
        return [kinds[row % len(kinds)] for row in range(first, first + rows)]

    def attention_mask(self, rows: int, first: int = 0) -> torch.Tensor | None:
        """Return a mask ``[rows, length]``, 1 where a token is real; None without padding."""
        if self.padding == "none":
            return None
        mask = torch.ones((rows, self.length), dtype=torch.long)
        missing = math.ceil(self.length / 4)
        for row, kind in enumerate(self.row_kinds(rows, first)):
            if kind == "right":
                mask[row, self.length - missing :] = 0
            elif kind == "left":
                mask[row, :missing] = 0
        return mask

    def position_ids(self, rows: int, first: int = 0) -> torch.Tensor | None:
        """Return position ids ``[rows, length]``; None if the model should count positions by itself."""
        if not self.packed:
            counted = torch.arange(self.first_position, self.first_position + self.length)
            return counted.repeat(rows, 1) if self.first_position else None
        counts = [[torch.arange(n) for n in self._packed_in(row)] for row in range(first, first + rows)]
        return torch.stack([torch.cat(row) for row in counts])

    def _packed_in(self, row: int) -> tuple[int, ...]:
        first = row % len(self.packed)
        return self.packed[first:] + self.packed[:first]


def thresholds(config: PretrainedConfig) -> tuple[Threshold, ...]:
    """Return the lengths at which a config's model changes, shortest first."""
    text = config.get_text_config(decoder=True)
    all_thresholds = [Threshold(key, value) for key in _LENGTHS if (value := _tokens(text, key))]
    ropes = dict(_ropes(text))
    all_thresholds += [
        Threshold(f"{name}.{_ORIGINAL}", value) for name, r in ropes.items() if (value := _tokens(r, _ORIGINAL))
    ]
    if rope_types(config) - _UNSCALED_ROPE or not ropes:
        # Without rotary embeddings, the maximum number of positions is the size of a position table.
        all_thresholds += [Threshold(key, value, not ropes) for key in _LONGEST if (value := _tokens(text, key))]
    return tuple(sorted(all_thresholds, key=lambda threshold: threshold.tokens))


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the length of the longest sequence that a model is made for.

    None if its config doesn't have it, or if its rotary embeddings are scaled dynamically with the length.
    """
    if "dynamic" in rope_types(config):
        return None
    return _tokens(config.get_text_config(decoder=True), "max_position_embeddings")


def check_length(tokens: int, longest: int | None, what: str) -> None:
    """Check that a model is made for sequences of ``tokens`` tokens.

    Args:
        tokens: length of the sequences.
        longest: result of :func:`longest_sequence`.
        what: name of the length in the error message.

    Raises:
        ConfigError: it is made for shorter ones.
    """
    if longest is not None and tokens > longest:
        raise ConfigError(
            f"{what} is {tokens}, beyond the model's {longest} positions (max_position_embeddings); give shorter "
            "sequences, or a model whose config is for longer ones"
        )


def shrunk(config: PretrainedConfig, longest: int) -> PretrainedConfig:
    """Return a copy of a config whose thresholds ``longest`` tokens cross; the ends of tables stay as they are.

    Thresholds below three quarters of ``longest`` stay as they are, and all keep their order.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    ropes = dict(_ropes(text))
    movable = [threshold for threshold in thresholds(config) if not threshold.is_end]
    values = sorted({threshold.tokens for threshold in movable})
    large = [value for value in values if value >= longest * 3 // 4]
    base = max([longest // 4, *(value for value in values if value not in large)])
    # Half of the longest, so that windows and chunks restart twice.
    top = longest // 2 if base < longest // 2 else (base + longest) // 2
    smaller = {value: base + (top - base) * (i + 1) // len(large) for i, value in enumerate(large)}
    for threshold in movable:
        if threshold.tokens in smaller:
            place, _, key = threshold.key.rpartition(".")
            _set(ropes[place] if place else text, key, smaller[threshold.tokens])
    return small


def cases(config: PretrainedConfig, longest: int = LONGEST) -> tuple[Case, ...]:
    """Return every kind of micro-batch of up to ``longest`` tokens that may matter to a model.

    These have lengths at each threshold and just above it, the longest length, a short one, and one that ends at the
    last position of a table, each without padding and padded on either side; and there are packed rows. Thresholds
    that ``longest`` doesn't cross aren't covered; see :func:`shrunk`.
    """
    unpadded = [Case("longest", _longest(config, longest)), Case("short", _short(config, longest))]
    for threshold in thresholds(config):
        if threshold.is_end:
            unpadded.append(_to_the_end(threshold, longest))
        elif threshold.tokens + 1 < longest:
            unpadded += [Case(f"{threshold.key} reached", threshold.tokens), _crossing(threshold)]
    sides: tuple[Padding, ...] = ("none", "right", "left")
    all_cases = [_padded(case, side) for case in unpadded for side in sides]
    packed = _packed(config, longest)
    all_cases += [packed, replace(packed, name="packed, short ones first", packed=packed.packed[::-1])]
    # Thresholds with the same length give one case. Reversed twice, so that the first one's name is kept.
    return tuple({(c.length, c.padding, c.packed, c.first_position): c for c in reversed(all_cases)}.values())[::-1]


def covering(config: PretrainedConfig, longest: int = LONGEST) -> tuple[Case, ...]:
    """Return four micro-batches that cover something of all of :func:`cases`, for when those would be too many."""
    crossed = [threshold for threshold in thresholds(config) if threshold.tokens + 1 < longest]
    end = next((threshold for threshold in thresholds(config) if threshold.is_end), None)
    last = Case("whole", _longest(config, longest) - 2)
    if end is not None:
        last = _to_the_end(end, longest - 2)
    elif crossed:
        last = _crossing(crossed[-1])
    return (
        Case("longest, padded here and there", _longest(config, longest), "rows"),
        last,
        _packed(config, longest - 1),
        Case("short, padded on the right", _short(config, longest), "right"),
    )


def _longest(config: PretrainedConfig, longest: int) -> int:
    return min([longest, *(threshold.tokens for threshold in thresholds(config) if threshold.is_end)])


def _short(config: PretrainedConfig, longest: int) -> int:
    """Return a length below all thresholds, if possible."""
    first = min((threshold.tokens for threshold in thresholds(config)), default=longest)
    return max(_LEAST, min(first - 1, longest // 3))


def _crossing(threshold: Threshold) -> Case:
    return Case(f"{threshold.key} crossed", threshold.tokens + 1)


def _to_the_end(threshold: Threshold, longest: int) -> Case:
    length = min(longest, threshold.tokens)
    return Case(f"the last of {threshold.key}", length, first_position=threshold.tokens - length)


def _padded(case: Case, side: Padding) -> Case:
    return case if side == "none" else replace(case, name=f"{case.name}, padded on the {side}", padding=side)


def packed_case(length: int, first: int = 0) -> Case:
    """Return a case whose rows pack one long sequence, of at least ``first`` tokens, and up to two short ones."""
    first = max(length // 2, first)
    rest = length - first
    parts = (first, rest - rest // 3, rest // 3)
    return Case("packed", length, packed=tuple(part for part in parts if part))


def _packed(config: PretrainedConfig, longest: int) -> Case:
    """Return a packed case whose long sequence crosses as many thresholds as possible."""
    longest = _longest(config, longest)
    crossed = [threshold.tokens for threshold in thresholds(config) if threshold.tokens < longest - 2 * _LEAST]
    return packed_case(longest, max(crossed, default=0) + 1)


def _ropes(text: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parameters of rotary embeddings, with their place in the config: one, or one per type of layer."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope:
        return
    nested = {name: inner for name, inner in rope.items() if isinstance(inner, dict)}
    if nested:
        yield from ((f"rope_parameters.{name}", inner) for name, inner in nested.items())
    else:
        yield "rope_parameters", rope


def rope_types(config: PretrainedConfig) -> set[str]:
    """Return the types of rotary embeddings in a config."""
    text = config.get_text_config(decoder=True)
    return {str(rope.get("rope_type", rope.get("type")) or "default") for _, rope in _ropes(text)}


def _tokens(place: Any, key: str) -> int | None:
    value = place.get(key) if isinstance(place, dict) else getattr(place, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else None


def _set(place: Any, key: str, value: int) -> None:
    if isinstance(place, dict):
        place[key] = value
    else:
        setattr(place, key, value)
