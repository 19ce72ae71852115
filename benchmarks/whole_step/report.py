"""The contestants' numbers as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from whole_step.entries import AUTO_KEY
from whole_step.results import comparisons, remarks

_MB = 1e6
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {"cuboid": "#66CCEE", "autotp": "#BBBBBB", "tp_plan": "#CCBB44", "fsdp2": "#AA3377"}
_AUTO = "#4477AA"


def print_table(result: dict[str, Any]) -> None:
    """Every contestant with its time, beside what the links allow, and how the automatic mesh does against each."""
    table, sizes = result["rows"], result["workload"]
    print(f"\nOne training step, {sizes['dtype']}, {result['ranks']} ranks, {links(result)} (median, quartiles)")
    print(text_table([header(), *(cells(row, table) for row in table)]))
    for one in comparisons(table):
        sent = "" if one["bytes"] is None else f", which sends {one['bytes']:.2f} times as much"
        print(f"The automatic mesh is {spread_text(one['ratio'])} times as fast as {one['what']}{sent}.")
    for sentence in remarks(result):
        print(sentence)


def links(result: dict[str, Any]) -> str:
    """The network in words."""
    rate = result["rate_mbit"]
    return "loopback" if rate is None else f"{rate:g} Mbit/s for each rank ({result['measured_mbit']:.2f} measured)"


def header() -> list[str]:
    """Of :func:`cells`."""
    sent = ["MB sent", "by bytes", "link, s", "floor, s"]
    return ["contestant", "step, s", "auto is × as fast", *sent, "CPU, s", "error"]


def cells(row: dict[str, Any], table: list[dict[str, Any]]) -> list[str]:
    """One contestant as text. *By bytes* is how many times as much it sends as the automatic mesh."""
    auto = next((other for other in table if other["key"] == AUTO_KEY), None)
    ratio = None if auto is None else auto["ratios"].get(row["key"])
    sent = None if auto is None else auto["ratios_bytes"].get(row["key"])
    return [
        row["name"],
        spread_text(row["step_s"]),
        spread_text(ratio),
        number_text(None if row["sent_bytes"] is None else row["sent_bytes"] / _MB),
        number_text(sent),
        number_text(row["link_s"]),
        spread_text(row["floor_s"]),
        number_text(row["computing_s"]),
        f"{row['error']:.0e}",
    ]


def number_text(value: float | None) -> str:
    """Two digits behind the point; a dash for what isn't known."""
    return "–" if value is None else f"{value:.2f}"


def spread_text(numbers: dict[str, float] | None) -> str:
    """Median and quartiles; a dash for what isn't known."""
    return "–" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of step times with their quartiles, with what the links alone and the processors alone take."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = result["rows"]
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(table)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(table):
        step = row["step_s"]
        errors = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        colour = _AUTO if row["key"] == AUTO_KEY else _COLOURS[row["family"]]
        axes.barh(place, step["median"], xerr=errors, color=colour, height=0.7, capsize=2)
    for key, label, colour in (("link_s", "bytes ÷ rate", "#CC3311"), ("floor_s", "links without limit", "#228833")):
        values = [row[key]["median"] if isinstance(row[key], dict) else row[key] for row in table]
        if None not in values:
            axes.plot(values, range(len(values)), "|", color=colour, markersize=14, markeredgewidth=2, label=label)
    axes.set_yticks(range(len(table)), [row["name"] for row in table])
    axes.invert_yaxis()
    rate = "loopback" if result["rate_mbit"] is None else f"{result['rate_mbit']:g} Mbit/s each"
    axes.set_xlabel(f"seconds for a training step, {result['workload']['dtype']}, {result['ranks']} ranks, {rate}")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Software": None})
