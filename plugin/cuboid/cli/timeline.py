"""``cuboid timeline``: simulate and draw a pipeline's step without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuboid.cli.limits import MOST_UNITS, finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuboid.seq1f1b.schedule.actions import Action
    from cuboid.seq1f1b.schedule.simulator import Timeline


def timeline(
    stages: Annotated[int, typer.Option(help="Stages of the pipeline.", min=1)] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.", min=1)] = 8,
    segments: Annotated[
        int | None, typer.Option(help="Segments of each sequence. Default: 4; 1 with 1f1b.", min=1)
    ] = None,
    schedule: Annotated[Literal["seq1f1b", "1f1b", "gpipe"], typer.Option(help="Order of the units.")] = "seq1f1b",
    partition: Annotated[
        str, typer.Option(help='Where sequences are cut: "flops", "even", or lengths such as 1024,512,512.')
    ] = "flops",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face checkpoint, or its config.json, for real costs. Default: all units cost the same.",
            exists=True,
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--seq-len", "--sequence-length", help="With --model: tokens of a sequence.", min=1)
    ] = None,
    rows: Annotated[int, typer.Option(help="With --model: rows of a micro-batch, for the memory.", min=1)] = 1,
    multiple: Annotated[int, typer.Option(help="What the mesh wants each segment's length to divide by.", min=1)] = 1,
    backward_ratio: Annotated[
        float,
        typer.Option(
            help="Time of a backward for that of its forward; 3 with activation checkpointing.", min=0, callback=finite
        ),
    ] = 2.0,
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("timeline.png"),
) -> None:
    """Simulate one step of a pipeline: print each stage's idle time and memory, and draw the schedule.

    Times are relative: 1 is the forward of an average unit. Messages between stages are taken to cost nothing.
    """
    from rich.console import Console

    from cuboid.seq1f1b.schedule.timeline_picture import draw_timeline

    lengths = _lengths_given(partition)
    count = segments or (len(lengths) if lengths else 1 if schedule == "1f1b" else 4)
    if stages * micro_batches * count > MOST_UNITS:
        raise typer.BadParameter(
            f"{stages} stages × {micro_batches} micro-batches × {count} segments are too many units to draw; "
            f"{MOST_UNITS:,} at most"
        )
    request = _Request(stages, micro_batches, count, schedule, partition, lengths, multiple, backward_ratio)
    if model is None:
        if sequence_length is not None:
            raise typer.BadParameter("--seq-len means nothing without --model PATH, which says what a token costs")
        costs = _plain_costs(request)
    else:
        costs = _model_costs(request, model, sequence_length, rows)
    simulated = _simulate(request, costs)
    title = (
        f"{schedule}: {stages} stages, {micro_batches} micro-batches, {count} segments; bubble {simulated.bubble:.1%}"
    )
    draw_timeline(simulated, output, title=title, caption=costs.caption, time_label=_TIME)
    _print(Console(), simulated, costs, title)
    typer.echo(f"drawn in {output}")


_TIME = "time (1 = the forward of an average unit)"


@dataclass(frozen=True)
class _Request:
    stages: int
    micro_batches: int
    segments: int
    schedule: str
    partition: str
    lengths: tuple[int, ...] | None
    multiple: int
    backward_ratio: float


@dataclass(frozen=True)
class _Costs:
    """The costs of units, and a description of them for the picture's caption."""

    duration: Callable[[Action], float]
    kept_bytes: Callable[[Action], int] | None
    layers: tuple[int, ...] | None
    caption: str


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


def _plain_costs(request: _Request) -> _Costs:
    from cuboid.seq1f1b.schedule.actions import Op
    from cuboid.seq1f1b.schedule.partition import check_lengths

    lengths = request.lengths
    if lengths is not None:
        check_lengths(lengths, segments=request.segments, multiple=request.multiple)
    units = [1.0] * request.segments if lengths is None else [each * len(lengths) / sum(lengths) for each in lengths]

    def duration(action: Action) -> float:
        parts = {Op.FORWARD: 1.0, Op.BACKWARD: request.backward_ratio}
        return units[action.segment] * parts.get(action.op, request.backward_ratio / 2)

    return _Costs(duration, None, None, "all units cost the same" if lengths is None else "cost by length")


def _model_costs(request: _Request, model: Path, length: int | None, rows: int) -> _Costs:
    from cuboid.models.stages.model_costs import model_sizes
    from cuboid.seq1f1b.schedule.partition import balance_by_flops, check_lengths, cut_sequence, even_cut, segment_cost
    from cuboid.seq1f1b.schedule.unit_costs import kept_bytes, unit_flops
    from cuboid.weights.model_folder import model_config

    if length is None:
        if request.lengths is None:
            raise typer.BadParameter("--model needs --seq-len TOKENS")
        length = sum(request.lengths)
    if length % request.multiple:
        raise typer.BadParameter(f"--seq-len {length} is not a multiple of --multiple {request.multiple}")
    config = model_config(model)
    sizes = model_sizes(config)
    lengths = request.lengths
    if lengths is not None:
        check_lengths(lengths, length=length, segments=request.segments, multiple=request.multiple)
    elif request.partition == "even":
        lengths = even_cut(length, request.segments, request.multiple)
    else:
        lengths = cut_sequence(length, request.segments, multiple=request.multiple, cost=segment_cost(sizes))
    layers = balance_by_flops(sizes, request.stages, length)
    # In units of an average forward, so that the picture doesn't pretend to know the device's speed.
    flops = unit_flops(sizes, layers, lengths, backward_ratio=request.backward_ratio)
    average = segment_cost(sizes)(0, length) / (request.stages * request.segments)
    caption = f"{config.model_type}, {length} tokens cut into {', '.join(map(str, lengths))}"
    return _Costs(
        lambda action: flops(action) / average, kept_bytes(sizes, layers, lengths, rows=rows), layers, caption
    )


def _simulate(request: _Request, costs: _Costs) -> Timeline:
    from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
    from cuboid.seq1f1b.schedule.simulator import simulate

    shape = PipelineShape(request.stages, request.micro_batches, request.segments)
    schedule = SCHEDULES[request.schedule](shape)
    return simulate(schedule, shape, costs.duration, kept_bytes=costs.kept_bytes)


def _print(console: Any, simulated: Timeline, costs: _Costs, title: str) -> None:
    from rich.table import Table

    from cuboid.seq1f1b.schedule.simulator import peak_bytes
    from cuboid.seq1f1b.schedule.timeline_picture import format_bytes

    columns: dict[str, list[str]] = {"stage": [str(stage) for stage in range(len(simulated.spans))]}
    if costs.layers is not None:
        columns["layers"] = [str(count) for count in costs.layers]
    columns["busy"] = [f"{busy:.2f}" for busy in simulated.busy_s]
    columns["idle"] = [f"{bubble:.1%}" for bubble in simulated.bubbles]
    columns["units in flight"] = [str(peak_bytes([s.action for s in rank], lambda _: 1)) for rank in simulated.spans]
    if costs.kept_bytes is not None:
        columns["activations"] = [format_bytes(peak) for peak in simulated.peak_bytes]
    table = Table()
    for header in columns:
        table.add_column(header, justify="right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(f"{title}\n{costs.caption}", highlight=False)
    console.print(table)
