"""Dropout whose masks differ between ranks although their random generators agree.

Users seed all ranks alike, and samplers depend on it. Each activation element lives on one rank, so any masks are
right; but equal masks on the slices of one activation would be correlated. A region of random numbers therefore
runs under a generator state derived from one draw of the common generator and the rank's position: the common
generator advances alike everywhere, and activation checkpointing, which restores it, repeats the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import AXES, Axis


@contextmanager
def own_random_numbers(mesh: Mesh, device: torch.device, axes: tuple[Axis, ...] = AXES) -> Iterator[None]:
    """Inside, random numbers on ``device`` differ between ranks along ``axes``; outside, generators stay in step.

    Ranks that differ only along other axes draw the same. Of other devices' generators, only the host's changes: it
    advances by one number.
    """
    if mesh.size(*axes) == 1:
        yield
        return
    # On the host, whatever the default device is: reading the seed must not wait for a device.
    seed = int(torch.randint(2**62, (), device="cpu")) + mesh.index(*axes)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)
    # `manual_seed` seeds the current device, which may not be the tensor's.
    with module.device(device):
        module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before, device)


class _MeshDropout(nn.Dropout):
    """``nn.Dropout`` whose masks depend on the mesh."""

    def __init__(self, p: float, mesh: Mesh) -> None:
        super().__init__(p)
        self.mesh = mesh

    @uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[...]`` to ``[...]``."""
        return self._drop(x) if self.training and self.p > 0 else x

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ShardedDropout(_MeshDropout):
    """``nn.Dropout`` under :func:`own_random_numbers`, for activations that differ along ``axes``."""

    def __init__(self, p: float, mesh: Mesh, axes: tuple[Axis, ...] = AXES) -> None:
        super().__init__(p, mesh)
        self._axes = axes

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        with own_random_numbers(self.mesh, x.device, self._axes):
            return nn.functional.dropout(x, self.p, training=True)


class CommonDropout(_MeshDropout):
    """``nn.Dropout`` for activations that every rank has whole: all use the first rank's mask, whatever their seeds."""

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.empty_like(x).bernoulli_(1 - self.p)
        if self.mesh.shape.size > 1:
            kept = all_gather(kept, self.mesh.along(*AXES))[0]
        # At p = 1, `kept` is zeros: divide by something else than zero.
        return x * kept / max(1 - self.p, torch.finfo(x.dtype).tiny)
