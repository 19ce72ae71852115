"""The figures as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from loading_parts.results import remarks

MIB = 2**20
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_OURS, _OTHERS, _IDEAL = "#4477AA", "#BBBBBB", "#CC3311"

HEADER = [
    "way",
    "load, s",
    "÷ first",
    "peak of a rank",
    "÷ ranks",
    "sum of peaks",
    "÷ first",
    "PSS after",
    "file pages",
    "÷ ranks",
]


def print_table(result: dict[str, Any]) -> None:
    """A table for each number of ranks; MiB, beyond what a process has before."""
    for count in sorted({row["ranks"] for row in result["rows"]}):
        own = [row for row in result["rows"] if row["ranks"] == count]
        print(f"\n{count} ranks, {result['files_bytes'] / MIB:.0f} MiB of files (median, quartiles; MiB)")
        print(text_table([HEADER, *(cells(row) for row in own)]))
    for sentence in remarks(result):
        print(sentence)


def cells(row: dict[str, Any]) -> list[str]:
    """One way as text. "÷ ranks" is what would be ideal: an even part of the whole."""
    if not row["samples"]:
        return [row["name"], "left out", *["–"] * (len(HEADER) - 2)]
    ideal, files = (f"{row[key] / MIB:.0f}" for key in ("ideal_held_bytes", "ideal_file_bytes"))
    return [
        row["name"],
        _range(row["load_s"]),
        _range(row.get("ratio_time")),
        _mib(row["peak_bytes"]),
        ideal,
        _mib(row["peak_sum_bytes"]),
        _range(row.get("ratio_peak_sum")),
        _mib(row["proportional_sum_bytes"]),
        _mib(row["touched_bytes"]),
        files,
    ]


def _mib(numbers: dict[str, float]) -> str:
    return f"{numbers['median'] / MIB:.0f}"


def _range(numbers: dict[str, float] | None) -> str:
    return "1" if numbers is None else f"{numbers['median']:.2f} ({numbers['low']:.2f}–{numbers['high']:.2f})"


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of times and of the sum of peaks, a row of panels for each number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row["ranks"] for row in result["rows"]})
    figure = Figure(figsize=(11, 1 + 2.2 * len(counts)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(counts), 2, squeeze=False)
    for count, (times, memory) in zip(counts, panels, strict=True):
        own = [row for row in result["rows"] if row["ranks"] == count and row["samples"]]
        _bars(times, own, "load_s", 1.0)
        _bars(memory, own, "peak_sum_bytes", float(MIB))
        memory.axvline(sum(row["ideal_held_bytes"] for row in own[:1]) * count / MIB, color=_IDEAL, linewidth=1)
        times.set_title(f"{count} ranks", loc="left")
        times.set_xlabel("seconds")
        memory.set_xlabel("MiB, peaks of all ranks beyond what they have before; line: the model once")
        memory.set_yticklabels([])
    figure.savefig(path, metadata={"Software": None})


def _bars(axes: Any, own: list[dict[str, Any]], figure: str, unit: float) -> None:
    for place, row in enumerate(own):
        low, median, high = (row[figure][key] / unit for key in ("low", "median", "high"))
        colour = _OURS if row["name"].startswith("Cuboid") else _OTHERS
        axes.barh(place, median, xerr=[[median - low], [high - median]], color=colour, height=0.7, capsize=2)
    axes.set_yticks(range(len(own)), [row["name"] for row in own])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
