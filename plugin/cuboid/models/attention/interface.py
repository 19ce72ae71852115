"""Attention behind Hugging Face's interfaces, for sharded models and for segments of a sequence.

Heads are local to a rank, so the model's own kernel runs. Masks are made for the whole sequence, although the residual
stream is sharded and only a segment of it may be running.

The config keeps the name of its implementation, so that copies of it make plain models, which may run beside a sharded
one. Instead, :mod:`cuboid_patches` puts :func:`attention_of` and :func:`mask_of` around every function that models look
up. They leave a call alone unless its module has a record, or a sharded model's forward is running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.transformers_names import mask_function
from cuboid.models.attention.forward_context import WHOLE_IMAGES, Lengths, fake_mask, forward_context, is_outside
from cuboid.models.attention.kept_attention import ModelKernel, kept_attention
from cuboid.models.attention.segment_call import Call, attend_in_graph, attend_plain, check_call, is_plain, with_prefix
from cuboid.models.attention.segment_mask import segment_mask
from cuboid.models.attention.segments import AttentionRecord, find_record
from cuboid.models.attention.whole_sequence import Masks
from cuboid.models.batch.rank_cache import RankCache
from cuboid.tensor3d.layers.dropout import own_random_numbers
from cuboid.tensor3d.layers.whole_block import ImageSplit

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_MaskFunction = Callable[..., Any]


def check_model_options(config: PretrainedConfig) -> None:
    """Make sure that there are rules for a model's attention implementation, and that nothing runs in chunks.

    Raises:
        UnsupportedModelError: there is none.
    """
    name = config._attn_implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attn_implementation {name!r} has no rule; choose one of {', '.join(IMPLEMENTATIONS)}"
        )
    if name == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedModelError('reorder_and_upcast_attn with attn_implementation "eager" has no rule; use "sdpa"')
    chunk = getattr(config, "chunk_size_feed_forward", None)
    if chunk:
        raise UnsupportedModelError(
            f"chunk_size_feed_forward is {chunk}, which would have to divide the positions that a rank of a mesh or a "
            "segment has; set it to 0, which computes the same"
        )


def check_reached() -> None:
    """Make sure that models reach their attention functions through :func:`attention_of`.

    Raises:
        CuboidError: the patch that does this was taken back, so that a sharded model would run plain attention.
    """
    if ALL_ATTENTION_FUNCTIONS.get_interface("eager", check_model_options) is check_model_options:
        raise CuboidError(
            "a sharded model's attention runs through a patch of transformers, which cuboid.unregister() has taken "
            "back; call cuboid.register()"
        )


# Models look functions up in each layer's forward. The same lookup gives the same object, as without us.
@functools.cache
def attention_of(name: str, kernel: ModelKernel) -> ModelKernel:
    """Return what an attention module is to call in place of one implementation's function."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        record = find_record(module)
        if record is None:
            return kernel(module, query, key, value, attention_mask, **kwargs)
        if name not in record.implementations:
            raise UnsupportedModelError(
                f"attn_implementation is {name!r}, but was {' and '.join(sorted(record.implementations))!r} when the "
                "model was sharded, and checked; set it before, as by from_pretrained(attn_implementation=…)"
            )
        return _attend(name, kernel, record, module, Call(query, key, value, attention_mask, kwargs))

    return attend


def _attend(name: str, kernel: ModelKernel, record: AttentionRecord, module: nn.Module, call: Call) -> Any:
    if record.images is not None:
        query, key, value = _without_filling(record.images, module, call.query, call.key, call.value)
        call = Call(query, key, value, call.mask, call.options)
    # Compiled code keeps what its compiler decides.
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and record.is_in_graph and record.place is not None:
        return attend_in_graph(name, kernel, module, call, record.place)
    running = None if is_compiling else kept_attention.get()
    kept = None if running is None else running.next_call()
    lengths = None if is_compiling else forward_context().lengths
    if lengths is not None and lengths.cache is not None:
        return _attend_with_cache(kernel, module, call, lengths, lengths.cache)
    # A graph that looked at the unit would be one of this unit alone.
    unit = None if record.slot is None or (is_compiling and record.is_in_graph) else record.unit
    if record.slot is not None and unit is not None:
        if is_compiling:
            _refuse_compiling(module)
        check_call(call, unit, module)
        # A module may call attention more than once, as differential attention does for each half of its values.
        layer = (record.number, record.slot.next_call(record.number))
        if is_plain(name, call, unit):
            return attend_plain(call, unit, layer, None if kept is None else kept.segment), None
        call = with_prefix(name, call, unit, layer)
    mesh = record.mesh if call.options.get("dropout") else None
    if is_compiling and mesh is not None:
        # A graph's dropouts have seeds of the mesh, but not what packages of their own drop.
        if name not in ("eager", "sdpa"):
            raise UnsupportedModelError(f"attn_implementation {name!r} drops without seeds of a mesh")
        mesh = None
    with nullcontext() if mesh is None else own_random_numbers(mesh, call.query.device):
        if kept is None:
            output, weights = kernel(module, call.query, call.key, call.value, call.mask, **call.options)
        else:
            output, weights = kept.attend(kernel, module, call)
    return output if record.images is None else record.images.filled_up(output, dim=1), weights


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_compiling(module: nn.Module) -> None:
    # torch.compile calls such functions while it traces, so that a script sees this error.
    raise UnsupportedModelError(
        f"a script compiles the layer of {type(module).__name__}, whose segments keep keys and values that no graph of "
        'torch.compile has; write "compile": true under tensor_parallel, which compiles the layers of stages'
    )


def _attend_with_cache(
    kernel: ModelKernel, module: nn.Module, call: Call, lengths: Lengths, cache: RankCache
) -> tuple[torch.Tensor, Any]:
    """Compute attention of the new tokens, without their padding, whose outputs are zeros."""
    if call.key.shape[2] not in cache.lengths:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to {call.key.shape[2]} keys, which aren't those of the cache; generate "
            "with use_cache=False"
        )
    query = call.query[:, :, : lengths.real]
    output, weights = kernel(module, query, call.key, call.value, call.mask, **call.options)
    if lengths.padded == lengths.real:
        return output, weights
    padded = nn.functional.pad(output, (0, 0, 0, 0, 0, lengths.padded - lengths.real))
    # Of four dims, it may come with the channels last, of which the model's code takes no view.
    return padded.contiguous(), weights


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


@functools.cache
def mask_of(name: str, plain: _MaskFunction) -> _MaskFunction:
    """Return what a model is to call in place of one attention implementation's mask function, ``plain``."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and is_outside():
            return plain(*args, **kwargs)
        context = forward_context()
        lengths, unit = context.lengths, context.unit
        masks = Masks.OWN if context.slot is None else context.slot.masks
        if context.recording is not None:
            masks = context.recording.masks
        if masks is Masks.PLAIN:
            return plain(*args, **kwargs)
        form = "eager" if masks is Masks.EXPLICIT else name
        if context.recording is not None:
            return _mask_without_values(form, kwargs)
        # Stages of models whose positions see later ones always run whole sequences, so they take the branches below.
        if unit is not None and lengths is None:
            return segment_mask(form, unit, kwargs)
        if lengths is None or lengths is WHOLE_IMAGES or not lengths.makes_masks:
            return plain(*args, **kwargs)
        return _whole_mask(form, lengths, kwargs)

    return make_mask


def _whole_mask(name: str, lengths: Lengths, arguments: dict[str, Any]) -> Any:
    """Make a mask for the whole sequence, on a rank whose hidden states are a part of it."""
    if arguments.get("allow_is_bidirectional_skip") and lengths.source is not None:
        # A decoder's self-attention is causal, so a bidirectional mask is for its attention to the encoder.
        sizes = {"q_length": lengths.padded, "kv_length": lengths.source.padded}
        return _bidirectional_mask(name, {**arguments, **sizes}, lengths.padded, lengths.source)
    if lengths.cache is not None:
        return mask_function(name)(**{**arguments, "q_length": lengths.real})
    sizes = {"q_length": lengths.padded, "kv_length": lengths.padded}
    if arguments.get("allow_is_bidirectional_skip") and lengths.padded > lengths.real:
        return _bidirectional_mask(name, {**arguments, **sizes}, lengths.padded, lengths)
    mask = mask_function(name)(**{**arguments, **sizes})
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        # Under an additive mask, a position that may see nothing (padding on the left) attends to all positions
        # equally. That must not include the positions that were added here.
        mask[..., lengths.real :] = -torch.inf
    return mask


def _bidirectional_mask(name: str, arguments: dict[str, Any], queries: int, keys: Lengths) -> Any:
    """Make a mask for positions that see later ones, which hides what is padding behind ``keys``, the sequences'
    lengths.
    """
    if keys.padded == keys.real:
        return mask_function(name)(**arguments)
    mask = mask_function(name)(**{**arguments, "allow_is_bidirectional_skip": False})
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
