"""What a product's input goes through before it, and its gradient, transposed, behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import SEQUENCE_DIM, start_all_gather, start_gather_dim
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.matmul import Pieces
from cuboid.tensor3d.layers.output_reduce import Columns, NoReduce, OutputReduce, ScatterFeatures, ScatterSequence


class InputGather(Protocol):
    """Brings the input of a product together."""

    @property
    def transpose(self) -> OutputReduce:
        """Brings the gradient of the whole input back to the rank's own part."""
        ...

    @property
    def reduces(self) -> bool:
        """Whether that takes a collective."""
        ...

    def start(self, x: torch.Tensor) -> AsyncResult[Pieces]:
        """The rank's own part to the whole input, perhaps in pieces along its features."""
        ...

    def columns(self, weight: torch.Tensor) -> Columns:
        """The columns of ``[out, in]`` that belong to each of the pieces."""
        ...


@dataclass(frozen=True)
class GatherSequence:
    """All-gather of the sequence: ``[B/b, S/s, H/h]`` to ``[B/b, S, H/h]``."""

    mesh: Mesh

    @property
    def transpose(self) -> OutputReduce:
        """See :class:`InputGather`."""
        return ScatterSequence(self.mesh, "sequence")

    @property
    def reduces(self) -> bool:
        """See :class:`InputGather`."""
        return self.mesh.size("sequence") > 1

    def start(self, x: torch.Tensor) -> AsyncResult[Pieces]:
        """See :class:`InputGather`."""
        return start_gather_dim(x, SEQUENCE_DIM, self.mesh, ("sequence",)).then(lambda whole: (whole,))

    def columns(self, weight: torch.Tensor) -> Columns:
        """See :class:`InputGather`."""
        return (weight,)


@dataclass(frozen=True)
class GatherFeatures:
    """All-gather of the features over `hidden`: ``[B/b, S, I/(s·h)]`` to h pieces of ``[B/b, S, I/s]``."""

    mesh: Mesh

    @property
    def transpose(self) -> OutputReduce:
        """See :class:`InputGather`."""
        return ScatterFeatures(self.mesh, "hidden")

    @property
    def reduces(self) -> bool:
        """See :class:`InputGather`."""
        return self.mesh.size("hidden") > 1

    def start(self, x: torch.Tensor) -> AsyncResult[Pieces]:
        """See :class:`InputGather`."""
        return start_all_gather(x, self.mesh, ("hidden",)).then(lambda stacked: stacked.unbind(0))

    def columns(self, weight: torch.Tensor) -> Columns:
        """See :class:`InputGather`."""
        return weight.chunk(self.mesh.size("hidden"), 1)


class NoGather:
    """For an input that somebody else has brought together."""

    transpose: OutputReduce = NoReduce()
    reduces = False

    def start(self, x: torch.Tensor) -> AsyncResult[Pieces]:
        """See :class:`InputGather`."""
        return AsyncResult((x,))

    def columns(self, weight: torch.Tensor) -> Columns:
        """See :class:`InputGather`."""
        return (weight,)
