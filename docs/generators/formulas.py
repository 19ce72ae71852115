"""Write the worked example of docs/formulas.md: what a rank holds, keeps and sends for one model on several meshes."""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.end_memory import end_kept_bytes, end_sent_bytes
from cuboid.planner.layer_memory import block_bytes, layer_kept_bytes, state_bytes
from cuboid.planner.model_formulas import block_sizes, end_sizes, kept_sizes
from generators.marked import table

#: One row of the micro-batch for each rank of the longest `batch` axis.
BATCH, LENGTH = 8, 4096
MESHES = ("1x1x1", "1x8x1", "8x1x1", "1x4x2", "2x2x2")
ORIGIN = Coordinate(0, 0, 0, 0, 0)
MIB, GIB = 2**20, 2**30


@cache
def llama() -> LlamaForCausalLM:
    """Llama 3 8B, without memory."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, vocab_size=128256, **sizes))


@cache
def described() -> ModelDescription:
    """Its sizes."""
    return describe_modules(llama())


def shapes() -> list[MeshShape]:
    """Of the table's rows."""
    return [MeshShape.parse(text) for text in MESHES]


def held() -> str:
    """Table of what a rank holds of the model itself, and of the largest weights that it gathers."""
    parameters = sum(parameter.numel() for parameter in llama().parameters())
    weights = {name: llama().get_parameter(f"{name}.weight") for name in ("model.layers.0.mlp.up_proj", "lm_head")}
    rows = []
    for mesh in shapes():
        states = state_bytes(parameters, mesh)
        up, head = (
            block_bytes((weight.shape[0], weight.shape[1]), kind, mesh, 2)
            for weight, kind in zip(weights.values(), ("up", "head"), strict=True)
        )
        gib = [f"{size / GIB:.2f}" for size in (*states.values(), sum(states.values()))]
        rows.append([str(mesh), *gib, f"{up / MIB:.1f}", f"{head / MIB:.1f}"])
    header = [
        "mesh",
        "parameters, GiB",
        "gradients",
        "optimizer",
        "together",
        "block of gate or up, MiB",
        "of the head",
    ]
    return table(header, rows, "l" + "r" * (len(header) - 1))


def kept() -> str:
    """Table of the activations that a rank keeps of one layer, and besides all layers."""
    rows = []
    for mesh in shapes():
        sizes = block_sizes(described(), mesh), kept_sizes(described(), mesh, ORIGIN)
        layer = layer_kept_bytes(*sizes, mesh, BATCH, LENGTH)
        ends = end_kept_bytes(end_sizes(described()), mesh, BATCH, LENGTH)
        total_bytes = llama().config.num_hidden_layers * sum(layer.values()) + sum(ends.values())
        mib = [f"{size / MIB:.1f}" for size in (*layer.values(), sum(layer.values()), sum(ends.values()))]
        rows.append([str(mesh), *mib, f"**{total_bytes / GIB:.2f}**"])
    header = ["mesh", "linear inputs, MiB", "attention", "norms", "nonlinearity", "one layer", "ends", "all, GiB"]
    return table(header, rows, "l" + "r" * (len(header) - 1))


def sent() -> str:
    """Table of what a rank sends for one layer, and besides all layers."""
    rows = []
    for mesh in shapes()[1:]:
        layer = layer_bytes(block_sizes(described(), mesh), mesh, BATCH, LENGTH)
        ends = end_sent_bytes(end_sizes(described()), mesh, BATCH, LENGTH)
        total_bytes = llama().config.num_hidden_layers * sum(layer.values()) + sum(ends.values())
        axes = [f"{layer.get(name, 0) / MIB:.1f}" for name in ("batch", "sequence", "hidden")]
        mib = [f"{sum(count.values()) / MIB:.1f}" for count in (layer, ends)]
        rows.append([str(mesh), *axes, *mib, f"**{total_bytes / GIB:.2f}**"])
    header = ["mesh", "layer: batch, MiB", "sequence", "hidden", "layer, all axes", "ends", "model, GiB"]
    return table(header, rows, "l" + "r" * (len(header) - 1))


def parts() -> dict[str, dict[str, str]]:
    """The three tables of the worked example."""
    return {"formulas.md": {"held": held(), "kept": kept(), "sent": sent()}}
