"""The projections of one input fused: one all-gather of the sequence, and one reduce-scatter for all of their outputs.

Attention and MLP blocks take the residual stream ``[B/b, S/s, H/h]`` and call their projections one by one. Before the
block's own code runs, this computes all of them together; each finds its result when it is called. The gathered
tensor is never saved for backward, only the shard. (Colossal-AI's 3-D layers save the gathered tensors, and with them
the factor s of memory.)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.input_gather import GatherSequence
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype, hand_over
from cuboid.tensor3d.layers.linear_autograd import run_linear_op
from cuboid.tensor3d.layers.linear_op import LinearOp, Product


class FusedProjections:
    """A forward pre-hook of the module that calls the projections.

    Args:
        projections: all "up" projections of a block, or the head.
        exits: its "down" projections, whose backward runs before theirs.
    """

    def __init__(self, projections: Sequence[ShardedLinear], exits: Sequence[ShardedLinear] = ()) -> None:
        self._projections = list(projections)
        self._exits = list(exits)
        self._mesh = projections[0].mesh
        self._linear_op = LinearOp(GatherSequence(self._mesh), self._products())

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input by the gathered one, which knows what the projections will make of it."""
        if args:
            return (self.enter(args[0]), *args[1:]), kwargs
        if "hidden_states" not in kwargs:
            raise UnsupportedModelError(f"{type(module).__name__} was called without hidden_states; no rule for that")
        return args, {**kwargs, "hidden_states": self.enter(kwargs["hidden_states"])}

    def _products(self) -> tuple[Product, ...]:
        return tuple(each.product for each in self._projections)

    def enter(self, shard: torch.Tensor) -> torch.Tensor:
        """``[B/b, S/s, H/h]`` to ``[B/b, S, H/h]``."""
        gathers = self._mesh.size("sequence") > 1
        dtype = autocast_dtype(shard)
        operands = [each.operand(dtype) for each in self._projections]
        if self._linear_op.products != self._products():
            # As while their weights stay unsharded.
            self._linear_op = LinearOp(GatherSequence(self._mesh), self._products())
        whole, results = run_linear_op(self._linear_op, shard.to(dtype), operands, wants_input=gathers)
        node = results[0].grad_fn
        for each in self._exits:
            each.before = None if node is None else weakref.ref(node)
        # Along one rank the input is its own gathered self.
        full = shard if whole is None else whole
        hand_over(full, dict(zip(self._projections, results, strict=True)))
        return full
