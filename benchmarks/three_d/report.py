"""The numbers as tables to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from three_d.results import YARDSTICK

#: Wide enough for all columns, whatever the terminal.
_WIDTH = 150
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {
    "colossalai_1d": "#CCBB44",
    "colossalai_3d": "#BBBBBB",
    "colossalai_3d_exchange": "#999999",
    "cuboid": "#4477AA",
    "cuboid_auto": "#66CCEE",
}


def print_tables(result: dict[str, Any]) -> None:
    """A table for each case: contestants by columns, figures by rows, ratios to Colossal-AI's 3-D in brackets."""
    console = Console(width=_WIDTH)
    for case in result["cases"]:
        console.print(_table(case))
        console.print(_note(case["rows"], result["repeats"]), markup=False, highlight=False)


def figures_of(row: dict[str, Any]) -> dict[str, float]:
    """What is compared, for the slowest or largest rank."""
    return {
        "forward + backward, s": row["step_s"]["median"],
        "sent for each rank, MiB": max(row["sent_bytes"]) / 2**20,
        "collectives": max(row["calls"]),
        "saved for backward, MiB": max(row["saved_bytes"]) / 2**20,
        "  by linear layers": max(row["saved_by_kind"]["linear_inputs"]) / 2**20,
        "  by others": max(row["saved_by_kind"]["other_activations"]) / 2**20,
        "  gathered weights": max(row["saved_by_kind"]["gathered_weights"]) / 2**20,
        "peak of live tensors, MiB": max(row["peak_bytes"]) / 2**20,
        "error, output": row["errors"]["output"],
        "error, input's gradient": row["errors"]["input"],
        "error, worst weight's gradient": max(
            error for name, error in row["errors"].items() if name not in ("output", "input")
        ),
    }


def _table(case: dict[str, Any]) -> Table:
    table = Table(title=case["title"], box=SIMPLE_HEAD, title_justify="left")
    table.add_column("slowest or largest of 8 ranks")
    base = figures_of(next(row for row in case["rows"] if row["key"] == YARDSTICK))
    columns = [figures_of(row) for row in case["rows"]]
    for row in case["rows"]:
        table.add_column(row["name"], justify="right")
    for figure, theirs in base.items():
        cells = [_cell(figure, column[figure], theirs) for column in columns]
        table.add_row(figure, *cells)
        if figure.startswith("forward"):
            table.add_row("  quartiles", *(_quartiles(row) for row in case["rows"]))
            table.add_row("  times as fast, paired", *(_speed(row) for row in case["rows"]))
    return table


def _cell(figure: str, value: float, theirs: float) -> str:
    if figure.startswith("error"):
        text = f"{value:.1e}"
    else:
        text = f"{value:.0f}" if figure == "collectives" else f"{value:.3g}"
    return f"{text} ({value / theirs:.2f})" if theirs else text


def _quartiles(row: dict[str, Any]) -> str:
    return f"{row['step_s']['low']:.3g}–{row['step_s']['high']:.3g}"


def _speed(row: dict[str, Any]) -> str:
    ratio = row["times_as_fast"]
    return "–" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _note(rows: list[dict[str, Any]], repeats: int) -> str:
    """How many steps the times rest on, and whether ours were counted right."""
    note = f"{repeats} steps each; {sum(row['rejected'] for row in rows)} disturbed ones were measured again"
    if any(row["undisturbed"] < repeats for row in rows):
        counts = ", ".join(f"{row['undisturbed']} of {row['name']}" for row in rows)
        note += f"; the machine was too busy for the others (undisturbed: {counts}): where that's 0, times say nothing"
    formula = [sum(row["formula_bytes"].values()) for row in rows if row["formula_bytes"] is not None]
    sent = " and ".join(f"{whole / 2**20:.3g}" for whole in formula)
    return f"{note}. By the formula Cuboid sends {sent} MiB. Brackets: ÷ Colossal-AI 3-D.\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars for time, bytes, saved activations and peak, a row of panels for each case."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = (
        "forward + backward, s",
        "sent for each rank, MiB",
        "saved for backward, MiB",
        "peak of live tensors, MiB",
    )
    cases = result["cases"]
    figure = Figure(figsize=(13, 2.6 * len(cases)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(cases), len(shown), squeeze=False)
    for panels, case in zip(grid, cases, strict=True):
        for axes, name in zip(panels, shown, strict=True):
            _draw_panel(axes, case["rows"], name)
        panels[0].set_title(case["title"], loc="left", fontsize=9)
        panels[0].set_yticks(range(len(case["rows"])), [row["name"] for row in case["rows"]], fontsize=8)
    with matplotlib.rc_context():
        figure.savefig(path, metadata={"Software": None})


def _draw_panel(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    for place, row in enumerate(rows):
        value, step = figures_of(row)[name], row["step_s"]
        spread = [[step["median"] - step["low"]], [step["high"] - step["median"]]] if "backward, s" in name else None
        axes.barh(place, value, xerr=spread, color=_COLOURS[row["key"]], height=0.7, capsize=2)
        axes.text(0, place, f" {value:.3g}", va="center", fontsize=8)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel(name)
    axes.spines[["top", "right"]].set_visible(False)
