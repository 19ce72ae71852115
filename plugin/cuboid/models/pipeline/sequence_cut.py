"""Decides into how many segments a step's sequences are cut, and where."""

from __future__ import annotations

import math
from collections.abc import Callable

from cuboid.config.schema import PipelineConfig
from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.models.batch.local_batch import granule
from cuboid.models.pipeline.step_trace import StepTrace
from cuboid.seq1f1b.schedule.partition import (
    MeasuredCut,
    check_lengths,
    cut_sequence,
    even_cut,
    segment_cost,
)
from cuboid.seq1f1b.schedule.unit_costs import ModelSizes

#: GPU kernels multiply in tiles of so many tokens; a segment a few tokens longer costs as much as one a tile longer.
_TILE_TOKENS = 128

#: Steps that are measured for ``"partition": "measured"``; the first one warms up.
MEASURED_STEPS = range(2, 5)


class Cutter:
    """Decides the segments' lengths. All ranks of a replica decide alike, from what all of them know.

    Args:
        config: the config's pipeline section.
        sizes: the model's sizes; None if no costs are needed, as for whole sequences or even segments.
        mesh: this rank's mesh, whose `sequence` and `hidden` axes divide each segment.
        choice: returns the number of segments for ``(length, micro_batches)``; None if the config has the number.
        tiles: whether sequences that are long enough are cut at multiples of 128 tokens.

    Raises:
        ConfigError: explicit lengths that the mesh can't divide.
    """

    def __init__(
        self,
        config: PipelineConfig,
        sizes: ModelSizes | None,
        mesh: Mesh,
        choice: Callable[[int, int], int] | None = None,
        *,
        tiles: bool = False,
    ) -> None:
        self._config, self._choice = config, choice
        self._tiles = tiles
        self._cost = _equal_cost if sizes is None else segment_cost(sizes)
        self._granule = granule(mesh)
        self._segments = None if config.segments == "auto" else config.segments
        self._measured = MeasuredCut() if config.partition == "measured" else None
        self._known: dict[int, tuple[int, ...]] = {}
        if isinstance(config.partition, tuple):
            check_lengths(config.partition, segments=len(config.partition), multiple=self._granule)

    def measures(self, step: int) -> bool:
        """Whether to measure a step; steps count from 1."""
        return self._measured is not None and step in MEASURED_STEPS

    def lengths(self, length: int, micro_batches: int) -> tuple[int, ...]:
        """Lengths of the segments of a sequence of S tokens.

        Their sum is S rounded up to a multiple that the mesh divides, and large enough that no segment is empty.

        Raises:
            ConfigError: the config has explicit lengths, and their sum differs.
        """
        if self._segments is None:
            assert self._choice is not None
            self._segments = self._choice(padded_length(length, self._granule), micro_batches)
        padded = max(padded_length(length, self._granule), self._segments * self._granule)
        if padded not in self._known:
            self._known[padded] = self._cut(padded, self._segments)
        return self._known[padded]

    def note(self, trace: StepTrace, lengths: list[tuple[int, ...]]) -> None:
        """Use a step's measured times for the cuts of all following steps."""
        assert self._measured is not None
        for micro_batch, segment_lengths in enumerate(lengths):
            self._measured.add(segment_lengths, trace.segment_times_s(micro_batch, segment_lengths))
        self._known.clear()

    def _cut(self, length: int, segments: int) -> tuple[int, ...]:
        partition = self._config.partition
        if isinstance(partition, tuple):
            check_lengths(partition, length=length, segments=segments, multiple=self._granule)
            return partition
        if partition == "even":
            return even_cut(length, segments, self._multiple(length, segments))
        cost = self._measured.cost() if self._measured is not None and self._measured.is_ready else self._cost
        return cut_sequence(length, segments, multiple=self._multiple(length, segments), cost=cost)

    def _multiple(self, length: int, segments: int) -> int:
        """What the segments' lengths must be multiples of: a tile if that leaves room for balance, else the granule."""
        tile = math.lcm(self._granule, _TILE_TOKENS)
        return tile if self._tiles and length % tile == 0 and length >= 4 * segments * tile else self._granule


def _equal_cost(start: int, stop: int) -> int:
    return stop - start
