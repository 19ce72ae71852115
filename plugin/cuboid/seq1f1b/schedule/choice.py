"""Turns a schedule's name in the config into an order of actions, using the costs of the pipeline at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op, Schedule
from cuboid.seq1f1b.schedule.list_scheduling import TRIED_ACTIONS, ActionCosts, list_schedule
from cuboid.seq1f1b.schedule.lowering import to_simulate
from cuboid.seq1f1b.schedule.schedules import (
    SCHEDULES,
    PipelineShape,
    interleaved_placement,
    seq1f1b,
    seq1f1b_interleaved,
    v_placement,
)
from cuboid.seq1f1b.schedule.simulator import Timeline, peak_bytes, simulate
from cuboid.seq1f1b.schedule.unit_costs import (
    BACKWARD_RATIO,
    INPUT_GRADIENT_FREES,
    ModelSizes,
    kept_bytes,
    unit_flops,
)

Placement = Callable[[int, int], tuple[int, ...]]
#: The only schedule with several stages on each rank whose order doesn't depend on the units' costs.
_INTERLEAVED = "seq1f1b-interleaved"
#: The faster of the two schedules with several stages on each rank and interleaved placement.
_AUTO_INTERLEAVED = "auto-interleaved"
#: Schedules with several stages on each rank, and how each places them.
CHUNKED: Mapping[str, Placement] = MappingProxyType(
    {
        _INTERLEAVED: interleaved_placement,
        "zero_bubble-interleaved": interleaved_placement,
        "zero_bubble-v": v_placement,
        _AUTO_INTERLEAVED: interleaved_placement,
    }
)
AUTO = "auto"
#: Names that stand for several schedules with the same placement, so that each step may use another one of them.
_ALIKE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {AUTO: ("seq1f1b", "zero_bubble"), _AUTO_INTERLEAVED: (_INTERLEAVED, "zero_bubble-interleaved")}
)
#: Numbers of chunks, besides 1, that ``"chunks": "auto"`` compares.
COMPARED_CHUNKS = (2, 3, 4)
#: Fraction of a step that more chunks must save, where the number of chunks is chosen: shorter units and more messages
#: have costs that aren't visible in operation counts.
_CHUNKS_GAIN = 0.01
#: All names that are valid in a config or on the command line.
NAMES = (*SCHEDULES, "zero_bubble", *CHUNKED, AUTO)


@dataclass(frozen=True)
class MemoryLimit:
    """The most that a rank's units in flight may keep: in sequences (see :class:`ActionCosts`), or in bytes."""

    sequences: float | None = None
    bytes: float | None = None

    @classmethod
    def parse(cls, text: float | str) -> MemoryLimit:
        """Read a number of sequences, or a text such as ``"12 GiB"``.

        Raises:
            ConfigError: the text is neither, or the amount isn't positive.
        """
        number, gib, suffix = str(text).strip().partition("GiB")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if suffix or not 0 < amount < float("inf"):
            raise ConfigError(
                f'memory_limit is {text!r}; write a number of sequences such as 1.5, or a text such as "12 GiB"'
            )
        return cls(bytes=amount * 2**30) if gib else cls(sequences=amount)

    def __str__(self) -> str:
        return f"{self.sequences:g} sequences" if self.bytes is None else f"{self.bytes / 2**30:g} GiB"


@dataclass(frozen=True)
class PlacedCosts:
    """The costs of a pipeline for a given placement of its stages: those of single actions make its schedules."""

    actions: ActionCosts
    #: For each rank, the bytes that its units of one sequence keep; None if unknown.
    sequence_bytes: Sequence[float] | None = None


def placed_costs(
    duration_s: Callable[[Action], float],
    kept_bytes: Callable[[Action], float],
    rank_of: Sequence[int],
    segments: int,
    transfer_s: float = 0.0,
    *,
    recomputes: bool = False,
    is_frozen: bool = False,
) -> PlacedCosts:
    """Compute the costs of stages on their ranks, with memory as fractions of what one sequence keeps on the rank.

    Args:
        duration_s: duration of an action.
        kept_bytes: bytes that a unit keeps, given its forward; the same for all micro-batches.
        rank_of: the rank of each stage.
        segments: number of segments of each micro-batch.
        transfer_s: duration of a message.
        recomputes: whether activation checkpointing is on. Then I frees everything that the forward kept, and what I
            computes for W is freed before the next I.
        is_frozen: whether weights are. Then I frees everything, since there is nothing for W.
    """
    sizes = [0.0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        sizes[rank] += sum(kept_bytes(Action(Op.FORWARD, stage, 0, segment)) for segment in range(segments))
    actions = ActionCosts(
        duration_s,
        lambda action: kept_bytes(action) / sizes[rank_of[action.stage]],
        transfer_s,
        1.0 if recomputes or is_frozen else INPUT_GRADIENT_FREES,
        1 if recomputes else None,
    )
    return PlacedCosts(actions, tuple(sizes))


@dataclass(frozen=True)
class Request:
    """The pipeline that a schedule is requested for.

    Args:
        ranks: P, ranks of the pipeline.
        micro_batches: M.
        segments: k.
        costs: returns the costs of the stages, given the rank of each.
        limit: memory limit. Without one, schedules that need a limit get the memory that ``seq1f1b`` without chunks
            takes.
        chunks: v, stages on each rank; for ``"auto"``, those of the schedules that have several. Given a tuple,
            ``"auto"`` compares these numbers too, and takes more chunks only if the gain is worth it.
        tried_actions: see :func:`~cuboid.seq1f1b.schedule.list_scheduling.list_schedule`.
        spreads_head: whether every rank has a share of the head; see :func:`check_spread`.
    """

    ranks: int
    micro_batches: int
    segments: int
    costs: Callable[[tuple[int, ...]], PlacedCosts]
    limit: MemoryLimit | None = None
    chunks: int | tuple[int, ...] = 1
    tried_actions: int = TRIED_ACTIONS
    spreads_head: bool = False

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """:attr:`chunks` as a tuple."""
        return (self.chunks,) if isinstance(self.chunks, int) else self.chunks


@dataclass(frozen=True)
class ChosenSchedule:
    """A schedule, and its simulation.

    Attributes:
        name: one of :data:`NAMES`, never ``"auto"`` or ``"auto-interleaved"``.
        shape: the pipeline's shape; its ``stages`` are those of all ranks.
        rank_of: the rank of each stage.
        schedule: the schedule itself.
        timeline: its simulation, with memory in sequences (see :class:`ActionCosts`).
    """

    name: str
    shape: PipelineShape
    rank_of: tuple[int, ...]
    schedule: Schedule
    timeline: Timeline

    @property
    def peak_micro_batches(self) -> float:
        """The most that any rank keeps, in sequences (see :class:`ActionCosts`)."""
        return max(self.timeline.peak_bytes)

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.shape.stages // len(self.schedule)

    def __str__(self) -> str:
        return _in_words(self.name, self.chunks)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing schedules.

    Attributes:
        fitting: the schedules that keep to the memory limit, the simplest first; never empty.
        rejected: for each other schedule, by name and chunks, why it was rejected.
        least_gain: the fraction of its step by which a schedule must beat those with fewer chunks.
    """

    fitting: tuple[ChosenSchedule, ...]
    rejected: Mapping[str, str]
    least_gain: float = 0.0

    @property
    def best(self) -> ChosenSchedule:
        """The schedule with the shortest step; one with fewer chunks is preferred if it takes only little longer."""
        most_s = min(map(_makespan_s, self.fitting)) * (1 + self.least_gain)
        near = [candidate for candidate in self.fitting if _makespan_s(candidate) <= most_s]
        fewest = min(candidate.chunks for candidate in near)
        return min(
            (candidate for candidate in near if not self.least_gain or candidate.chunks == fewest), key=_makespan_s
        )

    def __str__(self) -> str:
        """One line with the best schedule, and how much longer the others would take."""
        best = self.best
        text = f"{best}: {best.timeline.bubble:.1%} idle, {best.peak_micro_batches:.2f} sequences kept"
        slower = (candidate for candidate in self.fitting if candidate is not best)
        others = [f"{candidate} takes {_makespan_s(candidate) / _makespan_s(best) - 1:+.1%}" for candidate in slower]
        others += [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        return text + "".join(f"; {other}" for other in others)


def choose_schedule(name: str, request: Request) -> ChosenSchedule:
    """Return the schedule with a name; for ``"auto"``, the best of :func:`compare_schedules`.

    Raises:
        ConfigError: the schedule has no chunks but several are requested, or the other way round; or it needs more
            memory than the limit.
    """
    return compare_schedules(name, request).best


def compare_schedules(name: str, request: Request) -> Comparison:
    """Simulate all schedules that a name covers: one, or several for ``"auto"`` and ``"auto-interleaved"``.

    If several are compared without a memory limit, none may keep more than ``seq1f1b`` without chunks does.

    Raises:
        ConfigError: see :func:`choose_schedule`; if several are compared, none of them keeps to the limit.
    """
    for chunks in request.chunk_counts:
        check_chunks(name, chunks)
    if name not in _ALIKE:
        (chunks,) = request.chunk_counts
        return Comparison((_chosen(name, request, chunks),), MappingProxyType({}))
    chunked = _ALIKE[name] if name != AUTO else [schedule for schedule in CHUNKED if schedule not in _ALIKE]
    candidates = [(schedule, 1) for schedule in _ALIKE[name] if name == AUTO]
    candidates += [(schedule, chunks) for chunks in request.chunk_counts if chunks > 1 for schedule in chunked]
    fitting: list[ChosenSchedule] = []
    rejected: dict[str, str] = {}
    problem: ConfigError | None = None
    for schedule, chunks in candidates:
        try:
            fitting.append(_chosen(schedule, request, chunks, compared=True))
        except ConfigError as error:
            problem = error
            # The part after the semicolon is advice.
            rejected[_in_words(schedule, chunks)] = str(error).partition("; ")[0]
    if not fitting:
        assert problem is not None
        raise problem
    least_gain = 0.0 if isinstance(request.chunks, int) else _CHUNKS_GAIN
    return Comparison(tuple(fitting), MappingProxyType(rejected), least_gain)


def check_chunks(name: str, chunks: int) -> None:
    """Check that a schedule can have this number of stages on each rank.

    Raises:
        ConfigError: it can't.
    """
    if name in CHUNKED and chunks < 2:
        plain = name.partition("-")[0]
        raise ConfigError(
            f'the schedule "{name}" has several chunks on each rank: give 2 chunks or more, or take "{plain}"'
        )
    if name not in CHUNKED and name != AUTO and chunks > 1:
        near = [schedule for schedule in CHUNKED if schedule.startswith(name)] or list(CHUNKED)
        raise ConfigError(
            f'the schedule "{name}" has one chunk on each rank; with {chunks} chunks, take {" or ".join(near)}'
        )


def check_spread(name: str) -> None:
    """Check that a schedule can have a head that is spread over the ranks: one that is generated.

    Raises:
        ConfigError: it can't.
    """
    if name in NAMES and not is_generated(name):
        chunked = [schedule for schedule in CHUNKED if is_generated(schedule)]
        names = ["zero_bubble", AUTO] if name not in CHUNKED else chunked
        raise ConfigError(
            f'the schedule "{name}" has the head on its last stage: its order has no place for the shares of a head '
            f'that is spread; take {" or ".join(names)}, or "head": "last"'
        )


def place_stages(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each of ``ranks × chunks`` stages under the named schedule's placement."""
    assert name != AUTO or chunks == 1, "auto with several chunks stands for several places"
    return CHUNKED.get(name, interleaved_placement)(ranks, chunks)


def name_of_placement(name: str) -> str:
    """Return the name that covers all schedules with the same placement as the named one."""
    return next((alike for alike, names in _ALIKE.items() if name in names), name)


def is_generated(name: str) -> bool:
    """Whether the named schedule is generated from the units' costs; such a schedule may split backwards."""
    return name not in SCHEDULES and name != _INTERLEAVED


def fixed_schedule(name: str, shape: PipelineShape, ranks: int) -> Schedule:
    """Return the named schedule, whose order must not depend on the units' costs (see :func:`is_generated`)."""
    return seq1f1b_interleaved(shape, ranks) if name == _INTERLEAVED else SCHEDULES[name](shape)


@dataclass(frozen=True)
class ModelPipeline:
    """The properties of a model's pipeline that determine the order of its actions."""

    #: A name in :data:`NAMES`.
    schedule: str
    ranks: int
    #: Stages on each rank.
    chunks: int
    #: Number of layers of each stage, for the stages of all ranks.
    counts: tuple[float, ...]
    #: Tokens of each segment.
    lengths: tuple[int, ...]
    #: In sequences (see :class:`ActionCosts`); None for the default of :class:`Request`.
    limit: float | None = None
    #: Whether activation checkpointing is on.
    recomputes: bool = False
    #: Whether every rank has a share of the head.
    spreads_head: bool = False

    @property
    def _head_ranks(self) -> int:
        return self.ranks if self.spreads_head else 0

    def order(self, sizes: ModelSizes, micro_batches: int, *, tried_actions: int = TRIED_ACTIONS) -> Schedule:
        """Return the order in which training runs a step; see :meth:`chosen`."""
        return self.chosen(sizes, micro_batches, tried_actions=tried_actions).schedule

    def chosen(self, sizes: ModelSizes, micro_batches: int, *, tried_actions: int = TRIED_ACTIONS) -> ChosenSchedule:
        """Return the schedule of training's steps, with costs from the operation counts of a model's sizes.

        Raises:
            ConfigError: see :func:`choose_schedule`.
        """
        limit = None if self.limit is None else MemoryLimit(sequences=self.limit)
        segments = len(self.lengths)
        request = Request(
            self.ranks, micro_batches, segments, lambda rank_of: self.costs(sizes, rank_of), limit, self.chunks,
            tried_actions, self.spreads_head,
        )  # fmt: skip
        return choose_schedule(self.schedule, request)

    def durations(self, sizes: ModelSizes) -> Callable[[Action], float]:
        """Return the durations of actions, in arbitrary units: the model's operations, at least 1."""
        ratio = BACKWARD_RATIO + self.recomputes
        flops = unit_flops(sizes, self.counts, self.lengths, backward_ratio=ratio, head_ranks=self._head_ranks)
        return lambda action: max(flops(action), 1)

    def costs(self, sizes: ModelSizes, rank_of: tuple[int, ...]) -> PlacedCosts:
        """Return the costs of the stages on these ranks, in arbitrary units: only their ratios matter."""
        unit_bytes = kept_bytes(sizes, self.counts, self.lengths)
        return placed_costs(
            *(self.durations(sizes), unit_bytes, rank_of, len(self.lengths)),
            recomputes=self.recomputes,
            is_frozen=sizes.is_frozen,
        )


def _chosen(name: str, request: Request, chunks: int, *, compared: bool = False) -> ChosenSchedule:
    if request.spreads_head:
        check_spread(name)
    rank_of = place_stages(name, request.ranks, chunks)
    head_ranks = request.ranks if request.spreads_head else 0
    shape = PipelineShape(len(rank_of), request.micro_batches, request.segments, head_ranks)
    placed = request.costs(rank_of)
    limits = _limits(request, placed, chunks)
    if is_generated(name):
        schedule = list_schedule(shape, rank_of, placed.actions, limits, tried_actions=request.tried_actions)
    else:
        schedule = fixed_schedule(name, shape, request.ranks)
    costs = placed.actions
    timeline = simulate(
        to_simulate(schedule, shape, costs.duration_s),
        shape,
        costs.duration_s,
        transfer_s=lambda _: costs.transfer_s,
        kept_bytes=costs.kept,
        input_gradient_frees=costs.input_gradient_frees,
    )
    chosen = ChosenSchedule(name, shape, rank_of, schedule, timeline)
    if request.limit is not None:
        _check_fits(chosen, limits, f"the memory limit of {request.limit}")
    elif compared:
        usual = _seq1f1b_peak(chosen, costs)
        _check_fits(chosen, [max(limit, usual) for limit in limits], f'the {usual:.3g} that "seq1f1b" keeps')
    return chosen


def _limits(request: Request, costs: PlacedCosts, chunks: int) -> list[float]:
    """Return each rank's memory limit, in sequences."""
    limit = request.limit
    if limit is None:
        # P − 1 + k units of 1/k sequence each: the peak of `seq1f1b`, on rank 0. Units wait longer for a head that all
        # ranks share, so that ranks need those of three stages more (arXiv 2411.05288: two whole micro-batches).
        units = request.ranks - 1 + request.segments + (3 / chunks if request.spreads_head else 0)
        usual = min(units / request.segments, float(request.micro_batches))
        return [usual] * request.ranks
    if limit.sequences is not None:
        return [limit.sequences] * request.ranks
    if costs.sequence_bytes is None:
        raise ConfigError("a memory limit in GiB needs to know what a sequence keeps; give it in sequences")
    assert limit.bytes is not None
    return [limit.bytes / sequence_bytes for sequence_bytes in costs.sequence_bytes]


def _seq1f1b_peak(chosen: ChosenSchedule, costs: ActionCosts) -> float:
    """Return the most that ``seq1f1b`` would keep on any rank with these segments, in sequences.

    That is on rank 0, which has the most units in flight.
    """
    shape = chosen.shape
    first_stages = [stage for stage, rank in enumerate(chosen.rank_of) if rank == 0]
    shares = [
        sum(costs.kept(Action(Op.FORWARD, s, 0, segment)) for s in first_stages) for segment in range(shape.segments)
    ]
    unchunked = PipelineShape(len(chosen.schedule), shape.micro_batches, shape.segments)
    return peak_bytes(seq1f1b(unchunked)[0], lambda action: shares[action.segment])


def _check_fits(chosen: ChosenSchedule, limits: Sequence[float], limit: str) -> None:
    """Raise a ConfigError if a schedule exceeds a limit. Only fixed ones can: generated ones are built to the limit."""
    for rank, (peak, most) in enumerate(zip(chosen.timeline.peak_bytes, limits, strict=True)):
        if peak > most * (1 + 1e-6):
            raise ConfigError(
                f'the schedule "{chosen.name}" keeps up to {peak:.3g} sequences of its share on rank {rank}, more than '
                f'{limit}; "zero_bubble" keeps to any limit of a sequence or more'
            )


def _makespan_s(chosen: ChosenSchedule) -> float:
    return chosen.timeline.makespan_s


def _in_words(name: str, chunks: int) -> str:
    return f"{name} of {chunks} chunks" if chunks > 1 else name
