"""Bars with their spread, as all pictures of measurements have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Paul Tol's "bright" scheme, told apart with any colour vision.
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE = "#4477AA", "#66CCEE", "#228833", "#CCBB44", "#CC3311", "#AA3377"
GREY, DARK_GREY = "#BBBBBB", "#999999"


def panels(width: float, height: float, lines: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and a grid of axes in it."""
    # Here, for only who draws needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False)


def bar(axes: Any, place: int, numbers: dict[str, float], colour: str, *, unit: float = 1.0, **more: Any) -> None:
    """A median with its quartiles, in units."""
    low, median, high = (numbers[key] / unit for key in ("low", "median", "high"))
    more = {"height": 0.7, **more}
    axes.barh(place, median, xerr=[[median - low], [high - median]], color=colour, capsize=2, **more)


def ticks(axes: Any, values: Sequence[float | None], colour: str, label: str, size: float) -> None:
    """A mark beside each bar, from above; none where a value isn't known."""
    if None not in values:
        axes.plot(values, range(len(values)), "|", color=colour, markersize=size, markeredgewidth=2, label=label)


def finish(axes: Any, names: Sequence[str], label: str, *, fontsize: int | None = None) -> None:
    """Names of the bars, from above, and what they measure."""
    axes.set_yticks(range(len(names)), names, **({} if fontsize is None else {"fontsize": fontsize}))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """As PNG, the same file for the same picture."""
    figure.savefig(path, metadata={"Software": None})
