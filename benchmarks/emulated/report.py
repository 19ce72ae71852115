"""The numbers as tables to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from cuboid.seq1f1b.schedule.timeline_picture import format_bytes
from emulated.numbers import EMULATED, remarks

#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {"torch": "#BBBBBB", "deepspeed": "#999999", "gpipe": "#CCBB44", "flops": "#4477AA", "even": "#66CCEE"}


def settings(result: dict[str, Any]) -> list[tuple[int, int]]:
    """Numbers of stages and of micro-batches, in the order in which they were measured."""
    return list(dict.fromkeys((row["stages"], row["micro_batches"]) for row in result["rows"]))


def rows_of(result: dict[str, Any], stages: int, micro_batches: int) -> list[dict[str, Any]]:
    """The contestants with these numbers."""
    return [row for row in result["rows"] if (row["stages"], row["micro_batches"]) == (stages, micro_batches)]


def print_tables(result: dict[str, Any]) -> None:
    """A table for each number of stages and of micro-batches."""
    rate = result["rate_mbit"]
    links = "loopback" if rate is None else f"{rate:g} Mbit/s for each rank ({result['measured_mbit']:.2f} measured)"
    for stages, micro_batches in settings(result):
        print(f"\n{stages} stages, M = {micro_batches} micro-batches, {links}; {EMULATED} (median, quartiles)")
        print(text_table([header(), *map(cells, rows_of(result, stages, micro_batches))]))
    print()
    for sentence in remarks(result):
        print(sentence)


def header() -> list[str]:
    """Of :func:`cells`."""
    ratios = ["÷ 1f1b", "simulated", "theory", "÷ torch", "÷ DeepSpeed"]
    return ["contestant", "step, s", "simulated", *ratios, "bubble", "simulated", "theory", "in flight", "would keep"]


def cells(row: dict[str, Any]) -> list[str]:
    """One row of numbers as text. Ratios say how many times as fast it is; the last two columns are of the stage that
    keeps the most."""
    own, torch, deepspeed = (_range(row["ratios"].get(key)) for key in ("own_1f1b", "torch", "deepspeed"))
    bubbles = [row["bubble"]["median"], row["bubble_simulated"], row["bubble_theory"]]
    return [
        row["name"],
        _range(row["step_s"]),
        f"{row['simulated_s']:.2f}",
        own,
        f"{row['ratio_simulated']:.2f}",
        f"{row['ratio_theory']:.2f}",
        torch,
        deepspeed,
        *(f"{bubble:.1%}" for bubble in bubbles),
        f"{max(row['sequences_in_flight']):.2f}",
        format_bytes(max(row["kept_bytes_estimated"])),
    ]


def _range(numbers: dict[str, float] | None) -> str:
    return "–" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of step times with their quartiles, a panel for each setting, with what was simulated."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = settings(result)
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(6.5 * columns, 1 + 3.8 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (stages, micro_batches) in zip(panels, shown, strict=False):
        _draw_panel(axes, rows_of(result, stages, micro_batches))
        axes.set_title(f"{stages} stages, M = {micro_batches}", loc="left")
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    rate = result["rate_mbit"]
    links = "loopback" if rate is None else f"links of {rate:g} Mbit/s"
    figure.suptitle(f"{EMULATED[0].upper()}{EMULATED[1:]}; {links}", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    figure.savefig(path, metadata={"Software": None})


def _draw_panel(axes: Any, own: list[dict[str, Any]]) -> None:
    longest_s = max(row["step_s"]["median"] for row in own)
    for place, row in enumerate(own):
        step = row["step_s"]
        errors = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        axes.barh(place, step["median"], xerr=errors, color=_COLOURS[_kind(row)], height=0.7, capsize=2)
        text = f"bubble {row['bubble']['median']:.1%}, theory {row['bubble_theory']:.1%}"
        axes.text(0.01 * longest_s, place, text, va="center", fontsize=8)
    simulated = [row["simulated_s"] for row in own]
    axes.plot(simulated, range(len(own)), "|", color="#CC3311", markersize=13, label="simulated")
    axes.set_yticks(range(len(own)), [row["name"] for row in own], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds for a step")
    axes.spines[["top", "right"]].set_visible(False)


def _kind(row: dict[str, Any]) -> str:
    if row["kind"] != "cuboid":
        return row["kind"]
    return "gpipe" if row["schedule"] == "gpipe" else row["partition"]
