"""Write the tables of docs/timeline.md and draw its pictures: simulated steps of Llama 2 7B, and of equal units."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from cuboid.distributed.topology import MeshShape
from cuboid.planner.cost.layout import Layout
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import best_segments, estimate
from cuboid.seq1f1b.schedule.actions import Op
from cuboid.seq1f1b.schedule.choice import (
    CHUNKED,
    ChosenSchedule,
    MemoryLimit,
    PlacedCosts,
    Request,
    choose_schedule,
)
from cuboid.seq1f1b.schedule.list_scheduling import ActionCosts
from cuboid.seq1f1b.schedule.partition import (
    balance_stages,
    cut_sequence,
    even_cut,
    segment_cost,
)
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Timeline, simulate
from cuboid.seq1f1b.schedule.timeline_picture import draw_timelines, format_bytes
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, kept_bytes, unit_flops
from generators.marked import table
from generators.planner_rows import described

MODEL = ModelSizes((LayerSizes.decoder(4096, 4096, 4096, 11008),) * 32, head=4096 * 32000)
LENGTH, MULTIPLE, SEGMENTS = 32768, 8, 4
#: The same model, for the planner.
PLANNED = described(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000,
    }
)  # fmt: skip
CLUSTER = Cluster.parse("8xH100-80GB")
SHAPES = ((4, 4), (4, 8), (8, 4), (8, 8))
#: Title, schedule, segments and partition.
COLUMNS = (
    ("GPipe", "gpipe", 1, "flops"),
    ("1F1B", "1f1b", 1, "flops"),
    (f"Seq1F1B, k = {SEGMENTS}, even", "seq1f1b", SEGMENTS, "even"),
    (f"Seq1F1B, k = {SEGMENTS}, flops", "seq1f1b", SEGMENTS, "flops"),
)
SWEEP_STAGES, SWEEP_MICRO_BATCHES, SWEEP = 8, 8, (1, 2, 4, 8, 16)
PICTURE_STAGES, PICTURE_MICRO_BATCHES = 4, 4
#: Schedules under a memory limit: segments with the times of F, I and W, and the limits.
LIMIT_CASES = ((8, (1.0, 1.0, 1.0)), (16, (1.0, 1.0, 1.0)), (16, (4.0, 8.5, 1.0)))
LIMITS = (1.5, 2.0)
LIMITED = ("zero_bubble", "zero_bubble-interleaved", "zero_bubble-v")
#: Of the picture: schedule and limit.
DRAWN = (("seq1f1b", None), ("zero_bubble", 1.75), ("zero_bubble-interleaved", 1.75), ("zero_bubble-v", 1.75))


def lengths_of(partition: str, segments: int) -> tuple[int, ...]:
    """Tokens of each segment."""
    if partition == "even":
        return even_cut(LENGTH, segments, MULTIPLE)
    return cut_sequence(LENGTH, segments, multiple=MULTIPLE, cost=segment_cost(MODEL))


@cache
def step(schedule: str, stages: int, micro_batches: int, segments: int, partition: str) -> Timeline:
    """One step; times are operations."""
    shape = PipelineShape(stages, micro_batches, segments)
    lengths = lengths_of(partition, segments)
    layers = balance_stages(MODEL.layer_flops(LENGTH), stages, last=MODEL.head_flops(LENGTH))
    flops = unit_flops(MODEL, layers, lengths)
    kept = kept_bytes(MODEL, layers, lengths)
    return simulate(SCHEDULES[schedule](shape), shape, flops, kept_bytes=kept)


def bubble() -> str:
    """Table of bubbles by schedule and partition."""
    rows = []
    for stages, micro_batches in SHAPES:
        bubbles = [step(name, stages, micro_batches, k, cut).bubble for _, name, k, cut in COLUMNS]
        ideal = [(stages - 1) / (k * micro_batches + stages - 1) for k in (1, SEGMENTS)]
        rows.append([str(stages), str(micro_batches), *map(_percent, (*bubbles, *ideal))])
    titles = [title for title, *_ in COLUMNS]
    return table(["P", "M", *titles, "ideal, k = 1", f"ideal, k = {SEGMENTS}"], rows, "rrrrrrrr")


def memory() -> str:
    """Table of the first stage's activations."""
    rows = []
    for stages, micro_batches in SHAPES:
        peaks = [step(name, stages, micro_batches, k, cut).peak_bytes[0] for _, name, k, cut in COLUMNS]
        rows.append([str(stages), str(micro_batches), *map(format_bytes, peaks)])
    return table(["P", "M", *(title for title, *_ in COLUMNS)], rows, "rrrrrr")


def segments() -> str:
    """Table of numbers of segments."""
    rows = []
    shape = (SWEEP_STAGES, SWEEP_MICRO_BATCHES)
    layout = Layout(MeshShape(), stages=shape[0], micro_batches=shape[1])
    for k in SWEEP:
        simulated = step("seq1f1b", *shape, k, "flops")
        predicted = estimate(PLANNED, replace(layout, segments=k), CLUSTER, LENGTH).time.total_s
        activations = format_bytes(simulated.peak_bytes[0])
        rows.append([str(k), _percent(simulated.bubble), activations, f"{predicted:.2f}"])
    best = best_segments(PLANNED, layout, CLUSTER, LENGTH)
    text = table(["k", "bubble", "first stage's activations", f"step on {CLUSTER}, s"], rows, "rrrr")
    return f"With P = {shape[0]} and M = {shape[1]}, where `auto` takes {best}:\n\n{text}"


def limited(name: str, shape: tuple[int, int, int], times: tuple[float, ...], limit: float | None) -> ChosenSchedule:
    """A schedule of P stages, M micro-batches and k segments with equal units, two chunks on a rank where it has them.

    Args:
        name: of the schedule.
        shape: P, M and k.
        times: of F, I and W, of all layers of a rank.
        limit: in sequences; None for a formula.
    """
    ranks, micro_batches, k = shape
    forward, inputs, weights = times

    def costs(rank_of: tuple[int, ...]) -> PlacedCosts:
        per_rank = len(rank_of) // ranks
        table = {Op.FORWARD: forward, Op.BACKWARD: inputs + weights, Op.INPUT_GRADIENT: inputs}
        return PlacedCosts(
            ActionCosts(lambda action: table.get(action.op, weights) / per_rank, lambda _: 1 / (k * per_rank))
        )

    memory = None if limit is None else MemoryLimit(sequences=limit)
    chunks = 2 if name in CHUNKED else 1
    return choose_schedule(name, Request(ranks, micro_batches, k, costs, memory, chunks))


def limits() -> str:
    """Table of schedules under a limit, and of the formulas, with what they keep."""
    heads = [f"k = {k}, {' : '.join(f'{time:g}' for time in times)}" for k, times in LIMIT_CASES]
    rows = []
    for name in ("1f1b", "seq1f1b", "seq1f1b-interleaved"):
        cells = []
        for k, times in LIMIT_CASES:
            chosen = limited(name, (8, 8, 1 if name == "1f1b" else k), times, None)
            cells.append(f"{_percent(chosen.timeline.bubble)} at {chosen.peak_micro_batches:.2f}")
        rows.append([f"`{name}`", "–", *cells])
    for name in LIMITED:
        for limit in LIMITS:
            chosen_of = [limited(name, (8, 8, k), times, limit) for k, times in LIMIT_CASES]
            cells = [f"{_percent(chosen.timeline.bubble)} at {chosen.peak_micro_batches:.2f}" for chosen in chosen_of]
            rows.append([f"`{name}`", f"{limit:g}", *cells])
    return table(["schedule", "limit", *heads], rows, "lrrrr")


def draw(folder: Path) -> None:
    """The pictures: three cuts of Seq1F1B, and the schedules with a split backward."""
    drawn = [(name, limited(name, (4, 4, 4), (1.0, 1.0, 1.0), limit)) for name, limit in DRAWN]
    draw_timelines(
        [
            (f"{name}: bubble {_percent(c.timeline.bubble)}, peak {c.peak_micro_batches:.2f} sequences", c.timeline)
            for name, c in drawn
        ],
        folder / "schedules.png",
        caption="four ranks, F = I = W",
        time_label="time (1 = the forward of a rank's layers on a segment)",
        memory_label=lambda sequences: f"{sequences:.2f}",
    )
    timelines = []
    for title, name, k, cut in COLUMNS[1:]:
        timeline = step(name, PICTURE_STAGES, PICTURE_MICRO_BATCHES, k, cut)
        # Times as the page and the command have them.
        average = segment_cost(MODEL)(0, LENGTH) / (PICTURE_STAGES * SEGMENTS)
        timelines.append((f"{title}: bubble {_percent(timeline.bubble)}", _scaled(timeline, 1 / average)))
    lengths = ", ".join(map(str, lengths_of("flops", SEGMENTS)))
    draw_timelines(
        timelines,
        folder / "timeline.png",
        caption=f"Llama 2 7B, {LENGTH} tokens; by flops: {lengths}",
        time_label="time (1 = the forward of an average segment)",
    )


def _scaled(timeline: Timeline, factor: float) -> Timeline:
    spans = tuple(
        tuple(type(span)(span.action, span.start_s * factor, span.end_s * factor) for span in rank)
        for rank in timeline.spans
    )
    return Timeline(spans, timeline.peak_bytes)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def parts() -> dict[str, dict[str, str]]:
    """Tables of bubbles, of memory and of numbers of segments."""
    return {"timeline.md": {"bubble": bubble(), "memory": memory(), "segments": segments(), "limits": limits()}}
