"""The numbers of trainings with and without Cuboid, as rows, a table to read, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import text_table
from summary import is_quiet_round, spread, undisturbed_rounds

from one_process.measuring import Pair, Record, largest_differences

#: Operators of a profile that are told of.
_OPERATORS = 12
#: Paul Tol's "bright" scheme, told apart with any colour vision.
_COLOURS = {"float32": "#4477AA", "bfloat16": "#66CCEE"}


def row(pair: Pair) -> dict[str, Any]:
    """A pair's numbers; plain values only. The ratio says how many times as long a step with Cuboid takes."""
    rounds = list(zip(pair.plain.samples, pair.ours.samples, strict=True))
    quiet = undisturbed_rounds(rounds)
    return {
        "name": pair.ours.entry.name,
        "dtype": pair.ours.entry.dtype,
        "loss": {"plain": pair.plain.loss, "cuboid": pair.ours.loss},
        "loss_difference": pair.loss_difference,
        "gradient_difference": pair.gradient_difference,
        "plain_s": spread([plain.step_s for plain, _ in quiet]),
        "cuboid_s": spread([ours.step_s for _, ours in quiet]),
        "ratio": spread([ours.step_s / plain.step_s for plain, ours in quiet]),
        "ratio_processor": spread([ours.processor_s / plain.processor_s for plain, ours in quiet]),
        "ratio_theory": 1.0,
        "undisturbed": sum(map(is_quiet_round, rounds)),
        "rejected": pair.plain.rejected + pair.ours.rejected,
        "samples": {"plain": _samples(pair.plain), "cuboid": _samples(pair.ours)},
        "profile": [
            {"operator": name, "plain": asdict(plain), "cuboid": asdict(ours)}
            for name, plain, ours in largest_differences(pair, _OPERATORS)
        ],
    }


def _samples(record: Record) -> list[dict[str, Any]]:
    return [asdict(sample) for sample in record.samples]


def print_tables(result: dict[str, Any]) -> None:
    """Every pair, and where the time of each goes that was profiled."""
    print("\nA training step in one process, without Cuboid and with it (median, quartiles)")
    print(text_table([header(), *map(cells, result["rows"])]))
    for row in result["rows"]:
        if row["profile"]:
            print(f"\n{row['name']}, {row['dtype']}: what differs most, ms in a step by the profiler")
            print(
                text_table([["operator", "without", "with", "more", "calls", "with"], *map(_operator, row["profile"])])
            )
    for sentence in remarks(result):
        print(sentence)


def header() -> list[str]:
    """Of :func:`cells`."""
    times = ["without, s", "with, s", "overhead", "by processor time", "theory"]
    return ["training", "dtype", *times, "losses differ", "gradients differ"]


def cells(row: dict[str, Any]) -> list[str]:
    """One pair as text."""
    return [
        row["name"],
        row["dtype"],
        *(_range(row[key]) for key in ("plain_s", "cuboid_s")),
        *(_percent(row[key]) for key in ("ratio", "ratio_processor")),
        f"{row['ratio_theory'] - 1:.0%}",
        f"{row['loss_difference']:.0e}",
        f"{row['gradient_difference']:.0e}",
    ]


def _percent(ratio: dict[str, float]) -> str:
    """How much more it is."""
    median, low, high = (f"{ratio[key] - 1:+.1%}" for key in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _operator(line: dict[str, Any]) -> list[str]:
    plain, ours = line["plain"], line["cuboid"]
    times = [plain["seconds"], ours["seconds"]]
    more = f"{(times[1] - times[0]) * 1e3:+.2f}"
    return [line["operator"], *(f"{s * 1e3:.2f}" for s in times), more, f"{plain['calls']:.0f}", f"{ours['calls']:.0f}"]


def _range(numbers: dict[str, float]) -> str:
    return f"{numbers['median']:.3f} ({numbers['low']:.3f}–{numbers['high']:.3f})"


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    said = []
    if result["core"] is None:
        said.append("Processes can't be kept on a core here, so nobody knows what others took of it.")
    if min(row["undisturbed"] for row in result["rows"]) < result["repeats"]:
        rejected = sum(row["rejected"] for row in result["rows"])
        said.append(
            f"Other processes took more than {result['quiet_below']:.0%} of the core during some of the "
            f"{result['repeats']} rounds ({rejected} steps were measured again): don't trust the times."
        )
    return said


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the overhead, with quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = result["rows"]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(table)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(table):
        low, median, high = ((row["ratio"][key] - 1) * 100 for key in ("low", "median", "high"))
        errors = [[median - low], [high - median]]
        axes.barh(place, median, xerr=errors, color=_COLOURS[row["dtype"]], height=0.6, capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(table)), [f"{row['name']}, {row['dtype']}" for row in table])
    axes.invert_yaxis()
    axes.set_xlabel("overhead of a training step with Cuboid on 1×1×1, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
