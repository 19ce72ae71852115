"""Names of transformers that not every supported version has, looked for in this one place."""

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


def keep_logits(logits: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """``logits[:, -keep:]``, or those of a tensor of positions, as this version's own models slice them.

    Args:
        logits: ``[B, S, V]``.
        keep: how many of the last positions (0 for all), or which.
    """
    if hasattr(modeling_utils, "slice_logits_to_keep"):
        return modeling_utils.slice_logits_to_keep(logits, keep)
    return logits[:, slice(-keep, None) if isinstance(keep, int) else keep, :]


def checkpoint_activations(model: Any, options: dict[str, Any]) -> None:
    """Have a model recompute activations in backward.

    Args:
        model: of a class of transformers.
        options: of ``torch.utils.checkpoint``.
    """
    # The name until 5.22, which warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def recomputes(model: nn.Module) -> bool:
    """Whether a model has any module that recomputes activations in backward."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def decoder_ids(model: Any, labels: torch.Tensor) -> torch.Tensor | None:
    """What an encoder-decoder's own code gives its decoder for labels ``[B, T]``, each one later; None if nobody knows.

    Args:
        model: of a class of transformers.
        labels: with -100 where there is none.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    return None if shift is None else shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def within_packed(pattern: Pattern, positions: torch.Tensor, packed: torch.Tensor) -> Pattern:
    """A mask pattern, inside each of the sequences that are packed into a row.

    Args:
        pattern: of one sequence.
        positions: ``[B, S]``, inside each packed sequence.
        packed: ``[B, S]``, the number of the packed sequence.
    """
    # Since 5.23 the pattern is given positions inside its own sequence; before, those of the row.
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(pattern, positions, packed)
    return and_masks(pattern, packed_sequence_mask_function(packed))


def without_packed(pattern: Pattern) -> Pattern | None:
    """The pattern that transformers put through :func:`within_packed`; None where it didn't."""
    parts = parts_of(pattern)
    if len(parts) != 2:
        return None
    if _is_packed(parts[0]):
        return inspect.getclosurevars(parts[1]).nonlocals["mask_function"]
    return parts[0] if _is_packed(parts[1]) else None


def parts_of(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns of which one is the intersection; none of one that isn't."""
    is_intersection = getattr(pattern, "__qualname__", "").startswith(f"{and_masks.__qualname__}.")
    return inspect.getclosurevars(pattern).nonlocals["mask_functions"] if is_intersection else ()


def _is_packed(pattern: Pattern) -> bool:
    return getattr(pattern, "__qualname__", "").startswith(f"{packed_sequence_mask_function.__qualname__}.")
