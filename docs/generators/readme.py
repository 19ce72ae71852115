"""Write the README's table of results, from the records that other pages show in full, and draw its figure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from training_step import comparisons

from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.simulator import Timeline, simulate
from generators import layout
from generators.marked import DOCS, table
from generators.measured import RECORDS

Row = dict[str, Any]

#: Of the figure: stages, micro-batches, and segments of the lower schedule.
STAGES, MICRO_BATCHES, SEGMENTS = 4, 2, 4
_SHADES = {Op.FORWARD: ("#5B9BD5", "#9CC5EA"), Op.BACKWARD: ("#E8893B", "#F7C08F")}
_CORES = "2 CPU cores"


def parts() -> dict[str, dict[str, str]]:
    """The table of results; each row links to the section with its setting and spread."""
    header = ["what", "compared with", "times as fast", "measured on"]
    lines = [*_pipelines(), _meshes(), *_training_steps(), _overhead(), _stage_on_gpu(), _fp8_on_gpu()]
    return {"../README.md": {"results": table(header, lines, "llrl")}}


def _pipelines() -> list[list[str]]:
    """A step beside 1F1B and the fastest of PyTorch's schedules."""
    lines = []
    for name, stages, micro_batches, section, where in (
        ("pipeline", 2, 2, "the-pipeline", f"{_CORES}, one for each stage"),
        ("pipeline_emulated", 16, 16, "many-stages-emulated-computing", f"{_CORES}; computing is emulated by sleeping"),
    ):
        rows = [
            row for row in _record(name)["rows"] if (row["stages"], row["micro_batches"]) == (stages, micro_batches)
        ]
        fastest = _fastest(row for row in rows if row["kind"] not in ("torch", "deepspeed"))
        torch = _fastest(row for row in rows if row["kind"] == "torch")
        ratio = torch["step_s"]["median"] / fastest["step_s"]["median"]
        lines.append(
            [
                f"[pipeline](docs/performance.md#{section}) of {stages} stages, {micro_batches} micro-batches: "
                f"`{fastest['schedule']}`, {fastest['segments']} segments",
                _lines(("PyTorch: 1F1B", f"its fastest: {torch['schedule']}")),
                _lines((f"{fastest['ratios']['torch']['median']:.2f}", f"{ratio:.2f}")),
                where,
            ]
        )
    return lines


def _meshes() -> list[str]:
    """A layer on the paper's cube."""
    record = _record("layer_meshes_64")
    (cube,) = (row for row in record["rows"] if row["shape"] == "4×4×4")
    return [
        "[one layer](docs/performance.md#the-meshes-over-links-of-a-set-rate) on 64 ranks: mesh 4×4×4",
        _lines(("1-D tensor parallelism: 1×64×1", "2-D: 1×8×8")),
        _lines(f"{cube['ratios'][shape]['median']:.2f}" for shape in ("1×64×1", "1×8×8")),
        _network(record),
    ]


def _training_steps() -> list[list[str]]:
    """A step on 8 ranks beside the fastest layouts of two peers, each in float32 and bfloat16."""
    lines = []
    for network in ("shaped", "loopback"):
        records = [_record(f"training_step_{network}_{dtype}") for dtype in ("float32", "bfloat16")]
        ratios: dict[str, list[float]] = {}
        for record in records:
            for peer in comparisons(record["rows"]):
                name = re.sub(r"^(DeepSpeed AutoTP|FSDP2).*", r"\1", peer["what"])
                if peer["against"] != "autotp-8" and name in ("DeepSpeed AutoTP", "FSDP2"):
                    ratios.setdefault(name, []).append(peer["ratio"]["median"])
        (auto,) = {row["shape"] for record in records for row in record["rows"] if row["key"] == "cuboid-auto"}
        lines.append(
            [
                f"[training step](docs/performance.md#a-training-step) on 8 ranks: mesh {auto}, float32 and bfloat16",
                _lines(f"{name}, its fastest layout" for name in ratios),
                _lines(_pair(both) for both in ratios.values()),
                _network(records[0]),
            ]
        )
    return lines


def _overhead() -> list[str]:
    """What a mesh of one rank costs beside DeepSpeed alone."""
    rows = [row for row in _record("overhead")["rows"] if row["name"].startswith("DeepSpeed")]
    return [
        "[training step](docs/performance.md#overhead) on one rank: mesh 1×1×1, float32 and bfloat16",
        "DeepSpeed alone",
        _pair(1 / row["ratio"]["median"] for row in rows),
        "1 CPU core",
    ]


def _stage_on_gpu() -> list[str]:
    """A stage on one GPU beside plain transformers with activation checkpointing, by the page of that run."""
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    kept = re.search(r"^\| 128k tokens \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    gpu = re.search(r"^\| GPU \| 1 × NVIDIA (\w+)", page, re.MULTILINE)
    assert kept is not None
    assert gpu is not None
    rows = re.findall(r"^\| 128k tokens, (.+?) \| ([\d,]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    speed, memory = ({name: float(row[at].replace(",", "")) for name, *row in rows} for at in (0, 1))
    ours, plain = "4 segments", "plain transformers"
    return [
        f"[one stage](docs/nccl.md#what-an-h100-has-shown), two layers of an 8B Llama, 128k tokens: {ours}<br>"
        "and attention kept",
        f"{plain}, checkpointing too ({memory[plain]:.0f} GiB of activations; here {memory[ours]:.0f})",
        f"{speed[ours] / speed[plain]:.2f}<br>{float(kept[1]):.2f}",
        f"1 {gpu[1]}, bfloat16",
    ]


def _fp8_on_gpu() -> list[str]:
    """Compiled layers in fp8 on one GPU beside plain transformers, by the page of that run."""
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    title = "## Compiled layers in fp8 on a mesh of one: two layers of an 8B Llama, 8k tokens"
    row = re.search(
        rf"{title}.*?^\| fp8 \| [\d,]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|$", page, re.MULTILINE | re.DOTALL
    )
    gpu = re.search(r"^\| GPU \| 1 × NVIDIA (\w+)", page, re.MULTILINE)
    assert row is not None
    assert gpu is not None
    return [
        "[fp8](docs/fp8.md) and compiled layers on one rank, two layers of an 8B Llama, 8k tokens",
        _lines(("plain transformers, layers compiled, in bf16", "torchao's fp8 in them")),
        _lines(f"{float(ratio):.2f}" for ratio in row.groups()),
        f"1 {gpu[1]}",
    ]


def _record(name: str) -> Row:
    record: Row = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _pair(ratios: Iterable[float]) -> str:
    """Of two dtypes, on one line."""
    return ",&nbsp;".join(f"{ratio:.2f}" for ratio in ratios)


def _lines(cells: Iterable[str]) -> str:
    """Several lines of one cell, such as peers, and beside them ratios."""
    return "<br>".join(cells)


def _fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row["step_s"]["median"])


def _network(record: Row) -> str:
    rate = record["rate_mbit"]
    return f"{_CORES}, " + ("loopback" if rate is None else f"{rate:g} Mbit/s for each rank")


def draw(folder: Path) -> None:
    """The figure: a layer's parts by rank, and two schedules on one axis of time."""
    matplotlib.rcParams["svg.hashsalt"] = "cuboid"
    figure = plt.figure(figsize=(13.4, 4.2), facecolor="white")
    _draw_layer(figure.add_axes((0.005, 0.0, 0.40, 0.87)))
    _draw_schedules(figure.add_axes((0.465, 0.11, 0.525, 0.76)))
    stages = f"A pipeline of {STAGES} stages: one training step, simulated"
    for x, title in ((0.012, "A mesh of 2×2×2: which rank holds what"), (0.452, stages)):
        figure.text(x, 0.93, title, fontsize=14, fontweight="bold", color="#222222")
    figure.savefig(folder / "overview.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _draw_layer(axes: Axes) -> None:
    """The residual stream, and a weight beside it."""
    layout.draw_cuboid(axes, layout.RESIDUAL, 0, 0, "hidden")
    axes.text(0.78, 2.72, "activations between layers", ha="center", fontsize=12, color="#222222")
    weight = layout.llama_specs()["model.layers.0.mlp.up_proj"]["weight"]
    left, bottom, side = 2.55, 0.35, 1.7
    for rank, ((top, low), (start, stop)) in layout.owned_boxes(weight):
        corner = (left + start * side, bottom + (1 - low) * side)
        size = ((stop - start) * side, (low - top) * side)
        axes.add_patch(Rectangle(corner, *size, facecolor=layout.COLOURS[rank], edgecolor="white"))
        layout.write_rank(axes, rank, corner[0] + size[0] / 2, corner[1] + size[1] / 2)
    axes.text(
        left + side / 2, 2.72, "a weight, its gradient, its Adam state", ha="center", fontsize=12, color="#222222"
    )
    axes.text(left + side / 2, bottom - 0.08, "in features →", ha="center", va="top", fontsize=10, color="#333333")
    axes.text(left - 0.08, bottom + side / 2, "← out features", ha="right", va="center", rotation=90, fontsize=10)
    axes.set(xlim=(-0.3, 4.5), ylim=(-0.35, 2.95), aspect="equal")
    axes.axis("off")


def _draw_schedules(axes: Axes) -> None:
    """1F1B above the same step in segments: equal work, whose backward takes twice as long as its forward."""
    for top, name, title, segments in (
        (0.0, "1f1b", "1F1B", 1),
        (STAGES + 1.6, "seq1f1b", f"Seq1F1B: each sequence in {SEGMENTS} segments", SEGMENTS),
    ):
        timeline = _simulate(name, segments)
        for lane, spans in enumerate(timeline.spans):
            axes.text(-0.12, top + lane, f"stage {lane}", ha="right", va="center", fontsize=10, color="#333333")
            for span in spans:
                shade = _SHADES[span.action.op][span.action.micro_batch]
                corner, width = (span.start_s, top + lane - 0.43), span.end_s - span.start_s
                axes.add_patch(Rectangle(corner, width, 0.86, facecolor=shade, edgecolor="white", lw=0.8))
        idle = f"{title} (idle {timeline.bubble:.0%})"
        axes.text(0, top - 0.75, idle, ha="left", va="center", fontsize=12, color="#222222")
    longest = _simulate("1f1b", 1).makespan_s
    bottom = 2 * STAGES + 1.6
    axes.annotate("", (longest, bottom), (0, bottom), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    axes.text(longest, bottom + 0.3, "time", ha="right", va="top", fontsize=10, color="#333333")
    handles = [
        Patch(color=shade, label=f"{op.name.lower()}, micro-batch {micro_batch}")
        for op, shades in _SHADES.items()
        for micro_batch, shade in enumerate(shades)
    ]
    axes.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.43, -0.16),
        ncol=4,
        frameon=False,
        fontsize=9,
        columnspacing=1.2,
    )
    axes.set(xlim=(-1.0, longest + 0.1), ylim=(bottom + 0.3, -1.2))
    axes.axis("off")


def _simulate(name: str, segments: int) -> Timeline:
    shape = PipelineShape(STAGES, MICRO_BATCHES, segments)

    def duration(action: Action) -> float:
        return (2 if action.op is Op.BACKWARD else 1) / segments

    return simulate(SCHEDULES[name](shape), shape, duration)
