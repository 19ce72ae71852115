"""Draw docs/figures/layout.svg and .png: which rank of a 2×2×2 mesh holds what.

Nothing is placed by hand: parameters are coloured by the sharding specs that Cuboid makes for a Llama, activations by
the same arithmetic, and ranks by the topology.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Polygon, Rectangle
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.distributed.topology import MeshShape, Topology
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.tensor3d.sharding.sharding_spec import Interval, ShardingSpec

MESH = MeshShape(2, 2, 2)
TOPOLOGY = Topology(MESH, MESH.size)
#: Paul Tol's "light" scheme: told apart with any colour vision, and dark text is legible on each.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#DDDDDD")
SIZE = 64

#: Activations as [batch, sequence, features]; see docs/layout.md.
RESIDUAL = ShardingSpec((SIZE,) * 3, (("batch",), ("sequence",), ("hidden",)))
INSIDE = ShardingSpec((SIZE,) * 3, (("batch",), (), ("sequence", "hidden")))
LOGITS = ShardingSpec((SIZE,) * 3, (("batch",), ("hidden",), ("sequence",)))

#: Title, dims, module and parameter of a Llama.
PARAMETERS = (
    ('"up" weight\nq, k, v, gate, up', "in", "out", "model.layers.0.mlp.up_proj", "weight"),
    ('"down" weight\no, down', "in", "out", "model.layers.0.mlp.down_proj", "weight"),
    ("embedding and LM head", "hidden", "vocabulary", "model.embed_tokens", "weight"),
    ("norm weight", "hidden", "", "model.layers.0.input_layernorm", "weight"),
)

#: Where the second half of the batch is drawn, as (right, up) of a cuboid of 1×1, and how thick a slab looks.
PULL, THICKNESS, GAP = (0.42, 1.3), (0.13, 0.1), 0.012

Box = tuple[Interval, ...]


def owned_boxes(spec: ShardingSpec) -> Iterator[tuple[int, tuple[tuple[float, float], ...]]]:
    """Each rank with the boxes that it owns, as fractions of every dim."""
    for rank in range(MESH.size):
        for box in product(*spec.shard_intervals(MESH, TOPOLOGY.coordinate(rank))):
            yield rank, tuple((low / size, high / size) for (low, high), size in zip(box, spec.shape, strict=True))


def llama_specs() -> dict[str, dict[str, ShardingSpec]]:
    """The sharding specs of a small Llama, by module and parameter."""
    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=SIZE, num_attention_heads=8, num_hidden_layers=1, vocab_size=SIZE
    )
    with torch.device("meta"):
        return make_parallel_plan(LlamaForCausalLM(config), MESH).specs


def shaded(colour: str, factor: float) -> tuple[float, ...]:
    """A colour darker (factor below 1) or lighter (above)."""
    return tuple(min(1.0, channel * factor) for channel in to_rgb(colour))


def draw_cuboid(axes: Axes, spec: ShardingSpec, x: float, y: float, feature: str) -> None:
    """An activation: features to the right, sequence downwards, batch into the page, cut apart along the batch."""
    # The far half first, and in each half from the bottom up, so that nearer faces cover farther ones.
    for rank, (batch, rows, columns) in sorted(
        owned_boxes(spec), key=lambda item: (-item[1][0][0], -item[1][1][0], item[1][2][0])
    ):
        slab = batch[0] / (batch[1] - batch[0])
        left, right = x + slab * PULL[0] + columns[0] + GAP, x + slab * PULL[0] + columns[1] - GAP
        top, bottom = y + slab * PULL[1] + 1 - rows[0] - GAP, y + slab * PULL[1] + 1 - rows[1] + GAP
        draw_cell(axes, rank, left, right, bottom, top)
    for corner_x, corner_y in ((0, 1 + THICKNESS[1] / 2), (1 + THICKNESS[0], THICKNESS[1])):
        start = (x + corner_x, y + corner_y)
        axes.plot(
            (start[0], start[0] + PULL[0]), (start[1], start[1] + PULL[1]), color="#888888", lw=0.9, ls=":", zorder=0
        )
    style: dict[str, Any] = {"fontsize": 10, "color": "#333333"}
    axes.text(x + 0.5, y - 0.06, f"{feature} →", ha="center", va="top", **style)
    axes.text(x - 0.06, y + 0.5, "← sequence", ha="right", va="center", rotation=90, **style)
    axes.text(x + 1.42, y + 0.78, "batch ↗", ha="left", va="center", **style)


def draw_cell(axes: Axes, rank: int, left: float, right: float, bottom: float, top: float) -> None:
    """One rank's part: front, top and right face."""
    colour, (dx, dy) = COLOURS[rank], THICKNESS
    faces = (
        ([(left, top), (right, top), (right + dx, top + dy), (left + dx, top + dy)], 1.12),
        ([(right, top), (right, bottom), (right + dx, bottom + dy), (right + dx, top + dy)], 0.82),
        ([(left, top), (right, top), (right, bottom), (left, bottom)], 1.0),
    )
    for corners, factor in faces:
        axes.add_patch(Polygon(corners, facecolor=shaded(colour, factor), edgecolor="white", lw=0.8))
    write_rank(axes, rank, (left + right) / 2, (bottom + top) / 2)


def write_rank(axes: Axes, rank: int, x: float, y: float) -> None:
    """The number of a rank in its cell."""
    axes.text(x, y, str(rank), ha="center", va="center", fontsize=13, fontweight="bold", color="#222222")


def draw_activations(axes: Axes) -> None:
    """Top row: what one layer and the head turn the residual stream into, and back."""
    places = ((INSIDE, 0.0, "heads or features"), (RESIDUAL, 3.4, "hidden"), (LOGITS, 6.8, "vocabulary"))
    titles = (
        "inside attention and MLP\neach rank: [B/b, S, features/(s·h)]",
        "residual stream\neach rank: [B/b, S/s, H/h]",
        "logits\neach rank: [B/b, S/h, V/s]",
    )
    for (spec, x, feature), title in zip(places, titles, strict=True):
        draw_cuboid(axes, spec, x, 0, feature)
        axes.text(x + 0.78, 2.82, title, ha="center", va="center", fontsize=11, linespacing=1.5)
    enter = "all-gather S over sequence,\nmultiply,\nreduce-scatter {} over hidden"
    leave = "all-gather features over hidden,\nmultiply,\nreduce-scatter S over sequence"
    draw_step(axes, 3.2, 1.75, 2.3, '"up"', enter.format("features"))
    draw_step(axes, 1.75, 3.2, 0.6, '"down"', leave)
    draw_step(axes, 5.2, 6.65, 2.3, "LM head", enter.format("S"))
    axes.set(xlim=(-0.3, 8.7), ylim=(-0.25, 3.05), aspect="equal")
    axes.axis("off")


def draw_step(axes: Axes, start: float, stop: float, y: float, name: str, text: str) -> None:
    """An arrow between two cuboids, its name above and what happens on the way below."""
    axes.annotate("", (stop, y), (start, y), arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": "#444444"})
    middle = (start + stop) / 2
    axes.text(middle, y + 0.05, name, ha="center", va="bottom", fontsize=11, color="#222222")
    axes.text(middle, y - 0.08, text, ha="center", va="top", fontsize=9, color="#333333", linespacing=1.4)


def draw_parameter(axes: Axes, spec: ShardingSpec, title: str, across: str, down: str) -> None:
    """A matrix with dim 0 downwards, or a vector as a strip, coloured by owner."""
    matrix = len(spec.shape) == 2
    for rank, box in owned_boxes(spec):
        (top, bottom), (left, right) = box if matrix else ((0.0, 0.25), box[0])
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=COLOURS[rank], edgecolor="white"))
        write_rank(axes, rank, (left + right) / 2, (top + bottom) / 2)
    axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=11, pad=8)
    if matrix:
        axes.set_xlabel(f"{across} →", fontsize=10, color="#333333")
        axes.set_ylabel(f"← {down}", fontsize=10, color="#333333")
    else:
        axes.text(0.5, 0.32, f"{across} →", ha="center", va="top", fontsize=10, color="#333333")
    axes.set_frame_on(False)


def picture() -> plt.Figure:
    """The whole picture."""
    figure = plt.figure(figsize=(13.4, 9.2), facecolor="white")
    draw_activations(figure.add_axes((0.01, 0.44, 0.98, 0.55)))
    specs = llama_specs()
    for column, (title, across, down, module, parameter) in enumerate(PARAMETERS):
        axes = figure.add_axes((0.06 + 0.235 * column, 0.125, 0.19, 0.24))
        draw_parameter(axes, specs[module][parameter], title, across, down)
    places = [TOPOLOGY.coordinate(rank) for rank in range(MESH.size)]
    names = [f"{rank}: {at.batch}, {at.sequence}, {at.hidden}" for rank, at in enumerate(places)]
    figure.legend(
        handles=[Patch(color=colour, label=name) for colour, name in zip(COLOURS, names, strict=True)],
        title="rank: place along batch, sequence, hidden",
        loc="lower center",
        ncol=MESH.size,
        frameon=False,
        fontsize=11,
        title_fontsize=11,
    )
    return figure


def draw(folder: Path) -> None:
    """Draw it in both formats."""
    # Without dates, versions and random ids, equal pictures are equal files.
    matplotlib.rcParams["svg.hashsalt"] = "cuboid"
    figure = picture()
    figure.savefig(folder / "layout.svg", metadata={"Date": None, "Creator": None})
    figure.savefig(folder / "layout.png", dpi=110, metadata={"Software": None})
