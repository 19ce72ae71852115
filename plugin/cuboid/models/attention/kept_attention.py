"""Attention computed once: what a checkpointed layer keeps of it, so that its recomputation runs no attention kernel.

:func:`torch.utils.checkpoint.checkpoint` runs a function in one context, and its recomputation in another one.
:func:`keep_attention` makes such a pair. In the first, each call of an attention function keeps its output and
log-sum-exp, which are all that the backward of attention needs beside queries, keys and values; in the second, the
same calls are given them.

Segments have a function of their own, which takes them directly. The model's own kernels run under torch's selective
checkpointing. It surrounds the kernel's call only: a mode that sees every operation of the layer would cost the host
more than short attention costs the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.segment_call import Call
from cuboid.seq1f1b.attention.chunked_attention import Kept, KeptCall, OnDevice
from cuboid.seq1f1b.runtime.host_store import HostStore

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
#: An attention function of transformers, which returns the output and perhaps the probabilities.
ModelKernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

#: torch's fused attention, by operator; all return the output and the log-sum-exp, and what dropout drew.
_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "attend_segment",
    "attend_dropping",
)
_PRODUCTS = ("bmm", "baddbmm", "mm", "addmm")


@dataclass(eq=False)
class _Policy:
    """Tells torch's selective checkpointing which operations of a kernel, for Lq queries and Lk keys, keep their
    results.

    Of a kernel that isn't fused, that is the product of probabilities and values. Its backward needs the probabilities,
    which take S × S memory; they are computed again, as fused kernels do in their backward.

    Attributes:
        kept: number of operations whose results were kept.
    """

    queries: int
    keys: int
    query_dim: int
    value_dim: int
    kept: int = field(default=0, init=False)
    _products: int = field(default=0, init=False)

    def __call__(self, _: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        if self._is_fused(operator) or self._is_last_product(operator, args):
            self.kept += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _is_fused(self, operator: Any) -> bool:
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace == "aten":
            return name in _FUSED
        # The operators of the flash-attn package, and of its builds on the Hugging Face hub.
        is_forward = ("fwd" in name or "forward" in name) and not ("bwd" in name or "backward" in name)
        return "flash_attn" in operator.namespace and is_forward

    def _is_last_product(self, operator: Any, args: tuple[Any, ...]) -> bool:
        if operator.namespace != "aten" or operator.name().removeprefix("aten::") not in _PRODUCTS:
            return False
        self._products += 1
        # The product of queries and keys comes first, and may have the same sizes.
        may_be = self._products > 1 or self.query_dim != self.keys
        left, right = args[-2:]
        is_of_values = tuple(right.shape[-2:]) == (self.keys, self.value_dim)
        return may_be and is_of_values and tuple(left.shape[-2:]) == (self.queries, self.keys)


@dataclass(eq=False)
class AttentionCall:
    """What one call of an attention function keeps.

    Attributes:
        segment: filled by :func:`~cuboid.seq1f1b.attention.chunked_attention.attend_segment`, if that runs.
    """

    segment: KeptCall
    _recomputing: AbstractContextManager[Any] | None = None
    _drawn: torch.Tensor | None = None

    def attend(self, kernel: ModelKernel, module: nn.Module, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the model's own kernel, and keep what it computes; in the recomputation, give it what was kept.

        Raises:
            UnsupportedModelError: the kernel has no operation whose result can be kept.
        """
        context, policy = self._recomputing, None
        if context is None:
            policy = _Policy(call.query.shape[2], call.key.shape[2], call.query.shape[3], call.value.shape[3])
            context, self._recomputing = create_selective_checkpoint_contexts(policy)
        with context:
            result = kernel(module, call.query, call.key, call.value, call.mask, **call.options)
        if policy is not None and self.segment.keep is not OnDevice:
            self._move_results(context)
        if policy is not None and policy.kept == 0:
            raise UnsupportedModelError(
                f"{type(module).__name__} computes attention by operators of which none is known to be attention's "
                'kernel, so that its output can\'t be kept; write "activation_checkpointing": {"mode": "layers"}'
            )
        if call.options.get("dropout"):
            self._advance_generator(call.query.device, is_first=policy is not None)
        return result

    def _move_results(self, context: Any) -> None:
        """Keep the results that torch's context has kept on the device as this call keeps tensors."""
        for results in context.storage.values():
            # By the number of the call; torch 2.11 has a list of them.
            pairs = results.items() if isinstance(results, dict) else enumerate(results)
            for index, result in pairs:
                results[index] = tree_map(self._moved, result)

    def _moved(self, wrapper: Any) -> Any:
        tensor = getattr(wrapper, "val", None)
        return _Moved(self.segment.keep(tensor)) if isinstance(tensor, torch.Tensor) else wrapper

    def _advance_generator(self, device: torch.device, *, is_first: bool) -> None:
        """Leave the generator in the recomputation as the forward left it: a kernel that isn't run draws nothing."""
        generators: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        where = () if device.type == "cpu" else (device,)
        if is_first:
            self._drawn = generators.get_rng_state(*where)
        else:
            generators.set_rng_state(self._drawn, *where)


class _Moved:
    """In place of what torch's selective checkpointing wraps a result in."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def get_val(self, _: bool) -> torch.Tensor:
        """The result; called once, in the recomputation."""
        return self._kept.read()


@dataclass(eq=False)
class KeptAttention:
    """What one checkpointed forward keeps of its attention, call by call; see :func:`keep_attention`."""

    keep: Callable[[torch.Tensor], Kept] = OnDevice
    calls: list[AttentionCall] = field(default_factory=list)
    #: The next call of the recomputation; None in the forward.
    _next: int | None = None

    def next_call(self) -> AttentionCall:
        """What the next call of an attention function keeps, or kept in the forward."""
        if self._next is None:
            self.calls.append(AttentionCall(KeptCall(self.keep)))
            return self.calls[-1]
        self._next += 1
        return self.calls[self._next - 1]


#: What the running forward or recomputation of a layer keeps; None unless it is checkpointed with attention kept. Not
#: in the :class:`~cuboid.models.attention.forward_context.ForwardContext`: a recomputation begins without one.
kept_attention: ContextVar[KeptAttention | None] = ContextVar("cuboid_kept_attention", default=None)


class _Running:
    """In this context, calls of attention functions find what they keep. It may be entered more than once."""

    def __init__(self, kept: KeptAttention, *, recomputes: bool) -> None:
        self._kept, self._recomputes = kept, recomputes
        self._tokens: list[Token[KeptAttention | None]] = []

    def __enter__(self) -> None:
        self._kept._next = 0 if self._recomputes else None
        self._tokens.append(kept_attention.set(self._kept))

    def __exit__(self, *_: object) -> None:
        kept_attention.reset(self._tokens.pop())


def keep_attention(store: HostStore | None = None) -> Contexts:
    """A ``context_fn`` for :func:`torch.utils.checkpoint.checkpoint`, which keeps attention's results.

    Args:
        store: moves them to the host while a frame of it runs.
    """
    frame = None if store is None else store.running
    kept = KeptAttention() if frame is None else KeptAttention(frame.keep)
    return _Running(kept, recomputes=False), _Running(kept, recomputes=True)


def _keeps_fused(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    name = operator.name().partition("::")[2].partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _FUSED else CheckpointPolicy.PREFER_RECOMPUTE


def keep_attention_in_graph() -> Contexts:
    """As :func:`keep_attention` in a compiled graph, where torch's selective checkpointing costs the host nothing."""
    contexts: Contexts = create_selective_checkpoint_contexts(_keeps_fused)
    return contexts


class _Both:
    """Two contexts, one inside the other, which may be entered again."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts = outer, inner
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stacks.pop().__exit__(*error)


def keeping_attention(
    contexts: Callable[[], Contexts] | None, store: HostStore | None = None
) -> Callable[[], Contexts]:
    """A ``context_fn`` that does what another one does, and keeps attention's results."""
    if contexts is None:
        return functools.partial(keep_attention, store)

    def both() -> Contexts:
        (forward, recomputation), (outer, again) = keep_attention(store), contexts()
        return _Both(outer, forward), _Both(again, recomputation)

    return both
