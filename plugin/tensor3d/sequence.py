"""The entrance of a block: one gather of the sequence, shared by every projection behind it.

Attention and MLP blocks take the residual stream ``[B/b, S/s, H/h]`` and need ``[B/b, S, H/h]``. The gathered tensor
is never saved for backward: the projections save the shard, and the first of them to run backward gathers it
again for all. (Colossal-AI's 3-D layers save the gathered tensors, and with them the factor s of memory.)
"""

from __future__ import annotations

from typing import Any

import torch

from cuboid.mesh import Mesh
from cuboid.tensor3d.collectives import gather_dim, scatter_dim

SEQUENCE_DIM = 1


class Regather:
    """The second gather of an entrance's input, shared by the projections' backwards.

    Holds no tensor between forward and backward, so that activation checkpointing frees what it should.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._full: torch.Tensor | None = None
        self._users = 0
        self._waiting = 0

    def join(self) -> None:
        """A projection will need the gathered input in its backward."""
        self._users += 1
        self._waiting = self._users

    def take(self, shard: torch.Tensor) -> torch.Tensor:
        """The gathered input, ``[B/b, S/s, H/h]`` to ``[B/b, S, H/h]``. The last taker frees it."""
        if self._full is None:
            self._full = gather_dim(shard, SEQUENCE_DIM, self._mesh, ("sequence",))
        full = self._full
        self._waiting -= 1
        if self._waiting == 0:
            self._full, self._waiting = None, self._users
        return full


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return gather_dim(shard, SEQUENCE_DIM, mesh, ("sequence",))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_dim(gradient, SEQUENCE_DIM, ctx.mesh, ("sequence",)), None


def enter_block(shard: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Gather the sequence of a block's input: ``[B/b, S/s, H/h]`` to ``[B/b, S, H/h]``.

    The result remembers the shard, which :func:`saved_input` hands to the projections.
    """
    if mesh.size("sequence") == 1:
        return shard
    full = _Enter.apply(shard, mesh)
    full.cuboid_entrance = (shard.detach(), Regather(mesh))
    return full


def saved_input(full: torch.Tensor) -> tuple[torch.Tensor, Regather | None]:
    """What a projection saves instead of its input: the shard and how to gather it again.

    A tensor that didn't come straight from :func:`enter_block` is its own saved input.
    """
    shard, regather = getattr(full, "cuboid_entrance", (full.detach(), None))
    return shard, regather
