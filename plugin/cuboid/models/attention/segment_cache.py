"""Stands in for Hugging Face's key/value cache, so that a segment continues where the previous one ended.

Hugging Face's layers continue a sequence whose beginning is in a ``Cache``: attention reads its keys and values,
convolutions their last inputs, and linear attention and state space models start from its state. Those caches are made
for generation and overwrite in place what training's backward needs. :class:`SegmentCache` has the same interface, but
reads the micro-batch's own KV cache and states, with gradients.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.forward_context import Unit, UnitSlot
from cuboid.models.attention.segments import STRIPPED, cache_argument, uses_interface
from cuboid.seq1f1b.attention.chunked_attention import prefix
from cuboid.seq1f1b.attention.recurrent_states import StateKey, carry_states, read_state

_CONVOLUTION, _RECURRENT = "convolution", "recurrent"


class SegmentCache:
    """The cache that one layer sees: everything before the running segment."""

    def __init__(self, layer: nn.Module, slot: UnitSlot) -> None:
        self._layer, self._slot = layer, slot
        self._adds_prefix = not uses_interface(layer)
        #: States that the running forward has computed; None outside it and in a checkpointed layer's recomputation.
        self._made: dict[StateKey, torch.Tensor] | None = None
        self._without_grad = False

    # --- called by the layer's code ---------------------------------------------------------------------------------

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Number of positions before the running segment."""
        return self._unit.start

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether there are positions before the running segment."""
        return self._unit.start > 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys ``[B, Hkv, ·, D]`` and values (with Dv) that attention needs.

        If the layer uses Hugging Face's attention interface, that adds those of earlier segments, so this doesn't.

        Raises:
            UnsupportedModelError: a layer calls this more than once.
        """
        if not self._adds_prefix:
            return key, value
        if self._slot.next_call(self) > 0:
            raise UnsupportedModelError(f"{self._name} has no rule with segments: it updates its cache more than once")
        unit = self._unit
        return prefix(key, value, unit.store, self, unit.start)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None, so that the layer doesn't take its single-position path, which writes into the state in place.

        :meth:`update_conv_state` adds the earlier inputs instead.
        """
        return

    def update_conv_state(
        self,
        inputs: torch.Tensor,
        _: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Return a convolution's inputs ``[B, C, L]``, preceded by the previous segment's last ones ``[B, C, K]``.

        Raises:
            UnsupportedModelError: the layer doesn't pass ``conv_kernel_size``, K.
        """
        if conv_kernel_size is None:
            raise UnsupportedModelError(
                f"{self._name} has no rule with segments: it doesn't tell its cache the length of its convolution"
            )
        unit = self._unit
        extended = inputs
        if unit.start > 0:
            extended = torch.cat(
                [read_state(unit.store.states, self._key(_CONVOLUTION, state_idx, unit.start)), inputs], -1
            )
        missing = conv_kernel_size - extended.shape[-1]
        last = nn.functional.pad(extended, (missing, 0)) if missing > 0 else extended[..., -conv_kernel_size:]
        self._keep(_CONVOLUTION, state_idx, last)
        return extended

    def get_recurrent_state(self, _: int = 0, state_idx: int = 0, **__: Any) -> torch.Tensor | None:
        """Return the state at the end of the previous segment; None for the first segment.

        Raises:
            UnsupportedModelError: the segment is a single position, for which layers update the state in place.
        """
        unit = self._unit
        if unit.start == 0:
            return None
        if unit.stop - unit.start == 1:
            raise UnsupportedModelError(
                f"{self._name} has no rule for a segment of a single position, which Hugging Face computes in a way "
                "that has no gradients; use fewer segments or longer sequences"
            )
        return read_state(unit.store.states, self._key(_RECURRENT, state_idx, unit.start))

    def update_recurrent_state(self, state: torch.Tensor, _: int = 0, state_idx: int = 0, **__: Any) -> torch.Tensor:
        """Keep the state at the end of the running segment."""
        self._keep(_RECURRENT, state_idx, state)
        return state

    # MiniMax's names. Its lightning attention continues from a state position by position, which is correct but slow.

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """See :meth:`get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """See :meth:`update_recurrent_state`."""
        self.update_recurrent_state(state, layer_idx)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"{self._name} has no rule with segments: it asks its cache for {name}")

    # --- around a layer's forward -----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Prepare for a forward; return whether the layer needs a cache for it."""
        unit = self._slot.current
        self._made = None if unit is None or unit.is_whole else {}
        self._without_grad = False
        return self._made is not None

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        """Finish a forward; return its output, whose backward also covers the states that the forward computed.

        Raises:
            UnsupportedModelError: the states have no autograd graph for their gradients.
        """
        made, self._made = self._made, None
        if not made or not hidden.requires_grad:
            return hidden
        if self._without_grad:
            raise UnsupportedModelError(
                f"{self._name} has no rule with segments and reentrant activation checkpointing, which has no graph "
                "for the state that a segment hands to the next one; set use_reentrant to false in "
                "gradient_checkpointing_kwargs"
            )
        return carry_states(hidden, self._unit.store.states, list(made), list(made.values()))

    @property
    def _unit(self) -> Unit:
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(f"{self._name} has no form in a graph with segments: it reads its cache")
        unit = self._slot.current
        assert unit is not None, "a layer is given a cache in units only"
        return unit

    @property
    def _name(self) -> str:
        return type(self._layer).__name__

    def _key(self, kind: str, number: int, stop: int) -> StateKey:
        return (self, kind, number), stop

    def _keep(self, kind: str, number: int, state: torch.Tensor) -> None:
        if self._made is None:
            return
        unit = self._unit
        if unit.stop == unit.length:  # the last segment's state isn't read
            return
        key = self._key(kind, number, unit.stop)
        if key in self._made:
            raise UnsupportedModelError(f"{self._name} has no rule with segments: it updates a state more than once")
        self._without_grad |= not torch.is_grad_enabled()
        unit.store.states.write(key, state)
        self._made[key] = state


def give_cache(layer: nn.Module, slot: UnitSlot) -> None:
    """Pass a :class:`SegmentCache` to a layer whenever it runs a segment, if it has an argument for a cache."""
    argument = cache_argument(layer)
    if argument is None:
        return
    cache = SegmentCache(layer, slot)
    place = list(inspect.signature(layer.forward).parameters).index(argument)
    keeps_cache = hasattr(layer, "_can_checkpoint_with_cache")
    # transformers' checkpointing removes the cache from a layer's arguments unless the layer has this attribute.
    is_stripped = argument in STRIPPED and not keeps_cache

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not cache.begin():
            return None
        if is_stripped and getattr(module, "gradient_checkpointing", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} has no rule with segments and activation checkpointing in this version of "
                "transformers, which takes from the layer what tells it where its segment begins"
            )
        # If the caller passes the argument by position, replace it there: a keyword would clash.
        if place < len(args):
            return (*args[:place], cache, *args[place + 1 :]), kwargs
        return args, {**kwargs, argument: cache}

    def carry(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (cache.end(output[0]), *output[1:])
        return cache.end(output)

    # In transformers, layers that write to their cache leave this False, because the recomputation would update it a
    # second time. Here it may keep the cache: it reads it again, but updates no state twice.
    if keeps_cache:
        vars(layer)["_can_checkpoint_with_cache"] = True
    layer.register_forward_pre_hook(give, with_kwargs=True)
    layer.register_forward_hook(carry)
