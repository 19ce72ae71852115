"""One call of the attention interface for a segment: with fused kernels, or with the model's own on all keys so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.transformers_names import mask_function
from cuboid.models.attention.forward_context import Unit
from cuboid.models.attention.segment_mask import FLASH
from cuboid.seq1f1b.attention.chunked_attention import KeptCall, attend_segment, prefix

#: Arguments that don't change plain causal attention. A call with any other goes to the model's own kernel.
_HARMLESS = {
    *("scaling", "is_causal", "sliding_window", "dropout"),  # handled below
    *("position_ids", "position_embeddings", "cache_position", "num_items_in_batch", "layer_idx"),
    *("use_cache", "past_key_values", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
#: Arguments whose length is that of the segment's own keys, although they would have to cover all keys so far.
_LOCAL = ("position_bias", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class Call:
    """The arguments of an attention function.

    Args:
        query: ``[B, Hq, L, D]``.
        key: ``[B, Hkv, L, D]``; after :func:`with_prefix`, of all positions that the mask covers.
        value: ``[B, Hkv, L, Dv]``, likewise.
        mask: what the mask function returned.
        options: the keyword arguments.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]


def check_call(call: Call, unit: Unit, module: nn.Module) -> None:
    """Check that a call is causal self-attention of exactly this unit.

    Raises:
        UnsupportedModelError: it isn't.
    """
    own = unit.stop - unit.start
    is_causal = call.options.get("is_causal")
    reason = None
    if call.query.shape[2] != own or call.key.shape[2] != own:
        reason = f"it has {call.query.shape[2]} queries and {call.key.shape[2]} keys for a segment of {own} positions"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reason = "its positions see later ones"
    elif isinstance(call.mask, torch.Tensor) and not call.mask.numel():
        reason = "its mask lets positions see later ones"
    elif given := [name for name in _LOCAL if call.options.get(name) is not None]:
        reason = f"{given[0]} would have to reach back to earlier segments"
    elif isinstance(call.mask, torch.Tensor) and not own < call.mask.shape[-1] <= unit.stop and unit.start > 0:
        reason = f"it cut its mask to {call.mask.shape[-1]} keys, while there are {unit.stop}"
    if reason is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has no rule with segments: {reason}")


def is_plain(name: str, call: Call, unit: Unit) -> bool:
    """Whether a call is plain causal attention, for which no mask was made."""
    options = call.options
    # Only flash kernels apply a window themselves. The others get a mask if the window hides anything.
    window = options.get("sliding_window") if name in FLASH else None
    return (
        call.mask is None
        and name in ("sdpa", *FLASH)
        and not options.get("dropout")
        and (window is None or unit.stop <= window)
        and all(value is None or option in _HARMLESS for option, value in options.items())
    )


def attend_plain(call: Call, unit: Unit, layer: Hashable, kept: KeptCall | None = None) -> torch.Tensor:
    """Compute the output ``[B, L, Hq, Dv]`` with the fused kernels.

    Args:
        call: of the attention function.
        unit: the running unit.
        layer: identifies the call in the KV cache.
        kept: what the call keeps for its recomputation; None if it keeps nothing.
    """
    scale = call.options.get("scaling")
    scale = call.query.shape[-1] ** -0.5 if scale is None else float(scale)
    out = attend_segment(call.query, call.key, call.value, unit.store, layer, unit.start, scale, kept)
    return out.transpose(1, 2).contiguous()


def with_prefix(name: str, call: Call, unit: Unit, layer: Hashable) -> Call:
    """Return the call with the keys and values of all positions that its mask covers or that its window reaches.

    ``layer`` identifies the call in the KV cache.
    """
    mask, options = call.mask, call.options
    first = 0
    if mask is not None:
        first = unit.stop - mask.shape[-1]
    elif name in FLASH:
        window = options.get("sliding_window")
        first = 0 if window is None else max(0, unit.start - window + 1)
    else:
        # sdpa would align its own causal pattern with the first key, not with the segment's start.
        mask = mask_function(name)(
            batch_size=1,
            q_length=unit.stop - unit.start,
            q_offset=unit.start,
            kv_length=unit.stop,
            allow_is_causal_skip=False,
            dtype=call.query.dtype,
            device=call.query.device,
        )
    if name in FLASH:
        # Flash attention might take a segment's positions for those of packed sequences.
        options = {**options, "position_ids": None}
    key, value = prefix(call.key, call.value, unit.store, layer, unit.start, first)
    return dataclasses.replace(call, key=key, value=value, mask=mask, options=options)
