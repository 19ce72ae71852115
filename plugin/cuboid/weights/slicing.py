"""Represent parameters as DTensors, of which transformers reads only a rank's slices, without a process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from cuboid.distributed.mesh import Mesh
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.tensor3d.sharding.four_bits import is_packed
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, pad_shard, take_shard

#: Dims of a parameter that holds all experts of a layer.
_EXPERT_DIMS = 3


def mark_parameters(model: Any, parallel_plan: ParallelPlan, mesh: Mesh, stored: Collection[str] = ()) -> None:
    """Replace each parameter by a DTensor on the meta device that has the placement of this rank's shard.

    What can't be read in slices stays as it is: it is read in full and sliced later. So do the weights of the layers
    ``stored``, which are in 4 bits in the files.
    """
    mapping = get_model_conversion_mapping(model)
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    # Those that may make a parameter out of a checkpoint's tensors: reversed, a converter reads what it makes.
    reversed_converters = [converter.reverse_transform() for converter in converters]
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    for module, name, spec in parallel_plan.parameters_of(model):
        if spec.ragged and "hidden" in spec.fsdp_axes:
            # No DTensor placement describes how the bias of a head is sharded.
            continue
        if name == "weight" and prefixes[module] in stored:
            continue
        made_by = [
            converter
            for converter, back in zip(converters, reversed_converters, strict=True)
            if back.rename_source_key(f"{prefixes[module]}.{name}")[1] is not None
        ]
        if not all(_is_made_of_slices(converter, spec, mesh) for converter in made_by):
            continue
        parameter = getattr(module, name)
        marked = nn.Parameter(_placed(parameter, spec, mesh), requires_grad=parameter.requires_grad)
        module.register_parameter(name, marked)


def _is_made_of_slices(converter: WeightConverter, spec: ShardingSpec, mesh: Mesh) -> bool:
    """Whether a converter makes a rank's slice of a parameter out of the same slices of what it reads.

    transformers slices tensors before it converts them. That is right if it only stacks experts, and joins along dims
    that aren't split, or that are split in as many parts as are joined.
    """
    sources = len(converter.source_patterns)
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist):
            continue
        if not isinstance(operation, Concatenate):
            return False
        dim = operation.dim
        if dim == 0 and mesh.size(*spec.fsdp_axes) > 1:
            return False
        if mesh.size(*spec.tp_axes[dim]) > 1 and (sources == 1 or spec.parts[dim] != sources):
            return False
    return True


def unmark_parameters(model: Any, parallel_plan: ParallelPlan, mesh: Mesh) -> None:
    """Replace the loaded DTensors, and the tensors that were read in full, by this rank's shards."""
    for module, name, spec in parallel_plan.parameters_of(model):
        loaded = getattr(module, name)
        if is_packed(loaded):
            continue
        if isinstance(loaded, DTensor) and _read_index(spec, mesh) != mesh.index(*spec.fsdp_axes):
            # A stand-in was read for a shard without experts, which is all padding.
            shard = loaded.to_local().detach().new_zeros(spec.shard_shape(mesh.shape))
        elif isinstance(loaded, DTensor):
            shard = pad_shard(loaded.to_local().detach(), spec, mesh.shape)
        else:
            shard = take_shard(loaded.detach(), spec, mesh)
        plain = nn.Parameter(shard, requires_grad=loaded.requires_grad)
        plain._is_hf_initialized = True  # type: ignore[attr-defined]
        module.register_parameter(name, plain)


def _placed(parameter: torch.Tensor, spec: ShardingSpec, mesh: Mesh) -> DTensor:
    pieces, index = mesh.size(*spec.fsdp_axes), _read_index(spec, mesh)
    # The spec as a sequence of splits: number of pieces, this rank's piece, and the DTensor placement.
    splits: list[tuple[int, int, Placement]] = [
        (mesh.size(*axes), mesh.index(*axes), Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts))
        for dim, (axes, parts) in enumerate(zip(spec.tp_axes, spec.parts, strict=True))
    ]
    if spec.ragged:
        # Dim 0 is divided into all shards at once. Dividing it into blocks and these into shards would round the sizes
        # up twice, and give other boundaries.
        splits[0] = (splits[0][0] * pieces, splits[0][1] * pieces + index, Shard(0))
    else:
        splits.append((pieces, index, Shard(0)))
    intervals = spec.shard_intervals(mesh.shape, mesh.coordinate)
    local = parameter.new_empty([sum(high - low for low, high in dim) for dim in intervals], device="meta")
    if local.numel() == 0 and index != mesh.index(*spec.fsdp_axes):
        # The shape of the shard that is read instead.
        rows = spec.block_shape(mesh.shape)[0] - index * spec.shard_shape(mesh.shape)[0]
        local = local.new_empty([rows, *local.shape[1:]])
    sizes, at, placements = zip(*splits, strict=True)
    device_mesh = _rank_of_slices(sizes, at)
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _read_index(spec: ShardingSpec, mesh: Mesh) -> int:
    """Index of the shard of its block that a rank reads: its own or, if that has no experts, the last one with any.

    transformers stacks the experts that a rank reads into one tensor, which fails for none.
    """
    index = mesh.index(*spec.fsdp_axes)
    if spec.ragged or len(spec.shape) < _EXPERT_DIMS:
        return index
    return min(index, (spec.block_shape(mesh.shape)[0] - 1) // spec.shard_shape(mesh.shape)[0])


class _RankOfSlices(DeviceMesh):
    """A DeviceMesh that only gives the index of this rank's slice: it has no process group and no peers."""

    def __init__(self, sizes: tuple[int, ...], at: tuple[int, ...]) -> None:
        self._sizes, self._at = sizes, at
        # Explicitly on the CPU, because models are built under ``torch.device("meta")`` and the values are read.
        cells = torch.arange(math.prod(sizes), device="cpu").view(sizes)
        cell = int(cells[at])
        # torch caches by the equality of meshes, which ignores the current rank; so each rank's mesh numbers its ranks
        # differently.
        ranks = cells + cell * cells.numel()
        names = tuple(str(dim) for dim in range(len(sizes)))
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=int(ranks[at]))

    def __getitem__(self, name: Any) -> DeviceMesh:
        dim = int(name)
        return _rank_of_slices((self._sizes[dim],), (self._at[dim],))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The index of this rank's slice along a dim of the mesh; DTensor calls it."""
        return self._at[int(mesh_dim or 0)]


@functools.cache
def _rank_of_slices(sizes: tuple[int, ...], at: tuple[int, ...]) -> _RankOfSlices:
    # Cached for all parameters that are sharded alike, because making one takes a millisecond.
    return _RankOfSlices(sizes, at)
