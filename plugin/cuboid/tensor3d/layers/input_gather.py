"""What a product's input goes through before it, and its gradient, transposed, behind it."""

from __future__ import annotations

from typing import Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import SEQUENCE_DIM, start_all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.layers.output_reduce import NoReduce, OutputReduce, ScatterFeatures, ScatterSequence


class InputGather(Protocol):
    """Brings the input of a product together.

    Attributes:
        transpose: brings the gradient of the whole input back to the rank's own part.
        reduces: whether that takes a collective.
        pieces: along the input's features, in which the whole input comes.
    """

    transpose: OutputReduce
    reduces: bool
    pieces: int

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:
        """The rank's own part to the whole input, in n pieces along its features: ``[n, B/b, S, I/n]``.

        For ``in_place`` see :func:`~cuboid.distributed.axis_collectives.start_all_gather`.
        """
        ...


class GatherSequence:
    """All-gather of the sequence: ``[B/b, S/s, H/h]`` to ``[B/b, S, H/h]``."""

    pieces = 1

    def __init__(self, mesh: Mesh) -> None:
        self.along = mesh.along("sequence")
        self.transpose: OutputReduce = ScatterSequence(self.along)
        self.reduces = self.along.size > 1

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:
        """See :class:`InputGather`."""
        if self.along.size == 1:
            return AsyncResult(x.unsqueeze(0))
        return start_all_gather(
            x,
            self.along,
            lambda stacked: stacked.movedim(0, SEQUENCE_DIM).flatten(1, 2).unsqueeze(0),
            in_place=in_place,
        )


class GatherFeatures:
    """All-gather of the features over `hidden`: ``[B/b, S, I/(s·h)]`` to h pieces of ``[B/b, S, I/s]``."""

    def __init__(self, mesh: Mesh) -> None:
        self.along = mesh.along("hidden")
        self.transpose: OutputReduce = ScatterFeatures(self.along)
        self.reduces = self.along.size > 1
        self.pieces = self.along.size

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:
        """See :class:`InputGather`."""
        return start_all_gather(x, self.along, in_place=in_place)


class NoGather:
    """For an input that somebody else has brought together."""

    transpose: OutputReduce = NoReduce()
    reduces = False
    pieces = 1

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:  # noqa: ARG002
        """See :class:`InputGather`."""
        return AsyncResult(x.unsqueeze(0))
