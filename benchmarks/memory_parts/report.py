"""The numbers as a table to read, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import text_table

from memory_parts.results import remarks

MIB = 2**20
HEADER = ["", "kept, MiB", "formula", "× ranks ÷ plain", "÷ one rank", "peak, MiB", "× ranks ÷ plain", "÷ one rank"]
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {
    "layers' linear_inputs": ("inputs of linear layers", "#4477AA"),
    "layers' attention": ("attention", "#66CCEE"),
    "layers' norms": ("norms", "#228833"),
    "layers' nonlinearity": ("inside the MLP", "#CCBB44"),
    "ends": ("embedding, head, loss", "#AA3377"),
}


def print_table(result: dict[str, Any]) -> None:
    """Every mesh with what its fullest rank keeps."""
    print(f"\nActivations of a rank, of {result['ranks']} (MiB; 1.00 is an even part of one process's)")
    print(text_table([HEADER, *(cells(row) for row in result["rows"])]))
    for sentence in remarks(result):
        print(sentence)


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    formula = row["formula_total_bytes"]
    return [
        row["name"],
        f"{row['kept_bytes'] / MIB:.2f}",
        "–" if formula is None else f"{formula / MIB:.2f}",
        f"{row['kept_share_of_plain']:.2f}",
        f"{row['kept_share_of_alone']:.2f}",
        f"{row['peak_bytes'] / MIB:.2f}",
        f"{row['peak_share_of_plain']:.2f}",
        f"{row['peak_share_of_alone']:.2f}",
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """For each mesh the parts of what is kept, by the formula, and marks of what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = [row for row in result["rows"] if row["ranks"] > 1]
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(table)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(table):
        left = 0.0
        for key, (label, colour) in _COLOURS.items():
            size = _part(row["formula_bytes"], key) / MIB
            axes.barh(place, size, left=left, color=colour, height=0.65, label=label if place == 0 else None)
            left += size
    for key, label, mark in (("kept_bytes", "kept, measured", "|"), ("peak_bytes", "peak, measured", "x")):
        sizes = [row[key] / MIB for row in table]
        axes.plot(sizes, range(len(table)), mark, color="#000000", markersize=12, label=label)
    even = result["rows"][0]["kept_bytes"] / result["ranks"] / MIB
    axes.axvline(even, color="#CC3311", linewidth=1, label="plain transformers ÷ ranks, kept")
    axes.set_yticks(range(len(table)), [row["name"] for row in table])
    axes.invert_yaxis()
    axes.set_xlabel("MiB of activations on the fullest rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncol=3, frameon=False)
    figure.savefig(path, metadata={"Software": None})


def _part(formula: dict[str, int], key: str) -> int:
    if key != "ends":
        return formula[key]
    return sum(size for name, size in formula.items() if name not in _COLOURS)
