"""The numbers of hidden communication as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from network.hidden_rank import KINDS
from network.hidden_results import remarks

_MB = 1e6
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COMPUTING, _EXPOSED, _COMMUNICATION = "#BBBBBB", "#4477AA", "#CCBB44"
_BAR = 0.36


def print_table(result: dict[str, Any]) -> None:
    """Every mesh with its three times and what they make."""
    print(f"\n{title(result)} (median, quartiles)")
    print(text_table([header(), *map(cells, result["rows"])]))
    for sentence in remarks(result):
        print(sentence)


def title(result: dict[str, Any]) -> str:
    """What was measured."""
    layers = result["workload"]["layers"]
    what = "One layer" if layers == 1 else f"{layers} layers"
    links = "loopback" if result["network"] == "loopback" else "links as slow as computing"
    return f"{what}, forward and backward, {result['ranks']} ranks, {links}"


def header() -> list[str]:
    """Of :func:`cells`."""
    times = [f"{kind}, s" for kind in KINDS]
    return [
        "mesh",
        "Mbit/s",
        *times,
        "exposed",
        "waited",
        "÷ perfect",
        "÷ none",
        "÷ possible",
        "MB sent",
        "calls",
        "error",
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """One mesh as text."""
    return [
        f"{row['shape']} (auto)" if row["mesh"] == "auto" else row["shape"],
        "–" if row["rate_mbit"] is None else f"{row['rate_mbit']:.0f} ({row['measured_mbit']:.0f})",
        *(_range(row["seconds"][kind], 3) for kind in KINDS),
        _percent(row["exposed"]),
        _percent(row["waited"]),
        *(_range(row[key], 2) for key in ("to_perfect", "to_none", "to_possible")),
        f"{row['counted_bytes'] / _MB:.2f}",
        str(sum(row["calls"].values())),
        f"{row['error']:.0e}",
    ]


def _range(numbers: dict[str, float], digits: int) -> str:
    median, low, high = (f"{numbers[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


def _percent(numbers: dict[str, float]) -> str:
    return f"{numbers['median']:.0%} ({numbers['low']:.0%} – {numbers['high']:.0%})"


def draw(result: dict[str, Any], path: Path) -> None:
    """For each mesh the step, split into computing and what is exposed, above its communication alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = result["rows"]
    figure = Figure(figsize=(9, 1.4 + 0.75 * len(table)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(table):
        step, computing, alone = (row["seconds"][kind]["median"] for kind in KINDS)
        upper, lower = place - _BAR / 2, place + _BAR / 2
        names = ("computing", "exposed communication", "communication alone") if place == 0 else ("", "", "")
        axes.barh(upper, min(step, computing), height=_BAR, color=_COMPUTING, label=names[0])
        axes.barh(upper, max(step - computing, 0), _BAR, computing, color=_EXPOSED, label=names[1])
        axes.barh(lower, alone, height=_BAR, color=_COMMUNICATION, label=names[2])
        axes.text(step, upper, f" {row['exposed']['median']:.0%} exposed", va="center", fontsize=8)
    axes.set_yticks(range(len(table)), [cells(row)[0] for row in table])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"seconds; {title(result)[0].lower()}{title(result)[1:]}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Software": None})
