"""Draw docs/figures/checkpoints.png: how shards become files, and files shards of another layout.

Nothing is placed by hand: weights are cut by the layouts that Cuboid makes for a Llama, and files have the tensors that
its writers are assigned.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.models.sharded.parallel_plan import make_parallel_plan

BEFORE, AFTER = MeshShape(2, 2, 1), MeshShape(1, 1, 3)
#: As in the picture of the layout.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#44BB99")
CONFIG = LlamaConfig(
    vocab_size=600,
    hidden_size=192,
    intermediate_size=384,
    num_hidden_layers=1,
    num_attention_heads=12,
    num_key_value_heads=12,
    tie_word_embeddings=False,
)
#: Shown of the model, top down, and how they are called.
SHOWN = {
    "model.embed_tokens.weight": "embed_tokens",
    "model.layers.0.self_attn.q_proj.weight": "q_proj",
    "model.layers.0.mlp.up_proj.weight": "up_proj",
    "model.layers.0.mlp.down_proj.weight": "down_proj",
    "lm_head.weight": "lm_head",
}
GAP = 90


def draw(folder: Path) -> None:
    """Draw the picture."""
    matplotlib.rcParams["font.size"] = 9
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    writers = dict(zip(shapes, assign(sizes, range(BEFORE.size)), strict=True))

    figure, panels = plt.subplots(1, 3, figsize=(10, 5.4), dpi=150, layout="constrained")
    _draw_shards(panels[0], model, BEFORE, shapes)
    panels[0].set_title(f"in training on a mesh of {BEFORE}\neach rank (a colour) has its slices")
    _draw_files(panels[1], shapes, writers)
    panels[1].set_title("in the checkpoint: whole tensors\neach rank writes a file of its own")
    _draw_shards(panels[2], model, AFTER, shapes)
    panels[2].set_title(f"resumed on a mesh of {AFTER}\neach rank reads its slices only")
    for panel, arrow in ((panels[0], "gather, a tensor\nfor each rank at a time"), (panels[1], "read")):
        panel.annotate("", (1.12, 0.5), (0.98, 0.5), xycoords="axes fraction", arrowprops={"arrowstyle": "-|>"})
        panel.annotate(arrow, (1.05, 0.53), xycoords="axes fraction", ha="center", fontsize="x-small")
    figure.savefig(folder / "checkpoints.png")


def _draw_shards(panel: Axes, model: LlamaForCausalLM, mesh: MeshShape, shapes: dict[str, tuple[int, ...]]) -> None:
    layouts = make_parallel_plan(model, mesh).by_parameter
    topology, top = Topology(mesh, mesh.size), 0
    for name, label in SHOWN.items():
        for rank in range(mesh.size):
            rows, columns = layouts[name].shard_intervals(mesh, topology.coordinate(rank))
            for (low, high), (left, right) in product(rows, columns):
                place = (left, top + low)
                panel.add_patch(_box(place, right - left, high - low, COLOURS[rank]))
        _name(panel, label, top, shapes[name])
        top += shapes[name][0] + GAP
    _frame(panel, top)


def _draw_files(panel: Axes, shapes: dict[str, tuple[int, ...]], writers: dict[str, int]) -> None:
    top = 0
    for name, label in SHOWN.items():
        writer = writers[name]
        panel.add_patch(_box((0, top), shapes[name][1], shapes[name][0], COLOURS[writer]))
        file = f"model-{writer + 1:05d}-of-{BEFORE.size:05d}"
        panel.text(CONFIG.intermediate_size + 30, top + shapes[name][0] / 2, file, va="center", fontsize="x-small")
        _name(panel, label, top, shapes[name])
        top += shapes[name][0] + GAP
    _frame(panel, top)


def _box(place: tuple[float, float], width: float, height: float, colour: str) -> Rectangle:
    return Rectangle(place, width, height, facecolor=colour, edgecolor="black", linewidth=0.4)


def _name(panel: Axes, label: str, top: float, shape: tuple[int, ...]) -> None:
    panel.text(0, top - 12, f"{label}  {list(shape)}", fontsize="x-small", va="bottom")


def _frame(panel: Axes, bottom: float) -> None:
    panel.set_xlim(-20, CONFIG.intermediate_size + 420)
    panel.set_ylim(bottom, -GAP)
    panel.axis("off")
