"""Draws timelines: a lane for each rank, blank where it is idle, with the memory of its units below if known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuboid.errors import CuboidError
from cuboid.seq1f1b.schedule.actions import Op
from cuboid.seq1f1b.schedule.simulator import Span, Timeline, peak_bytes
from cuboid.seq1f1b.schedule.timeline_trace import rank_label

#: Shades of each operation, in turn for the micro-batches. Blue and orange are distinguishable with any colour vision,
#: and dark text is legible on each shade.
_SHADES: dict[Op, tuple[str, ...]] = {
    Op.FORWARD: ("#5B9BD5", "#9CC5EA", "#7BB0E0", "#C3DEF5"),
    Op.BACKWARD: ("#E8893B", "#F7C08F", "#F0A565", "#FBDCC0"),
    Op.INPUT_GRADIENT: ("#E8893B", "#F7C08F", "#F0A565", "#FBDCC0"),
    Op.WEIGHT_GRADIENT: ("#8CBF6A", "#C3E0AE", "#A7D08B", "#DDEFD0"),
    Op.HEAD_FORWARD: ("#B07CC6", "#D9BEE4", "#C49DD5", "#E9DAF0"),
    Op.HEAD_BACKWARD: ("#B07CC6", "#D9BEE4", "#C49DD5", "#E9DAF0"),
}
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRADIENT: "input gradient",
    Op.WEIGHT_GRADIENT: "weight gradient",
    Op.HEAD_FORWARD: "share of the head",
}
_MESSAGE, _TEXT, _MEMORY = "#444444", "#1A1A1A", "#B8B8B8"
#: Fractions of a lane's height: boxes alone, boxes with a memory curve below, messages, and the curve.
_LANE, _SHARED_LANE, _MESSAGE_LANE, _CURVE = 0.84, 0.56, 0.1, 0.28
#: In inches.
_WIDTH, _LANE_HEIGHT, _PANEL_HEIGHT = 13.0, 0.4, 0.85
_FONT_POINTS = 7.0
#: Width of a digit, as a fraction of the font size.
_DIGIT_WIDTH = 0.64
#: Share of the figure's width that the lanes take; the rest is for the numbers beside them.
_LANES_SHARE = 0.8


def draw_timeline(timeline: Timeline, path: str | Path, *, title: str = "", **options: Any) -> None:
    """Draw one timeline; see :func:`draw_timelines`."""
    draw_timelines([(title, timeline)], path, **options)


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | Path,
    *,
    caption: str = "",
    time_label: str | None = None,
    memory_label: Callable[[float], str] | None = None,
) -> None:
    """Draw timelines below one another on a common time axis, each starting at 0.

    Boxes are labelled ``micro-batch.segment`` where there is room. To the right of each lane are the rank's idle share,
    the maximum number of units in flight, and their peak memory if known. The memory over time is drawn below the
    boxes, with the same scale in all lanes of a timeline.

    Args:
        timelines: pairs of title and timeline.
        path: path of the picture; its suffix (.png, .svg or .pdf) selects the format.
        caption: text below the picture.
        time_label: label of the time axis, if times aren't in seconds.
        memory_label: formats an amount of memory, if amounts aren't in bytes.

    Raises:
        CuboidError: the format isn't supported.
    """
    path = Path(path)
    check_picture(path)
    # Imported here because the import takes a second, and only drawing needs it.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [len(timeline.spans) for _, timeline in timelines]
    height = sum(_PANEL_HEIGHT + _LANE_HEIGHT * count for count in lanes) + 0.6
    figure = Figure(figsize=(_WIDTH, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=[1 + n for n in lanes])[:, 0]
    longest_s = max(timeline.makespan_s for _, timeline in timelines) or 1.0
    factor, unit = (1.0, time_label) if time_label else _unit(longest_s)
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        _draw_panel(axes, timeline, longest_s * factor, factor)
        _add_numbers(axes, timeline, memory_label or format_bytes)
        axes.set_title(title, loc="left", fontsize="medium")
    panels[-1].set_xlabel(unit)
    _add_legend(figure, timelines, caption)
    # Without dates, and with a fixed salt for ids, the same picture is written as the same bytes.
    metadata = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    with matplotlib.rc_context({"svg.hashsalt": "cuboid"}):
        save_picture(figure, path, metadata)


def save_picture(figure: Any, path: Path, metadata: dict[str, None] | None = None) -> None:
    """Write matplotlib's figure into a file.

    Raises:
        CuboidError: it can't be written.
    """
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise CuboidError(f"{path}: can't be written: {error.strerror or error}") from None


def check_picture(path: Path) -> None:
    """Check that a file's suffix is a supported picture format.

    Raises:
        CuboidError: it isn't .png, .svg or .pdf; or it is a pipe, which drawing would wait for.
    """
    if path.is_fifo():
        raise CuboidError(f"{path}: can't be written: it is a pipe; name a file")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise CuboidError(f"pictures are written as .png, .svg or .pdf, not as {path.name!r}")


def _unit(longest_s: float) -> tuple[float, str]:
    return (1.0, "seconds") if longest_s >= 10 else (1e3, "milliseconds")


def _draw_panel(axes: Any, timeline: Timeline, width: float, factor: float) -> None:
    begin_s = min((spans[0].start_s for spans in timeline.spans if spans), default=0.0)
    points_per_unit = 72 * _WIDTH * _LANES_SHARE / width
    most = max(timeline.peak_bytes, default=0)
    with_memory = bool(timeline.memory) and most > 0
    height = _SHARED_LANE if with_memory else _LANE
    for lane, spans in enumerate(timeline.spans):
        boxes = [((span.start_s - begin_s) * factor, (span.end_s - span.start_s) * factor) for span in spans]
        _draw_lane(axes, lane - _LANE / 2, height, spans, boxes, points_per_unit)
        if with_memory:
            times = [(time_s - begin_s) * factor for time_s, _ in timeline.memory[lane]]
            floor = lane + _LANE / 2
            amounts = [floor - _CURVE * amount / most for _, amount in timeline.memory[lane]]
            # The y axis points down. Each amount lasts until the next time.
            axes.fill_between(times, floor, amounts, step="post", color=_MEMORY, linewidth=0)
    axes.set_xlim(0, width * 1.002)
    axes.set_ylim(len(timeline.spans) - 0.5, -0.5)
    labels = [f"stage {rank_label(spans, lane)}" for lane, spans in enumerate(timeline.spans)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_lane(
    axes: Any,
    top: float,
    height: float,
    spans: Sequence[Span],
    boxes: list[tuple[float, float]],
    points_per_unit: float,
) -> None:
    work = [(span, box) for span, box in zip(spans, boxes, strict=True) if span.action.op.computes]
    messages = [box for span, box in zip(spans, boxes, strict=True) if not span.action.op.computes]
    # Between boxes that are only a few points wide, lines of the usual width would hide the boxes.
    narrow = min((points_per_unit * width for _, (_, width) in work), default=0) < 3
    axes.broken_barh(
        [box for _, box in work],
        (top, height),
        facecolors=[_shade(span) for span, _ in work],
        edgecolor="white",
        linewidth=0.1 if narrow else 0.6,
    )
    axes.broken_barh(messages, (top + height - _MESSAGE_LANE, _MESSAGE_LANE), facecolor=_MESSAGE)
    for span, (left, width) in work:
        text = f"{span.action.micro_batch}.{span.action.segment}"
        points = points_per_unit * width
        upright = len(text) * _DIGIT_WIDTH * _FONT_POINTS < points
        if upright or points > _FONT_POINTS:
            rotation = "horizontal" if upright else "vertical"
            middle = (left + width / 2, top + height / 2)
            axes.text(*middle, text, ha="center", va="center", fontsize=_FONT_POINTS, color=_TEXT, rotation=rotation)


def _shade(span: Span) -> str:
    shades = _SHADES[span.action.op]
    return shades[span.action.micro_batch % len(shades)]


def _add_numbers(axes: Any, timeline: Timeline, memory_label: Callable[[float], str]) -> None:
    """Add the columns of numbers to the right of the lanes."""
    columns = [
        ("idle", [f"{bubble:.1%}" for bubble in timeline.bubbles]),
        ("in flight", [str(peak_bytes([s.action for s in spans], lambda _: 1)) for spans in timeline.spans]),
    ]
    if any(timeline.peak_bytes):
        columns.append(("memory", [memory_label(peak) for peak in timeline.peak_bytes]))
    position = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "center"}
    for number, (header, cells) in enumerate(columns):
        right = 48 + 56 * number
        for lane, cell in enumerate(cells):
            axes.annotate(cell, (1, lane), xytext=(right, 0), fontsize=8, **position)
        axes.annotate(header, (1, -0.5), xytext=(right, 8), fontsize=8, color="#666666", **position)


def _add_legend(figure: Any, timelines: Sequence[tuple[str, Timeline]], caption: str) -> None:
    from matplotlib.patches import Patch

    ops = {span.action.op for _, timeline in timelines for spans in timeline.spans for span in spans}
    handles = [Patch(color=_SHADES[op][0], label=name) for op, name in _NAMES.items() if op in ops]
    if any(not op.computes for op in ops):
        handles.append(Patch(color=_MESSAGE, label="message"))
    if any(timeline.memory for _, timeline in timelines):
        handles.append(Patch(color=_MEMORY, label="memory"))
    title = "; ".join(filter(None, (caption, "boxes: micro-batch.segment, a shade for each micro-batch")))
    figure.legend(
        handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize=8, title=title,
        title_fontsize=8,
    )  # fmt: skip


def format_bytes(number: float) -> str:
    """Format a number of bytes for people, such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB" if number < 1000 else f"{number / 1024:.3g} TiB"
