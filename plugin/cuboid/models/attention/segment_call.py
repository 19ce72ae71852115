"""One call of the attention interface for a segment: with fused kernels, or with the model's own on all keys so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.transformers_names import mask_function
from cuboid.models.attention.forward_context import Unit
from cuboid.models.attention.segment_mask import FLASH
from cuboid.seq1f1b.attention.chunked_attention import KeptCall, as_autocast, attend_segment, prefix
from cuboid.seq1f1b.attention.segment_operators import ATTEND, PREFIX

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
    length = unit.stop - unit.start
    reason = _obstacle(call, module)
    if call.query.shape[2] != length or call.key.shape[2] != length:
        reason = (
            f"it has {call.query.shape[2]} queries and {call.key.shape[2]} keys for a segment of {length} positions"
        )
    elif (
        reason is None
        and isinstance(call.mask, torch.Tensor)
        and not length < call.mask.shape[-1] <= unit.stop
        and unit.start > 0
    ):
        reason = f"it cut its mask to {call.mask.shape[-1]} keys, while there are {unit.stop}"
    if reason is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has no rule with segments: {reason}")


def _obstacle(call: Call, module: nn.Module) -> str | None:
    """Why a call has no rule, whichever the segment is."""
    is_causal = call.options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return "its positions see later ones"
    if isinstance(call.mask, torch.Tensor) and not call.mask.numel():
        return "its mask lets positions see later ones"
    local_options = [name for name in _LOCAL if call.options.get(name) is not None]
    return f"{local_options[0]} would have to reach back to earlier segments" if local_options else None


def is_plain(name: str, call: Call, unit: Unit) -> bool:
    """Whether a call is plain causal attention, for which no mask was made."""
    # Only flash kernels apply a window themselves. The others get a mask if the window hides anything.
    window = call.options.get("sliding_window") if name in FLASH else None
    return name in ("sdpa", *FLASH) and (window is None or unit.stop <= window) and _needs_no_more(call)


def _needs_no_more(call: Call) -> bool:
    """Whether nothing but query, key, value and scale matters to a call."""
    return (
        call.mask is None
        and not call.options.get("dropout")
        and all(value is None or option in _HARMLESS for option, value in call.options.items())
    )


def attend_in_graph(
    name: str, kernel: Callable[..., Any], module: nn.Module, call: Call, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a segment's attention in a compiled graph, which is the same one for all segments.

    ``place`` of the segment is of :func:`~cuboid.seq1f1b.attention.segment_operators.place_of`.

    Raises:
        UnsupportedModelError: the call has no form in a graph.
    """
    obstacle = _obstacle(call, module)
    if obstacle is None and name in FLASH:
        obstacle = f"attn_implementation {name!r} has no form in the graph of a segment"
    if obstacle is None and call.query.shape[2] != call.key.shape[2]:
        obstacle = "it attends to another sequence"
    plain = name == "sdpa" and _needs_no_more(call)
    if obstacle is None and not plain and not isinstance(call.mask, torch.Tensor):
        obstacle = "it needs a mask in the graph of a segment, and has none"
    if obstacle is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has no rule with compiled segments: {obstacle}")
    # What is 0 here, the number of the call in its layer, is set when the graph is complete (`number_calls`).
    if plain:
        query, key, value = as_autocast(call.query, call.key, call.value)
        out, _ = ATTEND(query, key, value, place, 0, _scale(call))
        return out, None
    key, value = PREFIX(call.key, call.value, place, 0, call.mask.shape[-1])
    output, weights = kernel(module, call.query, key, value, call.mask, **call.options)
    return output, weights


def number_calls(graph: torch.fx.GraphModule) -> None:
    """Give the calls of attention in a layer's graph their numbers, which tell their keys and values apart.

    Raises:
        UnsupportedModelError: they are in several parts of the graph, so that their order isn't known.
    """
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    calls = [[node for node in part.graph.nodes if node.target in (ATTEND, PREFIX)] for part in parts]
    if sum(map(bool, calls)) > 1:
        raise UnsupportedModelError("attention is called in several parts of a layer's graph")
    for part, nodes in zip(parts, calls, strict=True):
        for number, node in enumerate(nodes):
            place = 4 if node.target is ATTEND else 3
            node.update_arg(place, number)
        if nodes:
            part.recompile()


def attend_plain(call: Call, unit: Unit, layer: Hashable, kept: KeptCall | None = None) -> torch.Tensor:
    """Compute the output ``[B, L, Hq, Dv]`` with the fused kernels.

    Args:
        call: of the attention function.
        unit: the running unit.
        layer: identifies the call in the KV cache.
        kept: what the call keeps for its recomputation; None if it keeps nothing.
    """
    out = attend_segment(call.query, call.key, call.value, unit.store, layer, unit.start, _scale(call), kept)
    return out.transpose(1, 2).contiguous()


def _scale(call: Call) -> float:
    """The factor by which a call's scores are multiplied."""
    scale = call.options.get("scaling")
    return float(call.query.shape[-1] ** -0.5) if scale is None else float(scale)


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
