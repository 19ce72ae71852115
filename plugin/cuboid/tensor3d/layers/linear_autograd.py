"""Forward and backward of a :mod:`.linear_op`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from cuboid.distributed.async_result import AsyncResult
from cuboid.tensor3d.layers.linear_backward import LinearBackward, defer_or_wait
from cuboid.tensor3d.layers.linear_op import LinearOp, Operand
from cuboid.tensor3d.layers.matmul import Pieces
from cuboid.tensor3d.sharding.deferred_reduce import DeferredReduce


def run_linear_op(
    own: LinearOp,
    x: torch.Tensor,
    operands: Sequence[Operand],
    *,
    wants_input: bool = False,
    before: weakref.ref[Node] | None = None,
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor]]:
    """Multiply, differentiably.

    Args:
        own: what is to be multiplied how.
        x: the rank's part of the input.
        operands: for each product.
        wants_input: whether the gathered input is wanted too, differentiably.
        before: a result's node of the multiplication whose backward will be the next one, which can have its input
            gathered during this one's.

    Returns:
        The gathered input, if wanted, and what the products are.
    """
    call = _Call(own, [o.deferred for o in operands], wants_input, before)
    given, *outs = _LinearFunction.apply(x, call, *(o.weight for o in operands), *(o.bias for o in operands))
    return given, outs


@dataclass(frozen=True)
class _Call:
    linear_op: LinearOp
    deferrals: Sequence[DeferredReduce | None]
    wants_input: bool
    before: weakref.ref[Node] | None


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: _Call, *operands: Any) -> tuple[Any, ...]:
        own, count = call.linear_op, len(call.deferrals)
        weights, biases = operands[:count], operands[count:]
        ctx.save_for_backward(x, *weights)
        ctx.call, ctx.parts = call, own.parts(x)
        ctx.set_materialize_grads(False)
        gathering = [own.input_gather.start(part) for part in x.tensor_split(ctx.parts)]
        own.start_unshard(weights)
        inputs, started = [], []
        for part in gathering:
            pieces = part.wait()
            inputs += [pieces[0]] if call.wants_input else []
            started.append([output_reduce.start(pieces, own.columns(numbers)) for output_reduce, numbers in own.groups])
        keep = any(ctx.needs_input_grad)
        ctx.kept = [p.weight.reshard_after_forward(w, keep=keep) for p, w in zip(own.products, weights, strict=True)]
        results = [own.in_order([each.wait() for each in part]) for part in started]
        outs = [_joined(parts) for parts in zip(*results, strict=True)]
        for out, bias in zip(outs, biases, strict=True):
            if bias is not None:
                out.add_(bias)
        ctx.shapes = [out.shape for out in outs]
        ctx.begun = None
        return (_joined(inputs) if call.wants_input else None, *outs)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        begun, ctx.begun = _begun(ctx), None
        dy = [
            begun.x.new_zeros(shape) if gradient is None else gradient
            for gradient, shape in zip(gradients, ctx.shapes, strict=True)
        ]
        needs_x, _, *needs = ctx.needs_input_grad
        biases = zip(dy, needs[len(begun.weights) :], strict=True)
        dbiases = [each.flatten(0, -2).sum(0) if wanted else None for each, wanted in biases]
        way = LinearBackward(ctx.call.linear_op, needs_x, needs[: len(begun.weights)])
        dx, dweights = way.run(begun.gathering, begun.weights, dy, ctx.parts, partial(_begin, ctx.call.before))
        if given is not None and dx is not None:
            dx = dx + way.scatter_input(given)
        # What keeps blocks over the step, for this one.
        ctx.kept = None
        left = [defer_or_wait(dweights.get(number), deferred) for number, deferred in enumerate(ctx.call.deferrals)]
        return dx, None, *left, *dbiases


@dataclass(frozen=True)
class _Begun:
    """What of a backward needs no gradient: the saved tensors, and the input on its way, part by part, if wanted."""

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    gathering: Sequence[AsyncResult[Pieces]]


def _begun(ctx: Any) -> _Begun:
    """Begin a backward, unless that was done."""
    if ctx.begun is None:
        # Activation checkpointing gives them away once only.
        x, *weights = ctx.saved_tensors
        wanted = any(ctx.needs_input_grad[2 : 2 + len(weights)])
        input_gather = ctx.call.linear_op.input_gather
        gathering = [input_gather.start(part) for part in x.tensor_split(ctx.parts)] if wanted else []
        ctx.begun = _Begun(x, weights, gathering)
    return ctx.begun


def _begin(before: weakref.ref[Node] | None) -> None:
    """Begin another one's backward, if this one's graph will come to it."""
    node = None if before is None else before()
    if node is not None and torch._C._will_engine_execute_node(node):
        _begun(node)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
