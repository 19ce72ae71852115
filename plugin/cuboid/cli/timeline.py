"""``cuboid timeline``: simulate and draw a pipeline's step without training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuboid.cli.limits import LONGEST_TIME, MOST_UNITS, TrustRemoteCode, chunk_count, finite
from cuboid.cli.paths import check_outputs

if TYPE_CHECKING:
    from cuboid.seq1f1b.schedule.choice import ChosenSchedule, Comparison, MemoryLimit, PlacedCosts, Request
    from cuboid.seq1f1b.schedule.partition import HeadShare
    from cuboid.seq1f1b.schedule.simulator import Timeline

_Name = Literal[
    "seq1f1b",
    "seq1f1b-interleaved",
    "1f1b",
    "gpipe",
    "zero_bubble",
    "zero_bubble-interleaved",
    "zero_bubble-v",
    "auto",
    "auto-interleaved",
]


def timeline(
    stages: Annotated[int, typer.Option(help="Stages of the pipeline; with chunks, ranks.", min=1)] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.", min=1)] = 8,
    segments: Annotated[
        int | None, typer.Option(help="Segments of each sequence. Default: 4; 1 with 1f1b.", min=1)
    ] = None,
    schedule: Annotated[_Name, typer.Option(help="Order of the units; auto: the shortest step that fits.")] = "seq1f1b",
    chunks: Annotated[
        str | None,
        typer.Option(help="Stages on each rank; auto compares 1 to 4. Default: 2 with -interleaved, -v, auto, else 1."),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory limit of a rank's units: 1.5 (sequences of its share), or with --model 12GiB. "
            "Default for zero_bubble and auto: what seq1f1b keeps."
        ),
    ] = None,
    partition: Annotated[
        str, typer.Option(help='Where sequences are cut: "flops", "even", or lengths such as 1024,512,512.')
    ] = "flops",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face checkpoint, or its config.json, for real costs. Default: all units cost the same.",
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--seq-len", "--sequence-length", help="With --model: tokens of a sequence.", min=1)
    ] = None,
    rows: Annotated[int, typer.Option(help="With --model: rows of a micro-batch, for the memory.", min=1)] = 1,
    multiple: Annotated[int, typer.Option(help="Divisor of each segment's length, as a mesh needs it.", min=1)] = 1,
    backward_ratio: Annotated[
        float | None,
        typer.Option(
            help="Time of a backward for that of its forward. Default: 2; 3 is with activation checkpointing.",
            min=0,
            max=LONGEST_TIME,
            callback=finite,
        ),
    ] = None,
    durations: Annotated[
        str | None,
        typer.Option(help="Without --model: times of forward, input and weight gradient, such as 4,8.5,1."),
    ] = None,
    transfer: Annotated[
        float,
        typer.Option(
            help="Time of a message between ranks, in forwards of a unit.", min=0, max=LONGEST_TIME, callback=finite
        ),
    ] = 0.0,
    head: Annotated[
        Literal["last", "spread"],
        typer.Option(help="With --model: where the head is computed, on the last stage or spread over all ranks."),
    ] = "last",
    stage_balance: Annotated[
        Literal["flops", "halves", "schedule"],
        typer.Option(
            help="With --model: where stages begin, between layers, also inside them, or as makes the step short."
        ),
    ] = "flops",
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("timeline.png"),
    json_output: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here: bubble, peak_micro_batches, …")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Simulate one step of a pipeline: print each stage's idle time and memory, and draw the schedule.

    Times are relative: 1 is the forward of a rank's layers on an average segment.
    """
    from rich.console import Console

    from cuboid.checkpoint.format.bounded_files import write_json
    from cuboid.seq1f1b.schedule.choice import CHUNKED, COMPARED_CHUNKS
    from cuboid.seq1f1b.schedule.timeline_picture import draw_timeline, format_bytes

    lengths = _lengths_given(partition)
    count = segments or (len(lengths) if lengths else 1 if schedule == "1f1b" else 4)
    chunks_option = chunk_count(chunks) or (2 if schedule in (*CHUNKED, "auto") else 1)
    if chunks_option == "auto" and schedule != "auto":
        raise typer.BadParameter(f"--chunks auto is for --schedule auto; give {schedule} a number")
    chunk_counts = COMPARED_CHUNKS if chunks_option == "auto" else chunks_option
    most = stages * (max(COMPARED_CHUNKS) if chunks_option == "auto" else chunks_option)
    if most * micro_batches * count > MOST_UNITS:
        raise typer.BadParameter(
            f"--stages (× --chunks), --micro-batches, --segments: {most} × {micro_batches} × {count} is too many units "
            f"to draw; {MOST_UNITS:,} at most"
        )
    check_outputs(json_output, pictures=(output,), inputs=(model,))
    request = _Request(
        *(stages, chunk_counts, micro_batches, count, schedule, _limit_given(memory_limit)),
        *(partition, lengths, multiple, _ratios(backward_ratio, durations, with_model=model is not None), transfer),
        spreads_head=head == "spread" and stages > 1,
        stage_balance=stage_balance,
    )
    if model is None:
        if stage_balance != "flops":
            raise typer.BadParameter(
                f"--stage-balance {stage_balance} means nothing without --model PATH, which has layers"
            )
        if head == "spread":
            raise typer.BadParameter("--head spread means nothing without --model PATH, whose units have no head then")
        if sequence_length is not None:
            raise typer.BadParameter("--seq-len means nothing without --model PATH, which says what a token costs")
        costs: _Costs = _PlainCosts(request)
    else:
        costs = _ModelCosts(request, model, sequence_length, rows, trust_remote_code=trust_remote_code)
    compared = costs.compared()
    chosen = compared.best
    title = _title(request, chosen)
    simulated, label = chosen.timeline, _sequences
    sequence_bytes = costs.placed(chosen.rank_of).sequence_bytes
    if sequence_bytes is not None:
        simulated, label = _in_bytes(simulated, sequence_bytes), format_bytes
    draw_timeline(simulated, output, title=title, caption=costs.caption, time_label=_TIME, memory_label=label)
    share = costs.head(chosen)
    if json_output is not None:
        write_json(json_output, _numbers(request, compared, sequence_bytes, share))
    _print(Console(), chosen, costs, title)
    if len(compared.fitting) + len(compared.rejected) > 1:
        typer.echo(f"{schedule} is {compared}")
    if share is not None:
        typer.echo(share.sentence)
    typer.echo(f"drawn in {output}")


_TIME = "time (1 = the forward of a rank's layers on an average segment)"


@dataclass(frozen=True)
class _Request:
    """The options of the command; ``ratios`` are the times of input and weight gradient, relative to a forward."""

    ranks: int
    chunks: int | tuple[int, ...]
    micro_batches: int
    segments: int
    schedule: str
    limit: MemoryLimit | None
    partition: str
    lengths: tuple[int, ...] | None
    multiple: int
    ratios: tuple[float, float]
    transfer: float
    spreads_head: bool = False
    stage_balance: str = "flops"


def _limit_given(text: str | None) -> MemoryLimit | None:
    from cuboid.seq1f1b.schedule.choice import MemoryLimit

    return None if text is None else MemoryLimit.parse(text)


def _ratios(backward_ratio: float | None, durations: str | None, *, with_model: bool) -> tuple[float, float]:
    """Times of input gradient (I) and weight gradient (W), relative to a forward."""
    if durations is None:
        backward = 2.0 if backward_ratio is None else backward_ratio
        return backward / 2, backward / 2
    if with_model or backward_ratio is not None:
        raise typer.BadParameter("--durations goes neither with --model, whose own costs count, nor --backward-ratio")
    try:
        forward, inputs, weights = map(float, durations.split(","))
        if not (1 / LONGEST_TIME <= forward <= LONGEST_TIME and all(0 <= t <= LONGEST_TIME for t in (inputs, weights))):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"--durations {durations!r} is not three times such as 4,8.5,1") from None
    return inputs / forward, weights / forward


def _lengths_given(partition: str) -> tuple[int, ...] | None:
    if partition in ("flops", "even"):
        return None
    if partition == "measured":
        raise typer.BadParameter('"measured" cuts by the times of real steps; simulate it as "flops" or as lengths')
    try:
        return tuple(int(part) for part in partition.split(","))
    except ValueError:
        raise typer.BadParameter(
            f'--partition {partition!r} is none of "flops", "even" and lengths such as 1024,512,512'
        ) from None


class _Costs:
    """The costs of units, and a description of them for the picture's caption."""

    caption: str

    def compared(self) -> Comparison:
        """The comparison of the requested schedules."""
        raise NotImplementedError

    def placed(self, rank_of: tuple[int, ...]) -> PlacedCosts:
        """The costs of stages on these ranks."""
        raise NotImplementedError

    def layers(self, rank_of: tuple[int, ...]) -> tuple[float, ...] | None:
        """Number of layers of each stage, given their ranks; None without a model."""
        raise NotImplementedError

    def head(self, chosen: ChosenSchedule) -> _Head | None:
        """The head's share of the work, and what it costs in the chosen step; None without a model."""
        raise NotImplementedError


class _PlainCosts(_Costs):
    """All stages alike, and segments alike or in proportion to given lengths."""

    def __init__(self, request: _Request) -> None:
        from cuboid.seq1f1b.schedule.partition import check_lengths

        lengths = request.lengths
        if lengths is not None:
            check_lengths(lengths, segments=request.segments, multiple=request.multiple)
        self._request = request
        self._units = (
            [tokens * request.segments / sum(lengths) for tokens in lengths] if lengths else [1.0] * request.segments
        )
        self.caption = "all units cost the same" if lengths is None else "cost by length"

    def compared(self) -> Comparison:
        """See :class:`_Costs`."""
        from cuboid.seq1f1b.schedule.choice import compare_schedules

        return compare_schedules(self._request.schedule, _schedules(self._request, self))

    def layers(self, rank_of: tuple[int, ...]) -> None:
        """See :class:`_Costs`."""

    def head(self, chosen: ChosenSchedule) -> None:
        """See :class:`_Costs`."""

    def placed(self, rank_of: tuple[int, ...]) -> PlacedCosts:
        """See :class:`_Costs`."""
        from cuboid.seq1f1b.schedule.actions import Op
        from cuboid.seq1f1b.schedule.choice import PlacedCosts
        from cuboid.seq1f1b.schedule.list_scheduling import ActionCosts

        inputs, weights = self._request.ratios
        chunks = len(rank_of) // self._request.ranks
        times = {Op.FORWARD: 1.0, Op.BACKWARD: inputs + weights, Op.INPUT_GRADIENT: inputs, Op.WEIGHT_GRADIENT: weights}
        units = [unit / chunks for unit in self._units]
        return PlacedCosts(
            ActionCosts(
                lambda action: units[action.segment] * times[action.op],
                lambda action: units[action.segment] / len(units),
                self._request.transfer,
            )
        )


class _ModelCosts(_Costs):
    """Costs by the operations and the activations of a model's layers."""

    def __init__(
        self, request: _Request, model: Path, length: int | None, rows: int, *, trust_remote_code: bool
    ) -> None:
        from cuboid.models.batch.length_cases import check_length, longest_sequence
        from cuboid.models.pipeline.staging_plan import known_halves
        from cuboid.models.stages.model_costs import sizes_of
        from cuboid.planner.description.meta_model import meta_model
        from cuboid.seq1f1b.schedule.partition import check_lengths, cut_sequence, even_cut, segment_cost
        from cuboid.weights.model_folder import model_config

        if length is None:
            if request.lengths is None:
                raise typer.BadParameter("--model needs --seq-len TOKENS")
            length = sum(request.lengths)
        if length % request.multiple:
            raise typer.BadParameter(f"--seq-len {length} is not a multiple of --multiple {request.multiple}")
        config = model_config(model, trust_remote_code=trust_remote_code)
        check_length(length, longest_sequence(config), "--seq-len")
        whole_model = meta_model(config)
        needs_one = request.stage_balance == "halves"
        halves = () if request.stage_balance == "flops" else known_halves(whole_model, needs_one=needs_one)
        self._sizes = sizes_of(whole_model, halves)
        lengths, k, multiple = request.lengths, request.segments, request.multiple
        if lengths is not None:
            check_lengths(lengths, length=length, segments=k, multiple=multiple)
        elif request.partition == "even":
            lengths = even_cut(length, k, multiple)
        else:
            lengths = cut_sequence(length, k, multiple=multiple, cost=segment_cost(self._sizes))
        self._request, self._length, self._lengths, self._rows = request, length, lengths, rows
        #: The layers of stages that were searched, by the stages' ranks.
        self._searched: Mapping[tuple[int, ...], tuple[float, ...]] = {}
        self.caption = f"{config.model_type}, {length} tokens cut into {', '.join(map(str, lengths))}"

    def compared(self) -> Comparison:
        """See :class:`_Costs`."""
        from cuboid.models.pipeline.stage_search import StageSearch
        from cuboid.seq1f1b.schedule.choice import compare_schedules

        name, request = self._request.schedule, _schedules(self._request, self)
        if self._request.stage_balance != "schedule":
            return compare_schedules(name, request)
        compared, self._searched = StageSearch(name, request, self._sizes, self._length, self._placed).compare()
        return compared

    def layers(self, rank_of: tuple[int, ...]) -> tuple[float, ...]:
        """See :class:`_Costs`."""
        from cuboid.seq1f1b.schedule.partition import balance_by_flops, balance_halves

        has_head = not self._request.spreads_head
        if rank_of in self._searched:
            return self._searched[rank_of]
        if self._request.stage_balance != "flops":
            return balance_halves(self._sizes, rank_of, self._length, has_head=has_head)
        return balance_by_flops(self._sizes, len(rank_of), self._length, has_head=has_head)

    def head(self, chosen: ChosenSchedule) -> _Head:
        """See :class:`_Costs`."""
        from cuboid.seq1f1b.schedule.partition import HeadShare

        share = HeadShare.of(self._sizes, self.layers(chosen.rank_of), self._length)
        if self._request.spreads_head:
            return _Head(share, 0.0, is_spread=True)
        spread = self._with_spread_head().compared().best
        return _Head(share, max(0.0, 1 - spread.timeline.makespan_s / chosen.timeline.makespan_s))

    def _with_spread_head(self) -> _ModelCosts:
        """Costs of the same work, with the head's divided equally among the layers."""
        layers, part = self._sizes.layers, self._sizes.head // len(self._sizes.layers)
        costs = copy.copy(self)
        costs._sizes = replace(
            self._sizes, layers=tuple(replace(layer, weights=layer.weights + part) for layer in layers), head=0
        )
        costs._searched = {}
        return costs

    def placed(self, rank_of: tuple[int, ...]) -> PlacedCosts:
        """See :class:`_Costs`."""
        return self._placed(rank_of, self.layers(rank_of))

    def _placed(self, rank_of: tuple[int, ...], layers: tuple[float, ...]) -> PlacedCosts:
        from cuboid.seq1f1b.schedule.choice import placed_costs
        from cuboid.seq1f1b.schedule.partition import segment_cost
        from cuboid.seq1f1b.schedule.unit_costs import kept_bytes, unit_flops

        head_ranks = self._request.ranks if self._request.spreads_head else 0
        ratio = sum(self._request.ratios)
        flops = unit_flops(self._sizes, layers, self._lengths, backward_ratio=ratio, head_ranks=head_ranks)
        # In units of an average forward, so that the picture doesn't pretend to know the device's speed.
        average = segment_cost(self._sizes)(0, self._length) / (self._request.ranks * self._request.segments)
        unit_bytes = kept_bytes(self._sizes, layers, self._lengths, rows=self._rows)
        return placed_costs(
            lambda action: flops(action) / average, unit_bytes, rank_of, self._request.segments, self._request.transfer
        )


def _schedules(request: _Request, costs: _Costs) -> Request:
    from cuboid.seq1f1b.schedule.choice import Request

    return Request(
        *(request.ranks, request.micro_batches, request.segments, costs.placed, request.limit, request.chunks),
        spreads_head=request.spreads_head,
    )


@dataclass(frozen=True)
class _Head:
    """The head's share of the work, and the fraction of the step's time that having it on one stage costs."""

    share: HeadShare
    costs: float
    is_spread: bool = False

    @property
    def sentence(self) -> str:
        share = self.share
        if self.is_spread:
            return f"the head is worth {share.layers:.1f} layers, and each rank has an equal share of it"
        text = f"the head is worth {share.layers:.1f} layers and is {share.of_stage:.0%} of its stage"
        if share.layers > 1:
            text += (
                f"; the costliest stage takes {share.excess:.0%} longer than the average. With the head's work spread "
                f"over all stages, the step would be {self.costs:.0%} shorter"
            )
        return text


def _title(request: _Request, chosen: ChosenSchedule) -> str:
    chunks = chosen.chunks
    placed = f"{request.ranks} ranks of {chunks} chunks" if chunks > 1 else f"{request.ranks} stages"
    return (
        f"{chosen.name}: {placed}, {request.micro_batches} micro-batches, {request.segments} segments; "
        f"bubble {chosen.timeline.bubble:.1%}, peak {_sequences(chosen.peak_micro_batches)} sequences"
    )


def _sequences(number: float) -> str:
    return f"{number:.2f}"


def _in_bytes(simulated: Timeline, sequence_bytes: Sequence[float]) -> Timeline:
    """Convert a timeline's memory from sequences of each rank's share to bytes."""
    scaled = [
        tuple((time_s, amount * size) for time_s, amount in curve)
        for curve, size in zip(simulated.memory, sequence_bytes, strict=True)
    ]
    peaks = [peak * size for peak, size in zip(simulated.peak_bytes, sequence_bytes, strict=True)]
    return replace(simulated, peak_bytes=tuple(peaks), memory=tuple(scaled))


def _numbers(
    request: _Request, compared: Comparison, sequence_bytes: Sequence[float] | None, head: _Head | None
) -> dict[str, Any]:
    """What ``--json`` writes."""
    chosen = compared.best
    simulated = chosen.timeline
    numbers = {
        "schedule": chosen.name,
        "ranks": request.ranks,
        "chunks": chosen.chunks,
        "micro_batches": request.micro_batches,
        "segments": request.segments,
        "memory_limit": None if request.limit is None else str(request.limit),
        "makespan": simulated.makespan_s,
        "bubble": simulated.bubble,
        "bubble_by_rank": simulated.bubbles,
        "peak_micro_batches": chosen.peak_micro_batches,
        "peak_micro_batches_by_rank": simulated.peak_bytes,
        "compared": {str(candidate): candidate.timeline.makespan_s for candidate in compared.fitting},
        "rejected": dict(compared.rejected),
    }
    if sequence_bytes is not None:
        numbers["peak_bytes_by_rank"] = _in_bytes(simulated, sequence_bytes).peak_bytes
    if head is not None:
        numbers["head"] = {**asdict(head.share), "costs": head.costs}
    return numbers


def _print(console: Any, chosen: ChosenSchedule, costs: _Costs, title: str) -> None:
    from rich.table import Table

    from cuboid.seq1f1b.schedule.simulator import peak_bytes
    from cuboid.seq1f1b.schedule.timeline_picture import format_bytes
    from cuboid.seq1f1b.schedule.timeline_trace import rank_label

    simulated = chosen.timeline
    columns = {"stage": [rank_label(spans, rank) for rank, spans in enumerate(simulated.spans)]}
    layers = costs.layers(chosen.rank_of)
    if layers is not None:
        layers_by_rank = [
            [count for count, rank in zip(layers, chosen.rank_of, strict=True) if rank == r]
            for r in range(len(simulated.spans))
        ]
        columns["layers"] = [", ".join(map(str, counts)) for counts in layers_by_rank]
    columns["busy"] = [f"{busy:.2f}" for busy in simulated.busy_s]
    columns["idle"] = [f"{bubble:.1%}" for bubble in simulated.bubbles]
    columns["units in flight"] = [str(peak_bytes([s.action for s in rank], lambda _: 1)) for rank in simulated.spans]
    columns["sequences"] = list(map(_sequences, simulated.peak_bytes))
    sequence_bytes = costs.placed(chosen.rank_of).sequence_bytes
    if sequence_bytes is not None:
        columns["activations"] = list(map(format_bytes, _in_bytes(simulated, sequence_bytes).peak_bytes))
    table = Table()
    for header in columns:
        table.add_column(header, justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(f"{title}\n{costs.caption}", highlight=False)
    console.print(table)
