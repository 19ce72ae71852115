"""The numbers as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from results import YARDSTICKS

from cuboid.seq1f1b.schedule.timeline_picture import format_bytes

_TITLES = {"torch": "÷ torch", "deepspeed": "÷ DeepSpeed", "own_1f1b": "÷ own k=1"}
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {"torch": "#BBBBBB", "deepspeed": "#999999", "flops": "#4477AA", "even": "#66CCEE"}


def header() -> list[str]:
    """Of :func:`cells`."""
    bubbles = ["bubble", "traced", "simulated", "theory"]
    return ["contestant", "step, s", *_TITLES.values(), "simulated", "theory", *bubbles, "peak, stage 0", "stage 1"]


def cells(row: dict[str, Any]) -> list[str]:
    """One row of numbers as text. Ratios say how many times as fast it is."""
    step = row["step_s"]
    ratios = [_range(row["ratios"].get(key)) for key in YARDSTICKS]
    traced = row["bubble_traced"]
    return [
        row["name"],
        _range(step),
        *ratios,
        f"{row['ratio_simulated']:.2f}",
        f"{row['ratio_theory']:.2f}",
        f"{row['bubble']:.1%}",
        "–" if traced is None else f"{traced:.1%}",
        f"{row['bubble_simulated']:.1%}",
        f"{row['bubble_theory']:.1%}",
        *map(format_bytes, row["peak_bytes"]),
    ]


def _range(numbers: dict[str, float] | None) -> str:
    return "–" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def text_table(table: list[list[str]]) -> str:
    """Columns under one another."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join(line.rstrip() for line in lines)


def print_tables(result: dict[str, Any]) -> None:
    """A table for each number of micro-batches."""
    for count in sorted({row["micro_batches"] for row in result["rows"]}):
        own = [row for row in result["rows"] if row["micro_batches"] == count]
        print(f"\nM = {count} micro-batches, {len(own[0]['peak_bytes'])} stages (median, quartiles)")
        print(text_table([header(), *map(cells, own)]))
        print(note_of_noise(own, result["repeats"]))
    print(f"\nPeak of live activations, M = {result['memory'][0]['micro_batches']} micro-batches")
    print(text_table([memory_header(result), *(memory_cells(row, result) for row in result["memory"])]))


def memory_header(result: dict[str, Any]) -> list[str]:
    """Of :func:`memory_cells`."""
    stages = range(len(result["memory"][0]["peak_bytes"]))
    return ["contestant", *(f"stage {stage}" for stage in stages), "largest", "÷ own k=1", "theory"]


def memory_cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One row of peaks as text, and the largest of them beside that of whole sequences."""
    whole = next((other for other in result["memory"] if other["kind"] == "cuboid" and other["segments"] == 1), row)
    peak, share = max(row["peak_bytes"]), max(row["sequences_in_flight"]) / max(whole["sequences_in_flight"])
    relative = f"{peak / max(whole['peak_bytes']):.2f}"
    return [row["name"], *map(format_bytes, row["peak_bytes"]), format_bytes(peak), relative, f"{share:.2f}"]


def note_of_noise(own: list[dict[str, Any]], repeats: int) -> str:
    """How many steps the numbers rest on."""
    least, rejected = min(row["undisturbed"] for row in own), sum(row["rejected"] for row in own)
    note = f"{repeats} steps each; {rejected} disturbed ones were measured again"
    return note if least >= repeats else f"{note}; the machine was too busy for all: don't trust the times"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of step times with their quartiles, a panel for each number of micro-batches, and what was simulated."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row["micro_batches"] for row in result["rows"]})
    figure = Figure(figsize=(12, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(counts), squeeze=False)[0]
    for axes, count in zip(panels, counts, strict=True):
        _draw_panel(axes, [row for row in result["rows"] if row["micro_batches"] == count])
        axes.set_title(f"M = {count}", loc="left")
    for axes in panels[1:]:
        axes.set_yticklabels([])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    with matplotlib.rc_context():
        figure.savefig(path, metadata={"Software": None})


def _draw_panel(axes: Any, own: list[dict[str, Any]]) -> None:
    base = next((row for row in own if row["kind"] == "cuboid" and row["segments"] == 1), own[0])
    for place, row in enumerate(own):
        step = row["step_s"]
        kind = row["partition"] if row["kind"] == "cuboid" else row["kind"]
        errors = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        axes.barh(place, step["median"], xerr=errors, color=_COLOURS[kind], height=0.7, capsize=2)
        share = row["bubble"]
        axes.text(0.01 * base["step_s"]["median"], place, f"bubble {share:.1%}", va="center", fontsize=8)
    expected = [base["step_s"]["median"] / row["ratio_simulated"] for row in own]
    axes.plot(expected, range(len(own)), "|", color="#CC3311", markersize=13, label="simulated, from Cuboid's k=1")
    axes.set_yticks(range(len(own)), [row["name"] for row in own], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds for a step")
    axes.spines[["top", "right"]].set_visible(False)
