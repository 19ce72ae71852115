"""Attention behind Hugging Face's interfaces, for sharded models and for segments of a sequence.

Heads are local to a rank, so the model's own kernel runs. Masks are made for the whole sequence, although the residual
stream is sharded and only a segment of it may be running. Each supported implementation ``name`` has a twin
``cuboid_name``, which :mod:`cuboid_patches` registers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.segment_call import Call, attend_plain, check_call, is_plain, with_prefix
from cuboid.models.attention.segment_mask import segment_mask
from cuboid.models.attention.segments import (
    PREFIX,
    AttentionRecord,
    hang_record,
    record_of,
    running_unit,
    uses_interface,
)
from cuboid.models.attention.whole_sequence import fake_mask, is_recording
from cuboid.tensor3d.layers.dropout import own_random_numbers
from cuboid.tensor3d.layers.whole_block import ImageSplit

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class Lengths:
    """Lengths of the whole sequence, over all ranks: as given, and as padded for the mesh.

    Args:
        real: positions as given.
        padded: positions after padding.
        source: lengths of the encoder's sequence, if this is the sequence of a decoder that attends to an encoder.
    """

    real: int
    padded: int
    source: Lengths | None = None


#: Used in place of lengths in models of images, whose masks are made from whole activations.
WHOLE_IMAGES = Lengths(0, 0)
#: Lengths of the running forward. Mask functions get an embedding with only this rank's part of the sequence, and no
#: other argument with the whole length.
_lengths: ContextVar[Lengths] = ContextVar("cuboid_lengths")


@contextmanager
def whole_sequence(lengths: Lengths) -> Iterator[None]:
    """Within this context, masks are made for a whole sequence of these lengths."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def is_in_forward() -> bool:
    """Whether this thread is inside :func:`whole_sequence`: in a forward that knows the whole sequence's lengths."""
    return _lengths.get(None) is not None


def use_sharded_attention(
    config: PretrainedConfig, modules: list[nn.Module], mesh: Mesh | None, images: ImageSplit | None = None
) -> None:
    """Point a model's config at the twin of its attention implementation, which :func:`check_attention` has accepted.

    Args:
        config: the model's config.
        modules: the modules that may call the attention function.
        mesh: the mesh that shards their heads; None if heads aren't sharded.
        images: describes how positions were padded, in a model of images.
    """
    for module in modules:
        hang_record(module, AttentionRecord(mesh, images=images))
    # Modules that bypass the interface look in the config for their implementation's original name.
    if any(uses_interface(module) for module in modules) and not config._attn_implementation.startswith(PREFIX):
        config._attn_implementation = PREFIX + config._attn_implementation


def check_attention(config: PretrainedConfig) -> None:
    """Make sure that a model's attention implementation has a twin.

    Raises:
        UnsupportedModelError: it has none.
    """
    name = config._attn_implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attn_implementation {name!r} has no rule; choose one of {', '.join(IMPLEMENTATIONS)}"
        )
    if name == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedModelError('reorder_and_upcast_attn with attn_implementation "eager" has no rule; use "sdpa"')


def attention_twin(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the attention function to be registered as ``cuboid_<name>``."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        kernel = _eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        record = record_of(module)
        record.calls += 1
        if record.images is not None:
            query, key, value = _without_filling(record.images, module, query, key, value)
        call = Call(query, key, value, attention_mask, kwargs)
        unit = record.unit
        if record.slot is not None and unit is not None:
            check_call(call, unit, module)
            # A module may call attention more than once, as differential attention does for each half of its values.
            layer = (module, record.slot.next_call(module))
            if is_plain(name, call, unit):
                return attend_plain(call, unit, layer), None
            call = with_prefix(name, call, unit, layer)
        with _random_numbers(record, call):
            output, weights = kernel(module, call.query, call.key, call.value, call.mask, **call.options)
        return output if record.images is None else record.images.filled_up(output, dim=1), weights

    return attend


def _without_filling(images: ImageSplit, module: nn.Module, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Remove the padding from queries, keys and values: ``[B, heads, S', D]`` to ``[B, heads, S, D]``.

    In a model of images every position sees all others, so padding must not take part.
    """
    if len({x.shape[2] for x in heads}) > 1:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to another sequence than its own, for which there is no rule in a model "
            "of images on a mesh"
        )
    return tuple(x[:, :, : images.length] for x in heads)


def _random_numbers(record: AttentionRecord, call: Call) -> AbstractContextManager[None]:
    if record.mesh is None or not call.options.get("dropout"):
        return nullcontext()
    return own_random_numbers(record.mesh, call.query.device)


def mask_twin(name: str) -> Callable[..., Any]:
    """Return the mask function to be registered as ``cuboid_<name>``."""

    def make_mask(**kwargs: Any) -> Any:
        if is_recording():
            return _mask_without_values(name, kwargs)
        unit, lengths = running_unit(), _lengths.get(None)
        # Stages of models whose positions see later ones always run whole sequences, so they take the branches below.
        if unit is not None and lengths is None:
            return segment_mask(name, unit, kwargs)
        assert lengths is not None, "a mask that is made outside of a forward"
        if lengths is WHOLE_IMAGES:
            return ALL_MASK_ATTENTION_FUNCTIONS[name](**kwargs)
        if kwargs.get("allow_is_bidirectional_skip") and lengths.source is not None:
            # A decoder's self-attention is causal, so a bidirectional mask is for its attention to the encoder.
            sizes = {"q_length": lengths.padded, "kv_length": lengths.source.padded}
            return _bidirectional_mask(name, {**kwargs, **sizes}, lengths.padded, lengths.source)
        sizes = {"q_length": lengths.padded, "kv_length": lengths.padded}
        if kwargs.get("allow_is_bidirectional_skip") and lengths.padded > lengths.real:
            return _bidirectional_mask(name, {**kwargs, **sizes}, lengths.padded, lengths)
        mask = ALL_MASK_ATTENTION_FUNCTIONS[name](**{**kwargs, **sizes})
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            # Under an additive mask, a position that may see nothing (padding on the left) attends to all positions
            # equally. That must not include the positions that were added here.
            mask[..., lengths.real :] = -torch.inf
        return mask

    return make_mask


def _bidirectional_mask(name: str, arguments: dict[str, Any], queries: int, keys: Lengths) -> Any:
    """Make a mask for positions that see later ones, which hides the padding at the end of the sequence.

    Args:
        name: name of the attention implementation.
        arguments: arguments of its mask function.
        queries: number of query positions.
        keys: lengths of the key positions.
    """
    if keys.padded == keys.real:
        return ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments)
    mask = ALL_MASK_ATTENTION_FUNCTIONS[name](**{**arguments, "allow_is_bidirectional_skip": False})
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        raise UnsupportedModelError(
            f"attn_implementation {name!r} has no rule for a model whose positions see later ones, with sequences that "
            "the mesh doesn't divide"
        )
    mask = mask.expand(*mask.shape[:2], queries, keys.padded).clone()
    mask[..., keys.real :] = -torch.inf if mask.is_floating_point() else False
    return mask


def _mask_without_values(name: str, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return a fake mask, for model code that checks whether there is one; each segment gets its real mask later."""
    may_skip = arguments.get("allow_is_causal_skip", True) and arguments.get("attention_mask") is None
    if name != "eager" and (name != "sdpa" or may_skip):
        return None
    dtype = arguments.get("dtype", torch.float32) if name == "eager" else torch.bool
    device = arguments.get("device") or torch.device("cpu")
    return fake_mask(arguments["batch_size"], arguments["q_length"], dtype, device)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention function of the file that defines an attention module."""
    return sys.modules[type(module).__module__].eager_attention_forward
