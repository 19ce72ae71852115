"""Gathers the router logits of a whole micro-batch, for the loss that a model's own code computes from them.

transformers' load balancing loss is a product of means over all tokens of a micro-batch and all layers, which isn't the
sum of the losses of parts. So the code around the base model gets the logits of all tokens and the whole mask, as on a
single process, and computes the same on all ranks. However it scales and uses the loss, the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import cut_positions, gather_dim, gather_positions, own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.models.batch.local_batch import LocalBatch


@contextmanager
def whole_router_logits(base: nn.Module, batch: LocalBatch, mesh: Mesh, *, are_split: bool) -> Iterator[None]:
    """In the ``with`` block, a base model returns whole router logits.

    Args:
        base: the base model.
        batch: the rank's part of the micro-batch that is running.
        mesh: the model's mesh.
        are_split: whether routers see only the rank's own tokens.

    Raises:
        UnsupportedModelError: ``are_split`` is false.
    """
    if not are_split:
        raise UnsupportedModelError(
            f"output_router_logits: the routers of {type(base).__name__} are in blocks that are computed whole, where "
            "a rank doesn't know which tokens their logits are of; set it to false, or use a mesh of one rank"
        )
    hook = base.register_forward_hook(_WholeLogits(batch, mesh).gather)
    try:
        yield
    finally:
        hook.remove()


class _WholeLogits:
    def __init__(self, batch: LocalBatch, mesh: Mesh) -> None:
        self._batch, self._mesh = batch, mesh

    def gather(self, base: nn.Module, _: Any, output: Any) -> Any:
        """A forward hook of the base model: ``[B/b · S/s, E]`` of each layer to ``[B · S, E]``."""
        logits: Sequence[torch.Tensor] | None = getattr(output, "router_logits", None)
        if not logits:
            return output
        rows, padded = self._batch.tensors["input_ids"].shape
        length = cut_positions(padded, self._mesh.size("sequence"))
        if any(x.dim() != 2 or len(x) != rows * length for x in logits):
            raise UnsupportedModelError(
                f"the router logits of {type(base).__name__} are {[list(x.shape) for x in logits]}, where "
                f"{rows * length} tokens were given; set output_router_logits to false"
            )
        stacked = torch.stack(list(logits)).unflatten(1, (rows, length))
        gathered: torch.Tensor = _GatherRouters.apply(stacked, self._mesh)
        gathered = gathered[:, : self._batch.rows, : self._batch.length]
        output.router_logits = gathered.flatten(1, 2).unbind()
        return output


class _GatherRouters(torch.autograd.Function):
    """``[L, B/b, S/s, E]``, equal along `hidden`, to ``[L, B, S, E]``, from which all ranks compute the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return gather_dim(gather_positions(x, mesh.along("sequence"), 2), 1, mesh.along("batch"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local = own_slice(own_slice(gradient, 2, ctx.mesh.along("sequence")), 1, ctx.mesh.along("batch"))
        # Gradients of logits are summed over `hidden`, and each of its ranks has this one completely.
        return local / ctx.mesh.size("hidden"), None
