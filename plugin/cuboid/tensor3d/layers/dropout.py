"""Random numbers on a mesh: different ones for different parts of a tensor, the same for what several ranks have.

Users seed all ranks alike, and samplers depend on it. Each activation element lives on one rank, so any masks are
right; but equal masks on the slices of one activation would be correlated. A region of random numbers therefore
runs under a generator state derived from one draw of the common generator and the rank's position: the common
generator advances alike everywhere, and activation checkpointing, which restores it, repeats the same masks.

Where ranks must draw the same, their generators on the host have to agree. A forward knows whether they do (see
:class:`Generators`), and regions that need it ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.distributed.axis_collectives import all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import AXES, Axis

#: Seeds are below this, with room for a rank's position.
SEEDS = 2**62


class Generators(Protocol):
    """Compares the states that the ranks' generators on the host had at the beginning of a forward."""

    def number_if_differing(self) -> int | None:
        """A number of the first rank's state, the same on all ranks; None if the states are equal."""

    def require_equal(self) -> None:
        """Raise an error on all ranks if the states differ."""


@dataclass
class _Region:
    """Random numbers of one region, whose seed is the same on all ranks."""

    seed: int
    #: Whether everything inside is to be drawn under the rank's seed. Otherwise
    #: :class:`~cuboid.tensor3d.layers.random_draws.RandomDraws` still looks at each draw.
    is_settled: bool
    #: Number of regions inside so far.
    draws: int = 0

    def next_seed(self) -> int:
        """A seed for a region inside, the same on all ranks. The ranks' generators differ there, so not drawn."""
        self.draws += 1
        return seed_inside(self.seed, self.draws)


def seed_inside(seed: int, number: int) -> int:
    """The seed of a region's draw of this number, from 1; number 0 is the region's own seed."""
    return (seed + number * 0x1E3779B97F4A7C15) % SEEDS


_generators: ContextVar[Generators | None] = ContextVar("cuboid_generators", default=None)
_region: ContextVar[_Region | None] = ContextVar("cuboid_random_region", default=None)


@contextmanager
def compared_by(generators: Generators | None) -> Iterator[None]:
    """In the ``with`` block, ``generators`` tells whether the ranks' generators agree."""
    token = _generators.set(generators)
    try:
        yield
    finally:
        _generators.reset(token)


def running_generators() -> Generators | None:
    """What compares the ranks' generators; None if nothing does, as in a recomputation, whose forward was compared."""
    return _generators.get()


def is_in_region() -> bool:
    """Whether the ranks' generators differ here, because a region has seeded them."""
    return _region.get() is not None


def is_settled() -> bool:
    """Whether what is drawn here is already under the right seed."""
    region = _region.get()
    return region is not None and region.is_settled


@contextmanager
def own_random_numbers(mesh: Mesh, device: torch.device, axes: tuple[Axis, ...] = AXES) -> Iterator[None]:
    """Inside, random numbers on ``device`` differ between ranks along ``axes``; outside, generators stay in step.

    Ranks that differ only along other axes draw the same. Of other devices' generators, only the host's changes: it
    advances by one number.

    Raises:
        CuboidError: ranks that must draw the same have drawn, and their generators differ; on all ranks.
    """
    with _own_random_numbers(mesh, device, axes, is_settled=True):
        yield


@contextmanager
def random_numbers_of_block(mesh: Mesh, device: torch.device) -> Iterator[None]:
    """As :func:`own_random_numbers` for rows of a batch, around a block in which some draws may have other axes."""
    with _own_random_numbers(mesh, device, ("batch",), is_settled=False):
        yield


@contextmanager
def _own_random_numbers(
    mesh: Mesh, device: torch.device, axes: tuple[Axis, ...], *, is_settled: bool
) -> Iterator[None]:
    ranks = mesh.size(*AXES)
    if ranks == 1:
        yield
        return
    outer = _region.get()
    host = None if is_settled or outer is not None else torch.get_rng_state()
    # On the host, whatever the default device is: reading the seed must not wait for a device. A generator tells
    # `RandomDraws` that this isn't a number of the model's code.
    generator = torch.default_generator
    seed = outer.next_seed() if outer else int(torch.randint(SEEDS, (), device="cpu", generator=generator))
    region = _Region(seed, is_settled)
    token = _region.set(region)
    has_drawn = True
    try:
        with seeded(device, seed + mesh.index(*axes)):
            before = None if is_settled else _state(device)
            yield
            # Regions inside have generators of their own, and leave this one's state as it is.
            has_drawn = before is None or region.draws > 0 or before != _state(device)
    finally:
        _region.reset(token)
    if not has_drawn:
        if host is not None:
            # So that what the host draws next, such as whether a layer runs, is what the plain model draws.
            torch.set_rng_state(host)
        return
    generators = running_generators()
    if mesh.size(*axes) < ranks and generators is not None:
        generators.require_equal()


def _state(device: torch.device) -> bytes:
    """The state of a device's generator. Of any device it is in host memory: nothing waits."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(*(() if device.type == "cpu" else (device,)))
    return state.numpy().tobytes()


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, a device's generator has this seed; afterwards, its state from before."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    module: Any = torch.get_device_module(device)
    before = module.get_rng_state(device)
    # `manual_seed` seeds the current device, which may not be the tensor's.
    with module.device(device):
        module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before, device)


class MeshDropout(nn.Dropout):
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


class MaybeWhole(Protocol):
    """Knows whether activations are whole along sequence × hidden at this point of the forward, or parts."""

    is_whole: bool


class ShardedDropout(MeshDropout):
    """``nn.Dropout`` under :func:`own_random_numbers`, for activations that differ along ``axes``.

    While ``late`` says that activations are whole, they differ along `batch` only.
    """

    def __init__(self, p: float, mesh: Mesh, axes: tuple[Axis, ...] = AXES, *, late: MaybeWhole | None = None) -> None:
        super().__init__(p, mesh)
        self.axes = axes
        self._late = late

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        is_whole = self._late is not None and self._late.is_whole
        with own_random_numbers(self.mesh, x.device, ("batch",) if is_whole else self.axes):
            return nn.functional.dropout(x, self.p, training=True)


class CommonDropout(MeshDropout):
    """``nn.Dropout`` for activations that every rank has whole: all use the first rank's mask, whatever their seeds."""

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        with own_random_numbers(self.mesh, x.device):
            mask = torch.empty_like(x).bernoulli_(1 - self.p)
        if self.mesh.shape.size > 1:
            mask = all_gather(mask, self.mesh.along(*AXES))[0]
        # At p = 1, the mask is zeros: divide by something else than zero.
        return x * mask / max(1 - self.p, torch.finfo(x.dtype).tiny)
