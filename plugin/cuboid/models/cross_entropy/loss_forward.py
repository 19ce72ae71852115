"""Forward of a sharded model whose loss is wanted and not its logits, which then exist for one chunk only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.cross_entropy.chunked import ChunkedCrossEntropy, least_positions
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.tensor3d.layers.norm import statistics_dtype
from cuboid.tensor3d.layers.vocab_cross_entropy import divisor, predicted, sharded_cross_entropy
from cuboid.tensor3d.unshard import UnshardedParam


def forward_with_bounded_loss(
    model: PreTrainedModel,
    forward: Callable[[], Any],
    *,
    running: Callable[..., AbstractContextManager[None]],
    unbound: Callable[..., Any],
    mesh: Mesh,
    chunk_bytes: int | None,
) -> Any:
    """Run a model's own forward with a ``loss_function`` that computes logits itself, chunk by chunk.

    The forward gets final hidden states of only a few positions, and the logits that it computes from them are ignored;
    its loss is that of all positions. Hooks on the head run for each chunk, hooks on the base model once.

    Args:
        model: a sharded model that contains a base model.
        forward: calls the model's own forward, with labels.
        running: makes the context in which that forward finds another ``loss_function``, given as ``loss``.
        unbound: that forward as its class has it, unbound.
        mesh: the model's mesh.
        chunk_bytes: see :class:`~cuboid.models.cross_entropy.chunked.ChunkedCrossEntropy`.

    Returns:
        The forward's output, with None for logits.

    Raises:
        UnsupportedModelError: the forward doesn't get its loss from one call of ``self.loss_function``.
    """
    with ExitStack() as stack:
        ending = _Ending(model, unbound, mesh, chunk_bytes, stack)
        hook = model.base_model.register_forward_hook(ending.cut)
        stack.callback(hook.remove)
        stack.enter_context(running(loss=ending.loss))
        output = forward()
    if not ending.is_done:
        raise UnsupportedModelError(
            f"{type(model).__name__} was given labels and didn't call its loss_function, so its loss is unknown"
        )
    output.logits = None
    return output


@dataclass(frozen=True)
class _Base:
    base: str
    output: type


@dataclass
class _Ending:
    """Replaces the computation from the base model's output to the loss."""

    model: PreTrainedModel
    unbound: Callable[..., Any]
    mesh: Mesh
    chunk_bytes: int | None
    stack: ExitStack
    is_done: bool = False
    hidden: torch.Tensor | None = None
    unsharded: list[UnshardedParam] = field(default_factory=list)

    def cut(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the base model: keep its hidden states, and return as few positions as the head takes."""
        if not isinstance(output, ModelOutput) or self.hidden is not None:
            raise UnsupportedModelError(
                f"the forward of {type(self.model).__name__} doesn't call its base model once for an output with names"
            )
        self.hidden = output.last_hidden_state
        self.head = Head(self.model, _Base(self.model.base_model_prefix, type(output)), self.unbound)
        # Unshard before the forward calls the head itself, so that this call needs no all-gather of its own.
        self.unsharded = self.stack.enter_context(self.head.unsharded())
        few = self.hidden[:, : least_positions(self.mesh)].detach()
        return type(output)(**{**output, "last_hidden_state": few})

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Replaces Hugging Face's ``ForCausalLMLoss``; ignores ``logits``, which are of a few positions only."""
        if self.is_done:
            raise UnsupportedModelError(f"the forward of {type(self.model).__name__} calls its loss_function twice")
        self.is_done = True
        targets = predicted(labels, shift_labels, ignore_index)
        if self.hidden is None:
            # The forward called a part of its base model directly, so the hook didn't run: the logits are complete.
            return sharded_cross_entropy(
                logits,
                targets,
                vocabulary=vocab_size,
                mesh=self.mesh,
                items=num_items_in_batch,
                ignore_index=ignore_index,
            )
        like = logits.new_empty((), dtype=statistics_dtype(logits.dtype))
        scale = divisor(targets, self.mesh, num_items_in_batch, ignore_index, like).reciprocal()
        loss = ChunkedCrossEntropy(self.head, targets, scale, vocab_size, self.mesh, self.chunk_bytes, ignore_index)
        if not torch.is_grad_enabled():
            return loss.value(self.hidden)
        parameters = [param.parameter for param in self.unsharded]
        return _DifferentiableLoss.apply(loss, self.unsharded, self.hidden, *parameters)


class _DifferentiableLoss(torch.autograd.Function):
    """A chunked loss whose gradients are computed in forward, and multiplied by the loss's gradient in backward.

    In float16 that would underflow, since the loss scale comes with backward. There, backward recomputes the logits and
    scales the loss before it computes gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: ChunkedCrossEntropy,
        unsharded: Sequence[UnshardedParam],
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.precision = _Precision.of(hidden)
        ctx.loss = loss
        if ctx.precision.is_narrow or not any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, *parameters)
            # An adapter of the head may have dropout, whose masks backward draws again.
            ctx.generators = _generator_states(hidden.device) if loss.head.drops_out else None
            return loss.value(hidden)
        value, gradient = loss.value_and_gradients(hidden, unsharded)
        ctx.save_for_backward(gradient, *(param.gradient() for param in unsharded))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.precision.is_narrow:
            return None, None, *(None if gradient is None else gradient * factor for gradient in ctx.saved_tensors)
        hidden, *_ = ctx.saved_tensors
        with _drawing_again(ctx.generators), ctx.precision.again(), ctx.loss.head.unsharded() as unsharded:
            _, gradient = ctx.loss.value_and_gradients(hidden, unsharded, factor)
            return None, None, gradient, *(param.gradient() for param in unsharded)


_Generators = dict[torch.device, torch.Tensor]


def _generator_states(device: torch.device) -> _Generators:
    """The states of the generators on the host and on a device."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    if device.type != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


@contextmanager
def _drawing_again(states: _Generators | None) -> Iterator[None]:
    """In the ``with`` block, generators have these states, if there are any; afterwards, those from before."""
    if states is None:
        yield
        return
    devices = [device for device in states if device.type != "cpu"]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        torch.set_rng_state(states[torch.device("cpu")])
        for device in devices:
            torch.get_device_module(device).set_rng_state(states[device], device)
        yield


class _Precision(NamedTuple):
    """The dtypes that a head computes in. Backward restores them, since autocast is off there."""

    device: str
    autocast: torch.dtype | None
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: torch.Tensor) -> _Precision:
        """The current dtypes for these hidden states."""
        device = hidden.device.type
        enabled = torch.is_autocast_enabled(device)
        return cls(device, torch.get_autocast_dtype(device) if enabled else None, hidden.dtype)

    @property
    def is_narrow(self) -> bool:
        """Whether the head computes in float16, in which unscaled gradients may underflow."""
        return (self.autocast or self.dtype) is torch.float16

    def again(self) -> torch.autocast:
        """A context manager that restores the state of autocast."""
        return torch.autocast(self.device, self.autocast, enabled=self.autocast is not None)
