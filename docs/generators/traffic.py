"""Write the tables of docs/traffic.md and draw docs/figures/traffic.png: bytes of one Llama layer on 64 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.models.sharded.parallel_plan import MeshRules
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from generators.marked import table

RANKS, LENGTH, BATCHES = 64, 4096, (1, 8, 64)
TABLE_BATCH = 64
TABLE_MESHES = ("1x64x1", "64x1x1", "4x4x4", "8x4x2", "32x2x1")
CHART_MESHES = ("1x64x1", "1x16x4", "1x8x8", "4x4x4", "8x4x2", "32x2x1", "64x1x1")
NAMES = {"1x64x1": "Megatron TP+SP", "64x1x1": "FSDP/ZeRO-3", "4x4x4": "cube"}
#: Paul Tol's "bright" scheme, told apart with any colour vision.
COLOURS = {"batch": "#4477AA", "batch+sequence": "#AA3377", "sequence": "#EE6677", "hidden": "#CCBB44"}
GIB = 2**30


@cache
def llama() -> LlamaForCausalLM:
    """One layer of Llama 3 70B, without memory."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=128256, **sizes))


@cache
def described() -> ModelDescription:
    """Its sizes."""
    return describe_modules(llama())


def counted(mesh: MeshShape, batch: int) -> dict[str, float]:
    """GiB that one rank sends in forward and backward of the layer, by axes."""
    sent_bytes = layer_bytes(block_sizes(described(), mesh), mesh, batch, LENGTH)
    return {axes: sent / GIB for axes, sent in sent_bytes.items()}


def total(mesh: MeshShape, batch: int) -> float:
    """GiB over all axes."""
    return sum(counted(mesh, batch).values())


def by_axis() -> str:
    """Table of the five meshes, by axis."""
    rows = []
    for text in TABLE_MESHES:
        mesh = MeshShape.parse(text)
        sent = counted(mesh, TABLE_BATCH)
        cells = [_cell(sent.get(axes, 0.0)) for axes in COLOURS]
        rows.append([_title(text), *cells, f"**{total(mesh, TABLE_BATCH):.3f}**"])
    return table(["mesh", *COLOURS, "all"], rows, "lrrrrr")


def best() -> str:
    """Table of the best mesh for each batch, beside the named ones."""
    named = [MeshShape.parse(text) for text in NAMES]
    rows = []
    for batch in BATCHES:
        fitting = [mesh for mesh in MeshRules(llama()).fitting(RANKS) if batch % mesh.batch == 0]
        mesh = min(fitting, key=lambda mesh: total(mesh, batch))
        cells = [f"{total(other, batch):.2f}" if other in fitting else "–" for other in named]
        rows.append([str(batch), str(mesh), f"**{total(mesh, batch):.2f}**", *cells])
    return table(["B", "best mesh", "GiB", *map(_title, NAMES)], rows, "rlrrrr")


def _cell(sent: float) -> str:
    if sent == 0:
        return "–"
    return f"{sent:.3f}" if sent >= 0.0005 else "< 0.001"


def _title(text: str) -> str:
    mesh = str(MeshShape.parse(text))
    return f"{mesh} ({NAMES[text]})" if text in NAMES else mesh


def chart() -> plt.Figure:
    """Bars by mesh, stacked by axis, one panel for each batch."""
    figure, panels = plt.subplots(1, len(BATCHES), figsize=(13, 4.6), sharey=True, layout="constrained")
    for axes, batch in zip(panels, BATCHES, strict=True):
        _draw_panel(axes, batch)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside lower center", ncol=len(COLOURS), frameon=False, title="axes")
    return figure


def _draw_panel(axes: Axes, batch: int) -> None:
    meshes = [MeshShape.parse(text) for text in CHART_MESHES]
    fitting = [mesh for mesh in meshes if batch % mesh.batch == 0]
    longest = max(total(mesh, batch) for mesh in fitting)
    for row, mesh in enumerate(meshes):
        if mesh not in fitting:
            axes.text(0.01 * longest, row, "rows don't divide by b", va="center", color="#777777", fontsize=9)
            continue
        left, sent = 0.0, counted(mesh, batch)
        for name, colour in COLOURS.items():
            axes.barh(row, sent.get(name, 0.0), left=left, color=colour, height=0.65)
            left += sent.get(name, 0.0)
        axes.text(left + 0.015 * longest, row, f"{left:.2f}", va="center", fontsize=9)
    axes.set(xlim=(0, 1.17 * longest), xlabel="GiB sent per layer and rank", title=f"B = {batch}")
    axes.set_yticks(range(len(meshes)), [_title(text).replace(" (", "\n(") for text in CHART_MESHES])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def parts() -> dict[str, dict[str, str]]:
    """Tables of bytes by axis, and of the best mesh for each batch."""
    return {"traffic.md": {"by axis": by_axis(), "best": best()}}


def draw(folder: Path) -> None:
    """Draw the chart."""
    chart().savefig(folder / "traffic.png", dpi=110, metadata={"Software": None})
