"""Bars with their spread, as all pictures of measurements have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Paul Tol's "bright" scheme, told apart with any colour vision.
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE = "#4477AA", "#66CCEE", "#228833", "#CCBB44", "#CC3311", "#AA3377"
GREY, DARK_GREY, BLACK = "#BBBBBB", "#999999", "#000000"


class Bar(NamedTuple):
    """One bar."""

    name: str  # beside it
    parts: Sequence[tuple[float, str, str]]  # from the left: width, colour, name in the legend, which may be ""
    spread: tuple[float, float] | None = None  # quartiles of the whole
    text: str = ""  # on it

    @classmethod
    def of(cls, name: str, numbers: dict[str, float], colour: str, text: str = "") -> Bar:
        """A median with its quartiles."""
        return cls(name, [(numbers["median"], colour, "")], (numbers["low"], numbers["high"]), text)


class Panel(NamedTuple):
    """Bars from above, with marks beside those whose values are known."""

    label: str  # what they measure
    bars: Sequence[Bar]
    marks: Mapping[str, Sequence[float | None]] = {}
    title: str = ""


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Panels below one another as PNG, the same file for the same picture."""
    # Here, for only who draws needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.3 + 0.4 * len(panel.bars) for panel in panels]
    figure = Figure(figsize=(9, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
    for (axes,), panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    if labels:
        by_label = dict(zip(labels, handles, strict=True))
        figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Software": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    for place, bar in enumerate(panel.bars):
        left = 0.0
        for width, colour, label in bar.parts:
            axes.barh(place, width, left=left, height=0.7, color=colour, label=label or None)
            left += width
        if bar.spread is not None:
            low, high = bar.spread
            axes.errorbar(left, place, xerr=[[left - low], [high - left]], color=BLACK, capsize=2)
        axes.text(0, place, f" {bar.text}", va="center", fontsize=8)
    for (label, values), colour in zip(panel.marks.items(), (RED, GREEN), strict=False):
        there = [(value, place) for place, value in enumerate(values) if value is not None]
        if there:
            axes.plot(*zip(*there, strict=True), "|", color=colour, markersize=13, markeredgewidth=2, label=label)
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(panel.label)
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
