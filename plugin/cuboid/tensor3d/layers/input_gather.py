"""The collective that gathers a product's input, and its transpose, which reduces the input's gradient."""

from __future__ import annotations

from typing import Protocol

import torch

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import SEQUENCE_DIM, positions_are_whole, start_all_gather
from cuboid.distributed.mesh import Mesh
from cuboid.tensor3d.fp8.quantized import Quantized, start_gather
from cuboid.tensor3d.layers.output_reduce import NoReduce, OutputReduce, ScatterFeatures, ScatterSequence


class InputGather(Protocol):
    """Gathers the input of a product.

    Attributes:
        transpose: reduces the gradient of the whole input to the rank's own part.
        reduces: whether the transpose is a collective.
        pieces: number of pieces, along the features, in which the whole input arrives.
    """

    transpose: OutputReduce
    reduces: bool
    pieces: int

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:
        """From the rank's own part to the whole input, in n pieces along its features: ``[n, B/b, S, I/n]``.

        For ``in_place`` see :func:`~cuboid.distributed.axis_collectives.start_all_gather`.
        """
        ...

    def start_in_fp8(self, x: torch.Tensor) -> AsyncResult[Quantized]:
        """As :meth:`start`, for products in fp8: what is gathered is in fp8."""
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
        if self.along.size == 1 or positions_are_whole():
            return AsyncResult(x.unsqueeze(0))
        return start_all_gather(
            x,
            self.along,
            # [s, B/b, S/s, H/h] -> [1, B/b, S, H/h], a view if B/b is 1
            lambda stacked: stacked.movedim(0, SEQUENCE_DIM).flatten(1, 2).unsqueeze(0),
            in_place=in_place,
        )

    def start_in_fp8(self, x: torch.Tensor) -> AsyncResult[Quantized]:
        """See :class:`InputGather`."""
        return start_gather(
            [x], self.along, lambda stacked: stacked[0].movedim(0, SEQUENCE_DIM).flatten(1, 2).unsqueeze(0)
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
        # The ranks' features stay separate pieces: joining them would be a copy of the whole input.
        return start_all_gather(x, self.along, in_place=in_place)

    def start_in_fp8(self, x: torch.Tensor) -> AsyncResult[Quantized]:
        """See :class:`InputGather`. Each piece of a row has a scale of its own."""
        return start_gather([x], self.along, lambda stacked: stacked[0])


class NoGather:
    """For an input that is already whole."""

    transpose: OutputReduce = NoReduce()
    reduces = False
    pieces = 1

    def start(self, x: torch.Tensor, *, in_place: bool = False) -> AsyncResult[torch.Tensor]:  # noqa: ARG002
        """See :class:`InputGather`."""
        return AsyncResult(x.unsqueeze(0))

    def start_in_fp8(self, x: torch.Tensor) -> AsyncResult[Quantized]:
        """Nothing is gathered."""
        raise NotImplementedError
