"""Initial values of new adapters: which random numbers a layer draws, and whether they matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import nn

from cuboid.tensor3d.layers.dropout import seeded
from cuboid.tensor3d.sharding.refused_draws import drawing_whole

#: Gives the seed of a layer's new adapter; None for whatever torch's generator draws next, as in plain PEFT.
_seeds: ContextVar[Callable[[nn.Module], int] | None] = ContextVar("cuboid_adapter_seeds", default=None)
#: Whether the initial values of a new adapter don't matter, since it is being read from files.
is_loading: ContextVar[bool] = ContextVar("cuboid_adapter_is_loading", default=False)


@contextmanager
def seeded_by(seed_of: Callable[[nn.Module], int] | None) -> Iterator[None]:
    """In the ``with`` block, new adapters get a seed for each layer that they are around; None for the generator's."""
    token = _seeds.set(seed_of)
    try:
        yield
    finally:
        _seeds.reset(token)


@contextmanager
def seeded_for(base: nn.Module) -> Iterator[None]:
    """In the ``with`` block, a layer's new adapter is made: it draws the layer's random numbers, for whole factors."""
    seed_of = _seeds.get()
    with drawing_whole(), nullcontext() if seed_of is None else seeded(torch.device("cpu"), seed_of(base)):
        yield
