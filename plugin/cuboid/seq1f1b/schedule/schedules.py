"""The schedules, each a pure function of the pipeline's shape.

To add one, write the function and enter it in :data:`SCHEDULES`. Nothing else changes: what depends on what, the
validator, the messages and the simulator all follow from the actions. A rank may have several stages (it then has
their actions in its tuple), and a backward may be split into its two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule


@dataclass(frozen=True)
class PipelineShape:
    """Numbers of stages, of micro-batches in a step, and of segments in each micro-batch.

    Raises:
        ConfigError: one of them is less than 1.
    """

    stages: int
    micro_batches: int
    segments: int

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "segments"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a pipeline with {name} = {getattr(self, name)} does nothing; it needs at least 1")

    @property
    def units(self) -> int:
        """Units of one stage."""
        return self.micro_batches * self.segments


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards.

    The backwards go through the micro-batches in the order of the forwards, as in the other schedules, so that all
    add up gradients in the same order.
    """
    return tuple((*_forwards(stage, shape), *_backwards(stage, shape)) for stage in range(shape.stages))


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """The ordinary pipeline of whole sequences: one forward, one backward in turn.

    Raises:
        ConfigError: there is more than one segment.
    """
    if shape.segments != 1:
        raise ConfigError(
            f'the schedule "1f1b" has whole sequences, but pipeline.segments is {shape.segments}; '
            'take "seq1f1b", or pipeline.segments = 1'
        )
    return seq1f1b(shape)


def seq1f1b(shape: PipelineShape) -> Schedule:
    """One forward, one backward in turn, on segments (arXiv 2406.03488).

    Stage p of P warms up with min(P−p−2+k, M·k) forwards: P−p−1 so that the stages after it have work, as in 1F1B,
    and k−1 more, for the last segment is the first to run backward. At most P−p−1+k units are in flight.
    """
    return tuple(_seq1f1b_rank(stage, shape) for stage in range(shape.stages))


#: The schedules by their names in the config.
SCHEDULES: Mapping[str, Callable[[PipelineShape], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "seq1f1b": seq1f1b}
)


def only_forward(schedule: Schedule) -> Schedule:
    """The same order of forwards without any backward: for evaluation."""
    return tuple(tuple(action for action in actions if action.op is Op.FORWARD) for actions in schedule)


def _seq1f1b_rank(stage: int, shape: PipelineShape) -> tuple[Action, ...]:
    forwards, backwards = _forwards(stage, shape), _backwards(stage, shape)
    warm_up = min(shape.stages - stage - 2 + shape.segments, shape.units)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[shape.units - warm_up :])


def _forwards(stage: int, shape: PipelineShape) -> list[Action]:
    return [
        Action(Op.FORWARD, stage, micro_batch, segment)
        for micro_batch in range(shape.micro_batches)
        for segment in range(shape.segments)
    ]


def _backwards(stage: int, shape: PipelineShape) -> list[Action]:
    """Micro-batches first in, first out; the segments of each last in, first out."""
    return [
        Action(Op.BACKWARD, stage, micro_batch, segment)
        for micro_batch in range(shape.micro_batches)
        for segment in reversed(range(shape.segments))
    ]
