"""An unmodified GPT-2 block through ``cuboid.shard``, and the closed count of what it sends."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

import cuboid
from cuboid.distributed.comm_counter import Operation, axes_label, sent_bytes
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis, MeshShape
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.mesh_search import block_sizes, choose_mesh
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import Interval, ShardingSpec
from three_d.gpt2 import Case, Place
from three_d.sides import Side

_ELEMENT_BYTES = 4


def cube(depth: int) -> MeshShape:
    """The mesh that Colossal-AI's layers have."""
    return MeshShape(depth, depth, depth)


def chosen_mesh(case: Case, ranks: int) -> MeshShape:
    """What ``"mesh": "auto"`` takes for the model and its rows."""
    section = {"mode": "3d_tensor", "mesh": "auto", "size": ranks}
    source = {"tensor_parallel": section, "train_micro_batch_size_per_gpu": case.batch}
    return choose_mesh(case.model(), cuboid.parse_config(source))


def build_ours(case: Case, shape: MeshShape | None = None) -> Side:
    """The case's part with its weights, on a mesh or the one that is chosen for it. All ranks must call."""
    shape = chosen_mesh(case, dist.get_world_size()) if shape is None else shape
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    model = cuboid.shard(case.model(), {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})
    mesh = cuboid.mesh_of(model)
    mesh.connect()
    part = model.get_submodule(case.path)
    parameters: dict[str, tuple[nn.Parameter, Place]] = {}
    gathered: set[tuple[int, ...]] = set()
    for path, layer in part.named_modules():
        for name in layer.sharded_params if isinstance(layer, ShardedModule) else ():
            parameters[f"{path}.{name}"] = layer.get_parameter(name), _place(layer.layout(name), mesh)
            gathered.add(layer.layout(name).block_shape(mesh.shape))

    def take_count() -> dict[str, int]:
        counted = mesh.comm_counter.snapshot()
        mesh.comm_counter.reset()
        return counted

    return Side(
        case,
        part,
        _activation(case, mesh),
        parameters,
        linear=(ShardedLinear,),
        gathered=gathered,
        sent_bytes=take_count,
    )


def _activation(case: Case, mesh: Mesh) -> Place:
    """The residual stream, which is cut as a parameter of its shape would be."""
    layout = ShardingSpec((case.batch, case.length, case.hidden), (("batch",), ("sequence",), ("hidden",)))
    return _place(layout, mesh)


def _place(layout: ShardingSpec, mesh: Mesh) -> Place:
    return tuple(_indices(each) for each in layout.shard_intervals(mesh.shape, mesh.coordinate))


def _indices(intervals: list[Interval]) -> torch.Tensor:
    return torch.cat([torch.arange(low, high) for low, high in intervals])


def formula_bytes(case: Case, mesh: MeshShape) -> dict[str, int]:
    """What a rank sends in forward and backward by the closed count, by mesh axes; docs/traffic.md derives it."""
    if case.part == "mlp":
        return _mlp_bytes(case, mesh)
    sizes = block_sizes(case.model(), mesh)
    return layer_bytes(sizes, mesh, case.batch, case.length, element_bytes=_ELEMENT_BYTES)


def _mlp_bytes(case: Case, mesh: MeshShape) -> dict[str, int]:
    inner = 4 * case.hidden
    residual = case.batch // mesh.batch * case.length * case.hidden // mesh.hidden * _ELEMENT_BYTES
    widened = case.batch // mesh.batch * case.length * inner // mesh.sequence * _ELEMENT_BYTES
    weight = case.hidden * inner // (mesh.sequence * mesh.hidden) * _ELEMENT_BYTES
    biases = (inner // (mesh.sequence * mesh.hidden) * _ELEMENT_BYTES, case.hidden // mesh.hidden * _ELEMENT_BYTES)
    calls: list[tuple[Operation, tuple[Axis, ...], int, int]] = [
        # Entrance, again in backward, and its transpose; exit and its transpose.
        ("all_gather", ("sequence",), residual, 5),
        # Behind "up" and the transpose; before "down", again in backward, and the transpose.
        ("all_gather", ("hidden",), widened, 5),
        # Two weights: forward, backward, and the gradient's reduce-scatter, which sends as much.
        ("all_gather", ("batch",), weight, 6),
        ("all_gather", ("batch",), biases[0], 2),
        ("all_gather", ("batch", "sequence"), biases[1], 2),
    ]
    count: Counter[str] = Counter()
    for operation, axes, whole_bytes, times in calls:
        split = [axis for axis in axes if mesh.of(axis) > 1]
        if split:
            count[axes_label(split)] += round(times * sent_bytes(operation, whole_bytes, mesh.of(*axes)))
    return dict(sorted(count.items()))
