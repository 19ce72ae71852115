"""The schedules, each a pure function of the pipeline's shape.

Those in :data:`SCHEDULES` have one stage on each rank; to add one, write the function and enter it there. Nothing else
changes: what depends on what, the validator, the messages and the simulator all follow from the actions. A rank may
have several stages, its *chunks* (it then has their actions in its tuple), and a backward may be split into its two
halves; which schedules do is in :mod:`.choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def interleaved_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of ``ranks × chunks`` stages: round and round, so that rank p has stages p, p + P, p + 2P, …"""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of ``ranks × chunks`` stages: to and fro, with the stages on both sides of a turn on one rank.

    With two chunks that is a V, and rank 0 has the first stage and the last one.
    """
    there = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there[::-1] if chunk % 2 else there))


def seq1f1b_interleaved(shape: PipelineShape, ranks: int) -> Schedule:
    """Seq1F1B-I (arXiv 2406.03488): one forward, one backward in turn, with stages placed round and round.

    A rank goes through its chunks in groups of micro-batches: all forwards of a group on its first chunk, then on the
    next; backwards the same way from the last chunk. A group of g units, whole micro-batches and at least P where there
    are as many, keeps all ranks busy until its first unit has been through the P stages of a chunk. Rank p of P with v
    chunks warms up with (v−1)·g + 2(P−p−1) + k − 1 forwards. Groups are as small and as equal as can be, larger ones
    first, since the warm-up is for the first; so the bubble of equal units is (P−1)/(v·k·M + P−1) for any M ≥ ⌈P/k⌉.

    Args:
        shape: of the pipeline; its stages are those of all ranks.
        ranks: P.

    Raises:
        ConfigError: P doesn't divide the number of stages.
    """
    if shape.stages % ranks:
        raise ConfigError(f"{shape.stages} stages can't be placed on {ranks} ranks in equal numbers")
    return tuple(_interleaved_rank(rank, shape, ranks) for rank in range(ranks))


#: The schedules by their names in the config.
SCHEDULES: Mapping[str, Callable[[PipelineShape], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "seq1f1b": seq1f1b}
)


def forwards_only(shape: PipelineShape, rank_of: Sequence[int]) -> Schedule:
    """All forwards without any backward: for evaluation.

    Each rank goes through its units in the order in which they could begin if every stage had a rank of its own and all
    units took the same time.

    Args:
        shape: of the pipeline; its stages are those of all ranks.
        rank_of: the rank of each stage.
    """
    ranks: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        ranks[rank] += _forwards(stage, shape)

    def begin(action: Action) -> tuple[int, int]:
        # Of two with one time, the one that has come further.
        return action.micro_batch * shape.segments + action.segment + action.stage, -action.stage

    return tuple(tuple(sorted(actions, key=begin)) for actions in ranks)


def _seq1f1b_rank(stage: int, shape: PipelineShape) -> tuple[Action, ...]:
    warm_up = shape.stages - stage - 2 + shape.segments
    return _one_by_one(_forwards(stage, shape), _backwards(stage, shape), warm_up)


def _interleaved_rank(rank: int, shape: PipelineShape, ranks: int) -> tuple[Action, ...]:
    stages = range(rank, shape.stages, ranks)
    count = max(1, shape.micro_batches // -(-ranks // shape.segments))
    each, rest = divmod(shape.micro_batches, count)
    by_stage = {stage: (_forwards(stage, shape), _backwards(stage, shape)) for stage in stages}
    forwards: list[Action] = []
    backwards: list[Action] = []
    start = 0
    for group in range(count):
        stop = start + (each + (group < rest)) * shape.segments
        for stage in stages:
            forwards += by_stage[stage][0][start:stop]
        for stage in reversed(stages):
            backwards += by_stage[stage][1][start:stop]
        start = stop
    first = (each + (rest > 0)) * shape.segments
    warm_up = (len(stages) - 1) * first + 2 * (ranks - rank - 1) + shape.segments - 1
    return _one_by_one(forwards, backwards, warm_up)


def _one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """So many forwards, then one forward and one backward in turn, then what is left of the backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])


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
