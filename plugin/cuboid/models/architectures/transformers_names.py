"""Access to parts of transformers whose names or behaviour differ between the supported versions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.masking_utils import and_masks, packed_sequence_mask_function

Pattern = Callable[..., Any]

#: Of transformers 5.23 and later: makes a pattern count positions inside the packed sequence.
_REMAP = "remap_positions_for_packed_sequence"


def keep_logits(logits: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """``logits[:, -keep:]``, or the logits at given positions, as this version's own models slice them.

    Args:
        logits: ``[B, S, V]``.
        keep: number of last positions (0 for all), or a tensor of positions.
    """
    if hasattr(modeling_utils, "slice_logits_to_keep"):
        return modeling_utils.slice_logits_to_keep(logits, keep)
    return logits[:, slice(-keep, None) if isinstance(keep, int) else keep, :]


def checkpoint_activations(model: Any, options: dict[str, Any]) -> None:
    """Enable activation checkpointing of a model of transformers, with options of ``torch.utils.checkpoint``."""
    # The second name was the one until 5.22, and warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def stop_checkpointing(model: Any) -> None:
    """The reverse of :func:`checkpoint_activations`."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


def recomputes(model: nn.Module) -> bool:
    """Whether any module of a model recomputes activations in backward."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def decoder_ids(model: Any, labels: torch.Tensor) -> torch.Tensor | None:
    """Labels ``[B, T]`` (-100: no label) shifted right into decoder ids ``[B, T]`` by an encoder-decoder's own code;
    None if none is found.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    return None if shift is None else shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def mask_function(name: str) -> Callable[..., Any]:
    """The mask function that is registered for an attention implementation, without our patch around it."""
    function: Callable[..., Any] = masking_utils.AttentionMaskInterface._global_mapping[name]
    return function


def within_packed(pattern: Pattern, positions: torch.Tensor, packed: torch.Tensor) -> Pattern:
    """Restrict a mask pattern to pairs of positions in the same packed sequence.

    Args:
        pattern: of one sequence.
        positions: ``[B, S]``, counted inside each packed sequence.
        packed: ``[B, S]``, the index of each token's packed sequence.
    """
    # Since 5.23 the pattern is called with positions inside the packed sequence; before, with positions in the row.
    if hasattr(masking_utils, _REMAP):
        pattern = getattr(masking_utils, _REMAP)(pattern, positions)
    return and_masks(packed_sequence_mask_function(packed), pattern)


def without_packed(pattern: Pattern) -> Pattern | None:
    """The inverse of :func:`within_packed`, for patterns that transformers restricted; None for any other pattern."""
    parts = parts_of(pattern)
    others = [part for part in parts if not _is_made_by(packed_sequence_mask_function.__qualname__, part)]
    if len(parts) != 2 or len(others) != 1:
        return None
    return inspect.getclosurevars(others[0]).nonlocals["mask_function"] if _is_made_by(_REMAP, others[0]) else others[0]


def parts_of(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns of which ``and_masks`` made this one; empty for any other pattern."""
    is_intersection = _is_made_by(and_masks.__qualname__, pattern)
    return inspect.getclosurevars(pattern).nonlocals["mask_functions"] if is_intersection else ()


def _is_made_by(function: str, pattern: Pattern) -> bool:
    """Whether a pattern is what a function of transformers has returned."""
    return getattr(pattern, "__qualname__", "").startswith(f"{function}.")
