"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cuboid.integrations.run_report.schema import TrainReport


def draw(report: TrainReport, path: Path) -> None:
    """Plot train and held-out losses, and where the run was resumed, to a PNG; needs no display."""
    known = [(step, loss) for step, loss in enumerate(report.train_losses, start=1) if loss is not None]
    steps, losses = np.asarray(known, dtype=float).reshape(-1, 2).T
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="train, each step")
    window = max(1, len(losses) // 20)
    axes.plot(steps, smooth(losses, window), color="tab:blue", label=f"train, mean of the last {window} steps")
    points = [(point.step, point.loss) for point in report.heldout_losses if point.loss is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color="tab:orange", marker="o", label="held-out")
    for name in report.heldout_losses[-1].others if report.heldout_losses else ():
        points = [(point.step, point.others[name]) for point in report.heldout_losses if name in point.others]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    for number, step in enumerate(report.resumed_after):
        label = None if number else "resumed"
        axes.axvline(step + 0.5, color="tab:gray", linestyle=":", linewidth=1, label=label)
    tokens = report.speed.tokens
    axes.set_xlabel("optimizer steps" if tokens is None else f"optimizer steps (of {tokens // report.steps:,} tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(
        f"{report.parameters / 1e6:.1f} M parameters on {report.world_size} ranks, {report.layout}, {report.dtype}",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to ``window - 1`` before it, ``[n] -> [n]``."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - window, 0)
    return (total[stops] - total[starts]) / (stops - starts)
