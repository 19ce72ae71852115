"""From ranks to coordinates: pure arithmetic, without process groups.

The world is ``pipe × data × batch × hidden × sequence``, with the last one varying fastest: consecutive ranks, which
usually share a node, exchange the most bytes. ("Axis" is always the mesh's, "dim" the tensor's.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, get_args

from cuboid.errors import MeshError

Axis = Literal["batch", "sequence", "hidden"]
AXES: tuple[Axis, ...] = get_args(Axis)
#: Order of the mesh axes in the rank number, slowest first.
RANK_ORDER: tuple[Axis, ...] = ("batch", "hidden", "sequence")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three mesh axes, always written batch × sequence × hidden.

    Each axis splits that dim of the residual stream ``[batch, sequence, hidden]``.
    ``1×s×1`` is Megatron's tensor parallelism with sequence parallelism, ``b×1×1`` is FSDP/ZeRO-3.
    """

    batch: int = 1
    sequence: int = 1
    hidden: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise MeshError(f"mesh.{axis} is {getattr(self, axis)}; every axis needs at least 1 rank")

    @property
    def size(self) -> int:
        """Number of ranks of the mesh."""
        return self.batch * self.sequence * self.hidden

    def of(self, *axes: Axis) -> int:
        """Number of ranks that the given axes span together."""
        count = 1
        for axis in axes:
            count *= getattr(self, axis)
        return count

    def __str__(self) -> str:
        return f"{self.batch}×{self.sequence}×{self.hidden}"

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Read ``"2x2x2"`` or ``"2×2×2"`` (batch × sequence × hidden)."""
        parts = text.lower().replace("×", "x").split("x")
        if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
            raise MeshError(f"mesh {text!r} is not of the form BATCHxSEQUENCExHIDDEN, for example 2x2x2")
        return cls(*(int(part) for part in parts))

    @classmethod
    def of_size(cls, size: int) -> Iterator[MeshShape]:
        """Every mesh of ``size`` ranks."""
        for batch, sequence in product(divisors(size), repeat=2):
            if size % (batch * sequence) == 0:
                yield cls(batch, sequence, size // (batch * sequence))


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class Coordinate:
    """A rank's position on each axis, among the replicas (``data``) and in the pipeline (``pipe``)."""

    pipe: int
    data: int
    batch: int
    sequence: int
    hidden: int

    def index(self, axes: Sequence[Axis], shape: MeshShape) -> int:
        """Position along several axes as one number, the first axis varying slowest."""
        index = 0
        for axis in axes:
            index = index * getattr(shape, axis) + getattr(self, axis)
        return index


@dataclass(frozen=True)
class Topology:
    """How ``world_size`` ranks are laid out.

    Raises:
        MeshError: the mesh (times the pipeline stages) doesn't divide the world.
    """

    shape: MeshShape
    world_size: int
    pipe: int = 1

    def __post_init__(self) -> None:
        if self.world_size % (self.shape.size * self.pipe):
            stages = f" for each of pipeline.stages = {self.pipe}" if self.pipe > 1 else ""
            raise MeshError(
                f"tensor_parallel.mesh {self.shape}{stages} needs a multiple of {self.shape.size * self.pipe} ranks, "
                f"but the world has {self.world_size}"
            )

    @property
    def data(self) -> int:
        """Number of data-parallel replicas of the mesh."""
        return self.world_size // (self.shape.size * self.pipe)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return (self.pipe, self.data, *(self.shape.of(axis) for axis in RANK_ORDER))

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank of the world."""
        names = ("pipe", "data", *RANK_ORDER)
        position: dict[str, int] = {}
        for name, size in zip(reversed(names), reversed(self._sizes), strict=True):
            rank, position[name] = divmod(rank, size)
        return Coordinate(**position)

    def rank(self, at: Coordinate) -> int:
        """Rank of the world at a coordinate; the inverse of :meth:`coordinate`."""
        rank = 0
        for name, size in zip(("pipe", "data", *RANK_ORDER), self._sizes, strict=True):
            rank = rank * size + getattr(at, name)
        return rank

    def groups(self, names: Sequence[str]) -> list[list[int]]:
        """All sets of ranks that differ only in ``names`` (mesh axes, ``"data"`` or ``"pipe"``), each ascending."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinate(rank)
            fixed_names = [n for n in ("pipe", "data", *RANK_ORDER) if n not in names]
            sets.setdefault(tuple(getattr(at, name) for name in fixed_names), []).append(rank)
        return list(sets.values())

    def columns(self, stages: Sequence[int]) -> list[list[int]]:
        """For each position within a stage, the ranks at it in ``stages``, in that order."""
        return [[ranks[stage] for stage in stages] for ranks in self.groups(("pipe",))]

    def axes_between(self, hosts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Which of the axes of several ranks cross hosts, and which stay on one.

        ``hosts`` has each rank's host. Axes are named as in the config, stages and replicas among them.
        """
        crossing: list[str] = []
        staying: list[str] = []
        labels = {"pipe": "stages", "data": "replicas"}
        for name in ("pipe", "data", *RANK_ORDER):
            groups = self.groups((name,))
            if len(groups[0]) > 1:
                crosses = any(len({hosts[rank] for rank in ranks}) > 1 for ranks in groups)
                (crossing if crosses else staying).append(labels.get(name, name))
        return crossing, staying
