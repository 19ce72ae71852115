"""The meshes' numbers as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from network.layer_results import remarks

_MB = 1e6
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_BAR, _AUTO = "#BBBBBB", "#4477AA"


def print_table(result: dict[str, Any]) -> None:
    """Every mesh with its time, beside what the links allow and the paper says."""
    rate = result["rate_mbit"]
    links = "loopback" if rate is None else f"{rate:g} Mbit/s for each rank ({result['measured_mbit']:.2f} measured)"
    print(f"\nOne layer, forward and backward, {result['ranks']} ranks, {links} (median, quartiles)")
    print(text_table([header(result), *(cells(row, result) for row in result["rows"])]))
    for row in result["rows"]:
        for other, said in row["ratios_paper"].items():
            if other in row["ratios"]:
                print(f"{row['shape']} over {other}: {row['ratios'][other]['median']:.2f}, the paper says {said}")
    for sentence in remarks(result):
        print(sentence)


def header(result: dict[str, Any]) -> list[str]:
    """Of :func:`cells`."""
    compared = [name for row in result["rows"][:2] for name in (f"× {row['shape']}", "by bytes")]
    sent = ["MB sent", "on the link", "calls"]
    return ["mesh", "step, s", *compared, "link, s", "floor, s", *sent, "error"]


def cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One mesh as text. Ratios say how many times as fast it is."""
    compared = []
    for other in result["rows"][:2]:
        theory = row["ratios_theory"].get(other["shape"])
        compared += [_range(row["ratios"].get(other["shape"])), "–" if theory is None else f"{theory:.2f}"]
    excess = row["interface_excess"]
    return [
        f"{row['shape']} (auto)" if row["mesh"] == "auto" else row["shape"],
        _range(row["step_s"]),
        *compared,
        "–" if row["link_s"] is None else f"{row['link_s']:.2f}",
        _range(row["floor_s"]),
        f"{row['counted_bytes'] / _MB:.2f}",
        "–" if excess is None else f"{excess:+.1%}",
        str(sum(row["calls"].values())),
        f"{row['error']:.0e}",
    ]


def _range(numbers: dict[str, float] | None) -> str:
    return "–" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of step times with their quartiles, with what the links alone and the processors alone take."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = result["rows"]
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(table)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(table):
        step = row["step_s"]
        errors = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        colour = _AUTO if row["mesh"] == "auto" else _BAR
        axes.barh(place, step["median"], xerr=errors, color=colour, height=0.7, capsize=2)
    for key, label, colour in (("link_s", "bytes ÷ rate", "#CC3311"), ("floor_s", "links without limit", "#228833")):
        values = [row[key]["median"] if isinstance(row[key], dict) else row[key] for row in table]
        if None not in values:
            axes.plot(values, range(len(values)), "|", color=colour, markersize=16, markeredgewidth=2, label=label)
    axes.set_yticks(range(len(table)), [cells(row, result)[0] for row in table])
    axes.invert_yaxis()
    rate = result["rate_mbit"]
    links = "loopback" if rate is None else f"{rate:g} Mbit/s each"
    axes.set_xlabel(f"seconds for a layer's forward and backward, {result['ranks']} ranks, {links}")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})
