"""From the name of a schedule in a config to the order of actions, by the costs of the pipeline at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.list_scheduling import TRIED_ACTIONS, ActionCosts, list_schedule
from cuboid.seq1f1b.schedule.schedules import (
    SCHEDULES,
    PipelineShape,
    interleaved_placement,
    seq1f1b_interleaved,
    v_placement,
)
from cuboid.seq1f1b.schedule.simulator import Timeline, simulate
from cuboid.seq1f1b.schedule.unit_costs import (
    BACKWARD_RATIO,
    INPUT_GRADIENT_FREES,
    ModelSizes,
    kept_bytes,
    unit_flops,
)

Placement = Callable[[int, int], tuple[int, ...]]
#: The one schedule of several stages on each rank whose order doesn't depend on what units cost.
_INTERLEAVED = "seq1f1b-interleaved"
#: Schedules with several stages on each rank, by how they place them.
CHUNKED: Mapping[str, Placement] = MappingProxyType(
    {
        _INTERLEAVED: interleaved_placement,
        "zero_bubble-interleaved": interleaved_placement,
        "zero_bubble-v": v_placement,
    }
)
AUTO = "auto"
#: All names that a config or the command line may have.
NAMES = (*SCHEDULES, "zero_bubble", *CHUNKED, AUTO)


@dataclass(frozen=True)
class MemoryLimit:
    """The most that the units of a rank may keep at a time: in sequences of the rank's share, or in bytes."""

    sequences: float | None = None
    bytes: float | None = None

    @classmethod
    def parse(cls, text: float | str) -> MemoryLimit:
        """Read a number of sequences, or a text such as ``"12 GiB"``.

        Raises:
            ConfigError: it is something else, or not positive.
        """
        number, gib, rest = str(text).strip().partition("GiB")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if rest or not 0 < amount < float("inf"):
            raise ConfigError(
                f'memory_limit is {text!r}; write a number of sequences such as 1.5, or a text such as "12 GiB"'
            )
        return cls(bytes=amount * 2**30) if gib else cls(sequences=amount)

    def __str__(self) -> str:
        return f"{self.sequences:g} sequences" if self.bytes is None else f"{self.bytes / 2**30:g} GiB"


@dataclass(frozen=True)
class PlacedCosts:
    """The costs of a pipeline whose stages are placed.

    Args:
        actions: for the schedule.
        sequence_bytes: for each rank what the units of one sequence keep; None where it isn't known.
    """

    actions: ActionCosts
    sequence_bytes: Sequence[float] | None = None


def placed_costs(
    duration_s: Callable[[Action], float],
    kept_bytes: Callable[[Action], float],
    rank_of: Sequence[int],
    segments: int,
    transfer_s: float = 0.0,
    *,
    recomputes: bool = False,
) -> PlacedCosts:
    """Costs of stages on ranks, by what each unit keeps.

    Args:
        duration_s: of an action.
        kept_bytes: of a unit, given its forward; the same for all micro-batches.
        rank_of: the rank of each stage.
        segments: of each micro-batch.
        transfer_s: of a message.
        recomputes: whether activation checkpointing is on. Then I frees what the forward kept, and what it makes for W
            is freed before the next one.
    """
    sizes = [0.0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        sizes[rank] += sum(kept_bytes(Action(Op.FORWARD, stage, 0, segment)) for segment in range(segments))
    actions = ActionCosts(
        duration_s,
        lambda action: kept_bytes(action) / sizes[rank_of[action.stage]],
        transfer_s,
        1.0 if recomputes else INPUT_GRADIENT_FREES,
        1 if recomputes else None,
    )
    return PlacedCosts(actions, tuple(sizes))


@dataclass(frozen=True)
class Request:
    """What a schedule is wanted for.

    Args:
        ranks: P, of the pipeline.
        micro_batches: M.
        segments: k.
        costs: of the stages, given the rank of each.
        limit: of the memory. By default what ``seq1f1b`` takes without chunks, for those that need one.
        chunks: v, stages on each rank; for ``"auto"``, those of the schedules that have several.
        tried_actions: as of :func:`~cuboid.seq1f1b.schedule.list_scheduling.list_schedule`.
    """

    ranks: int
    micro_batches: int
    segments: int
    costs: Callable[[tuple[int, ...]], PlacedCosts]
    limit: MemoryLimit | None = None
    chunks: int = 1
    tried_actions: int = TRIED_ACTIONS


@dataclass(frozen=True)
class ChosenSchedule:
    """A schedule, and its simulation.

    Attributes:
        name: in :data:`NAMES`, never ``"auto"``.
        shape: with the stages of all ranks.
        rank_of: the rank of each stage.
        schedule: itself.
        timeline: its simulation, with memory in sequences of the rank's share.
    """

    name: str
    shape: PipelineShape
    rank_of: tuple[int, ...]
    schedule: Schedule
    timeline: Timeline

    @property
    def peak_micro_batches(self) -> float:
        """The most that any rank keeps, in sequences of its share."""
        return max(self.timeline.peak_bytes)


def choose_schedule(name: str, request: Request) -> ChosenSchedule:
    """Make the schedule of a name; for ``"auto"`` the one whose simulated step is the shortest of those that fit.

    Raises:
        ConfigError: it has no chunks and some are wanted, or the other way round; it needs more memory than the limit.
    """
    if name != AUTO:
        return _chosen(name, request, request.chunks)
    candidates = [("seq1f1b", 1), ("zero_bubble", 1)]
    if request.chunks > 1:
        candidates += [(each, request.chunks) for each in CHUNKED]
    found: list[ChosenSchedule] = []
    problem: ConfigError | None = None
    for each, chunks in candidates:
        try:
            found.append(_chosen(each, request, chunks))
        except ConfigError as error:
            problem = error
    if not found:
        assert problem is not None
        raise problem
    return min(found, key=lambda chosen: chosen.timeline.makespan_s)


def check_chunks(name: str, chunks: int) -> None:
    """Check that a schedule has so many stages on each rank.

    Raises:
        ConfigError: it doesn't.
    """
    if name in CHUNKED and chunks < 2:
        plain = name.partition("-")[0]
        raise ConfigError(
            f'the schedule "{name}" has several chunks on each rank: give 2 chunks or more, or take "{plain}"'
        )
    if name not in CHUNKED and name != AUTO and chunks > 1:
        near = [each for each in CHUNKED if each.startswith(name)] or list(CHUNKED)
        raise ConfigError(
            f'the schedule "{name}" has one chunk on each rank; with {chunks} chunks, take {" or ".join(near)}'
        )


def place_stages(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of ``ranks × chunks`` stages, where the schedule of a name has it."""
    return CHUNKED.get(name, interleaved_placement)(ranks, chunks)


def is_generated(name: str) -> bool:
    """Whether the schedule of a name is made for what units cost, and may split backwards."""
    return name not in SCHEDULES and name != _INTERLEAVED


def fixed_schedule(name: str, shape: PipelineShape, ranks: int) -> Schedule:
    """The schedule of a name whose order is the same whatever units cost; :func:`is_generated` tells which aren't."""
    return seq1f1b_interleaved(shape, ranks) if name == _INTERLEAVED else SCHEDULES[name](shape)


@dataclass(frozen=True)
class ModelPipeline:
    """What of a pipeline of a model's layers the order of its actions depends on.

    Args:
        schedule: a name in :data:`NAMES`.
        ranks: P.
        chunks: v, stages on each rank.
        counts: layers of each stage, of all ranks.
        lengths: tokens of each segment.
        limit: of the memory, in sequences of a rank's share; None for the default of :class:`Request`.
        recomputes: whether activation checkpointing is on.
    """

    schedule: str
    ranks: int
    chunks: int
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    limit: float | None = None
    recomputes: bool = False

    def order(self, sizes: ModelSizes, micro_batches: int, *, tried_actions: int = TRIED_ACTIONS) -> Schedule:
        """The order in which training runs so many micro-batches, by the count of operations of a model of these sizes.

        Raises:
            ConfigError: as of :func:`choose_schedule`.
        """
        limit = None if self.limit is None else MemoryLimit(sequences=self.limit)
        segments = len(self.lengths)
        request = Request(
            self.ranks, micro_batches, segments, lambda rank_of: self._costs(sizes, rank_of), limit, self.chunks,
            tried_actions,
        )  # fmt: skip
        return choose_schedule(self.schedule, request).schedule

    def _costs(self, sizes: ModelSizes, rank_of: tuple[int, ...]) -> PlacedCosts:
        """In units of their own, as only their ratios matter."""
        flops = unit_flops(sizes, self.counts, self.lengths, backward_ratio=BACKWARD_RATIO + self.recomputes)
        kept = kept_bytes(sizes, self.counts, self.lengths)
        return placed_costs(flops, kept, rank_of, len(self.lengths), recomputes=self.recomputes)


def _chosen(name: str, request: Request, chunks: int) -> ChosenSchedule:
    check_chunks(name, chunks)
    rank_of = place_stages(name, request.ranks, chunks)
    shape = PipelineShape(len(rank_of), request.micro_batches, request.segments)
    placed = request.costs(rank_of)
    limits = _limits(request, placed)
    if is_generated(name):
        schedule = list_schedule(shape, rank_of, placed.actions, limits, tried_actions=request.tried_actions)
    else:
        schedule = fixed_schedule(name, shape, request.ranks)
    costs = placed.actions
    timeline = simulate(
        schedule,
        shape,
        costs.duration_s,
        transfer_s=lambda _: costs.transfer_s,
        kept_bytes=costs.kept,
        input_gradient_frees=costs.input_gradient_frees,
    )
    chosen = ChosenSchedule(name, shape, rank_of, schedule, timeline)
    if request.limit is not None:
        _check_fits(chosen, limits, request.limit)
    return chosen


def _limits(request: Request, placed: PlacedCosts) -> list[float]:
    """For each rank, in sequences of its share."""
    limit = request.limit
    if limit is None:
        usual = min((request.ranks - 1) / request.segments + 1, float(request.micro_batches))
        return [usual] * request.ranks
    if limit.sequences is not None:
        return [limit.sequences] * request.ranks
    if placed.sequence_bytes is None:
        raise ConfigError("a memory limit in GiB needs to know what a sequence keeps; give it in sequences")
    assert limit.bytes is not None
    return [limit.bytes / each for each in placed.sequence_bytes]


def _check_fits(chosen: ChosenSchedule, limits: Sequence[float], limit: MemoryLimit) -> None:
    """A schedule that is made by a formula takes what it takes."""
    for rank, (peak, most) in enumerate(zip(chosen.timeline.peak_bytes, limits, strict=True)):
        if peak > most * (1 + 1e-6):
            raise ConfigError(
                f'the schedule "{chosen.name}" keeps up to {peak:.3g} sequences of its share on rank {rank}, more than '
                f'the memory limit of {limit}; "zero_bubble" keeps to any limit of a sequence or more'
            )
