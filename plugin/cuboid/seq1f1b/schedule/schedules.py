"""The schedules, each a pure function of the pipeline's shape.

The schedules in :data:`SCHEDULES` have one stage on each rank. To add one, write the function and register it there;
nothing else changes, because dependencies, validation, messages and simulation all follow from the actions. In other
schedules a rank has several stages, its *chunks*, with all their actions in its tuple, or backwards are split into two
halves; :mod:`.choice` has the names of all schedules.
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
    """The number of stages, of micro-batches in a step, and of segments in each micro-batch.

    ``head_ranks`` is the number of ranks if the head is spread over all of them, and 0 if the last stage has it whole.

    Raises:
        ConfigError: one of them is less than 1.
    """

    stages: int
    micro_batches: int
    segments: int
    head_ranks: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "segments"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a pipeline with {name} = {getattr(self, name)} does nothing; it needs at least 1")

    @property
    def units(self) -> int:
        """Number of units of one stage."""
        return self.micro_batches * self.segments

    @property
    def head_stages(self) -> range:
        """The stages whose numbers the ranks' shares of a spread head have: the last one of each rank."""
        # In every placement, a rank has exactly one of the last stages, as many as there are ranks.
        return range(self.stages - self.head_ranks, self.stages)


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards.

    Micro-batches run backward in the order in which they ran forward, as in the other schedules, so that all schedules
    sum gradients in the same order.
    """
    return tuple((*_forwards(stage, shape), *_backwards(stage, shape)) for stage in range(shape.stages))


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """1F1B, the usual pipeline of whole sequences: one forward and one backward in turn.

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
    """Seq1F1B (arXiv 2406.03488): one forward and one backward in turn, on segments.

    Stage p of P warms up with min(P−p−2+k, M·k) forwards: P−p−1 so that the stages after it have work, as in 1F1B,
    and k−1 more because a micro-batch's last segment is the first to run backward. At most P−p−1+k units are in flight.
    """
    return tuple(_seq1f1b_rank(stage, shape) for stage in range(shape.stages))


def interleaved_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each of ``ranks × chunks`` stages, interleaved: rank p has stages p, p + P, p + 2P, …"""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each of ``ranks × chunks`` stages, which go down the ranks and back up, in turn.

    Both stages at a turning point are on the same rank. With two chunks this is a V, and rank 0 has the first and the
    last stage.
    """
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def seq1f1b_interleaved(shape: PipelineShape, ranks: int) -> Schedule:
    """Seq1F1B-I (arXiv 2406.03488): one forward and one backward in turn, with interleaved stages.

    A rank goes through its chunks in groups of micro-batches: all forwards of a group on its first chunk, then on the
    next; backwards likewise, from the last chunk. A group has g units, which are whole micro-batches and at least P
    units if there are that many, so that all ranks are busy until its first unit has passed the P stages of a chunk.
    Rank p of P with v chunks warms up with (v−1)·g + 2(P−p−1) + k − 1 forwards. Groups are as small and as equal as
    possible; larger ones come first, because the warm-up is sized for the first group. The bubble with equal units is
    then (P−1)/(v·k·M + P−1) for any M ≥ ⌈P/k⌉.

    Args:
        shape: the pipeline's shape; ``stages`` counts those of all ranks.
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
    """All forwards without any backward, for evaluation.

    Each rank runs its units in the order in which they could start if every stage had a rank of its own and all units
    took equally long.

    Args:
        shape: the pipeline's shape; ``stages`` counts those of all ranks.
        rank_of: the rank of each stage.
    """
    ranks: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        ranks[rank] += _forwards(stage, shape)

    def begin(action: Action) -> tuple[int, int]:
        # At equal times, the unit on the later stage first.
        return action.micro_batch * shape.segments + action.segment + action.stage, -action.stage

    return tuple(tuple(sorted(actions, key=begin)) for actions in ranks)


def _seq1f1b_rank(stage: int, shape: PipelineShape) -> tuple[Action, ...]:
    warm_up = shape.stages - stage - 2 + shape.segments
    return _one_by_one(_forwards(stage, shape), _backwards(stage, shape), warm_up)


def _interleaved_rank(rank: int, shape: PipelineShape, ranks: int) -> tuple[Action, ...]:
    stages = range(rank, shape.stages, ranks)
    # Number of groups. Each has at least ⌈P/k⌉ micro-batches, which are at least P units.
    count = max(1, shape.micro_batches // -(-ranks // shape.segments))
    size, remainder = divmod(shape.micro_batches, count)
    by_stage = {stage: (_forwards(stage, shape), _backwards(stage, shape)) for stage in stages}
    forwards: list[Action] = []
    backwards: list[Action] = []
    start = 0
    for group in range(count):
        stop = start + (size + (group < remainder)) * shape.segments
        for stage in stages:
            forwards += by_stage[stage][0][start:stop]
        for stage in reversed(stages):
            backwards += by_stage[stage][1][start:stop]
        start = stop
    first = (size + (remainder > 0)) * shape.segments
    warm_up = (len(stages) - 1) * first + 2 * (ranks - rank - 1) + shape.segments - 1
    return _one_by_one(forwards, backwards, warm_up)


def _one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
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
    """Return a stage's backwards: micro-batches in the order of their forwards, segments in reverse order."""
    return [
        Action(Op.BACKWARD, stage, micro_batch, segment)
        for micro_batch in range(shape.micro_batches)
        for segment in reversed(range(shape.segments))
    ]
