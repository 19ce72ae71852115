"""Into how many segments a step's sequences are cut, and where."""

from __future__ import annotations

import math

from cuboid.config.schema import PipelineConfig
from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import ConfigError
from cuboid.models.batch.batch import granule
from cuboid.models.pipeline.step_trace import StepTrace
from cuboid.seq1f1b.schedule.partition import (
    MOST_SEGMENTS,
    MeasuredCut,
    choose_segments,
    cut_sequence,
    even_cut,
    segment_cost,
)
from cuboid.seq1f1b.schedule.schedules import SCHEDULES
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes

#: Products on a GPU work on tiles of so many tokens; a segment of a few more takes as long as one of a tile more.
_TILE_TOKENS = 128

#: Steps that are measured for ``"partition": "measured"``; the first one warms up.
MEASURED_STEPS = range(2, 5)


class Cutter:
    """Decides the segments' lengths. All ranks decide alike, from what all of them know.

    Args:
        config: the pipeline's.
        sizes: of the model; None where whole sequences or even segments need no costs.
        mesh: whose `sequence` and `hidden` axes divide segments once more.
        tiles: whether sequences that are long enough are cut at multiples of 128 tokens.

    Raises:
        ConfigError: explicit lengths that the mesh can't divide.
    """

    def __init__(self, config: PipelineConfig, sizes: ModelSizes | None, mesh: Mesh, *, tiles: bool = False) -> None:
        self._config = config
        self._tiles = tiles
        self._cost = _equal_cost if sizes is None else segment_cost(sizes)
        self._stages = mesh.topology.pipe
        self._granule = granule(mesh)
        self._segments = None if config.segments == "auto" else config.segments
        self._measured = MeasuredCut() if config.partition == "measured" else None
        self._known: dict[int, tuple[int, ...]] = {}
        if isinstance(config.partition, tuple):
            self._check_explicit(config.partition)

    def measures(self, step: int) -> bool:
        """Whether the times of a step, counted from 1, are wanted."""
        return self._measured is not None and step in MEASURED_STEPS

    def lengths(self, length: int, micro_batches: int) -> tuple[int, ...]:
        """Lengths of the segments of a sequence of S tokens.

        Their sum is S rounded up to what the mesh divides, and at least so much that each segment has something.

        Raises:
            ConfigError: explicit lengths of another sum.
        """
        if self._segments is None:
            self._segments = choose_segments(
                padded_length(length, self._granule),
                stages=self._stages,
                micro_batches=micro_batches,
                multiple=self._multiple(padded_length(length, self._granule), MOST_SEGMENTS),
                cost=self._cost,
                # A generated schedule has the same order of forwards in principle, and takes longer to make.
                schedule=self._config.schedule if self._config.schedule in SCHEDULES else "seq1f1b",
            )
        padded = max(padded_length(length, self._granule), self._segments * self._granule)
        if padded not in self._known:
            self._known[padded] = self._cut(padded, self._segments)
        return self._known[padded]

    def note(self, trace: StepTrace, lengths: list[tuple[int, ...]]) -> None:
        """Take the times of a step into account for the cuts from the next one on."""
        assert self._measured is not None
        for micro_batch, own in enumerate(lengths):
            self._measured.add(own, trace.segment_times_s(micro_batch, own))
        self._known.clear()

    def _cut(self, length: int, segments: int) -> tuple[int, ...]:
        partition = self._config.partition
        if isinstance(partition, tuple):
            if sum(partition) != length:
                raise ConfigError(
                    f"pipeline.partition has lengths with the sum {sum(partition)}, but a sequence has {length} "
                    f'tokens; give sequences of {sum(partition)} tokens, or take "flops"'
                )
            return partition
        if partition == "even":
            return even_cut(length, segments, self._multiple(length, segments))
        cost = self._measured.cost() if self._measured is not None and self._measured.is_ready else self._cost
        return cut_sequence(length, segments, multiple=self._multiple(length, segments), cost=cost)

    def _multiple(self, length: int, segments: int) -> int:
        """What the segments of a sequence are to be multiples of: tiles, if that leaves room to balance them."""
        tile = math.lcm(self._granule, _TILE_TOKENS)
        return tile if self._tiles and length % tile == 0 and length >= 4 * segments * tile else self._granule

    def _check_explicit(self, lengths: tuple[int, ...]) -> None:
        for length in lengths:
            if length % self._granule:
                raise ConfigError(
                    f"pipeline.partition has a segment of {length} tokens, which the mesh's sequence and hidden axes "
                    f"can't share; use multiples of {self._granule}"
                )


def _equal_cost(start: int, stop: int) -> int:
    return stop - start
