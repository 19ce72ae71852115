"""``shards.json`` of a folder of per-rank files: the layout, the tensors, and the files with their checksums.

Tensors in a rank's file have their names in the full checkpoint, and are sharded as that rank has them, without
padding. All replicas have the same, so there is one file for each coordinate in the pipeline and its mesh.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cuboid.checkpoint.format.bounded_files import read_bytes
from cuboid.checkpoint.format.manifest import FileRecord, check_names, not_understood, with_checksum, without_checksum
from cuboid.checkpoint.format.tensor_file import TensorSpec, check_sizes
from cuboid.config.schema import MeshConfig
from cuboid.distributed.topology import Axis, Coordinate, MeshShape, Topology
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec

SHARDS = "shards.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StoredSharding(_Record):
    """A :class:`~cuboid.tensor3d.sharding.sharding_spec.ShardingSpec` without its shape, as it is stored.

    ``split`` is its ``tp_axes``: the file format keeps the key's original name.
    """

    split: tuple[tuple[Axis, ...], ...]
    parts: tuple[int, ...]
    ragged: bool

    @classmethod
    def of(cls, spec: ShardingSpec) -> Self:
        """The stored form of a :class:`ShardingSpec`."""
        return cls(split=spec.tp_axes, parts=spec.parts, ragged=spec.ragged)


class RankTensor(_Record):
    """A tensor of the full checkpoint.

    Attributes:
        dtype: such as ``bfloat16``.
        shape: of the full tensor.
        parameter: its name in memory.
        layout: how the mesh shards it; None if it doesn't.
        stages: the pipeline stages that have it; if ranks have several stages, the ranks of the pipeline.
    """

    dtype: str
    shape: tuple[int, ...]
    parameter: str
    layout: StoredSharding | None
    stages: tuple[int, ...] = Field(min_length=1)

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name} is no dtype of torch")
        return name

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        return check_sizes(shape)

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        cut = self.layout
        if cut is None:
            return self
        if not len(self.shape) == len(cut.split) == len(cut.parts):
            raise ValueError("its layout has another number of dims than its shape")
        if not all(1 <= parts <= max(size, 1) for size, parts in zip(self.shape, cut.parts, strict=True)):
            raise ValueError("its layout has more parts than elements")
        # Its constructor asserts its own rules; pydantic turns an AssertionError into a validation error.
        ShardingSpec(self.shape, cut.split, cut.parts, cut.ragged)
        return self

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the full tensor."""
        return TensorSpec(getattr(torch, self.dtype), self.shape)

    @property
    def sharding(self) -> ShardingSpec | None:
        """The stored sharding as a :class:`ShardingSpec`."""
        cut = self.layout
        return None if cut is None else ShardingSpec(self.shape, cut.split, cut.parts, cut.ragged)


#: Layers of a stage, which may have half of one. What is whole is written and read as an integer.
_Layers = tuple[int | Annotated[float, Field(multiple_of=0.5)], ...]


class RankFolder(_Record):
    """The contents of ``shards.json``.

    Attributes:
        format: version of this file's format.
        mesh: of each stage.
        layers: number of layers of each stage; empty without a pipeline.
        placement: the pipeline rank of each stage; empty, and not in the file, if each rank has one stage.
        tensors: by the name in the full checkpoint.
        files: the ranks' files, by name.
        beside: other files (config, tokenizer), by name; empty in folders of earlier versions.
    """

    format: Literal[1] = 1
    mesh: MeshConfig
    layers: _Layers
    placement: tuple[int, ...] = ()
    tensors: dict[str, RankTensor]
    files: dict[str, FileRecord]
    beside: dict[str, FileRecord] = {}

    @field_validator("beside")
    @classmethod
    def _check_names(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        check_names(files)
        return files

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if self.placement and len(self.placement) != len(self.layers):
            raise ValueError(f"it has places for {len(self.placement)} stages, and layers of {len(self.layers)}")
        # Checked here, before a forged mesh of billions of ranks is enumerated.
        pipe = pipeline_ranks(self.layers, self.placement)
        if self.mesh.shape.size * pipe != len(self.files):
            raise ValueError(f"its layout and its list of {len(self.files)} files contradict each other")
        if self.placement and set(self.placement) != set(range(pipe)):
            raise ValueError("it leaves a rank of the pipeline without a stage")
        for name, tensor in self.tensors.items():
            if not all(0 <= stage < pipe for stage in tensor.stages):
                raise ValueError(f"{name} is in a stage that there isn't")
        return self

    def write(self, folder: Path) -> None:
        """Write ``shards.json`` into a folder."""
        # Left out if it isn't needed, so that versions without the key can read the file.
        left_out = set() if self.placement else {"placement"}
        (folder / SHARDS).write_bytes(with_checksum(self.model_dump(mode="json", exclude=left_out)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder's ``shards.json``.

        Raises:
            CheckpointError: it is malformed, damaged or edited.
        """
        path = folder / SHARDS
        content = without_checksum(read_bytes(path), path)
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            raise not_understood(path, error) from None

    @property
    def nbytes(self) -> int:
        """Total size of all files."""
        return sum(record.bytes for record in (*self.files.values(), *self.beside.values()))

    @cached_property
    def topology(self) -> Topology:
        """The ranks of one replica."""
        pipe = pipeline_ranks(self.layers, self.placement)
        return Topology(self.mesh.shape, pipe * self.mesh.shape.size, pipe)

    def file_of(self, at: Coordinate) -> str:
        """Name of the file for a coordinate, in a world of any number of replicas."""
        return file_name(self.topology, self.topology.rank(dataclasses.replace(at, data=0)))

    def describe(self) -> str:
        """The layout as text."""
        return layout_in_words(self.mesh.shape, self.layers, self.placement)


def file_name(places: Topology, place: int) -> str:
    """Name of a rank's file; ``place`` is its rank within one replica."""
    return f"rank-{place:05d}-of-{places.world_size:05d}.safetensors"


def pipeline_ranks(layers: tuple[float, ...], placement: tuple[int, ...]) -> int:
    """Ranks of a pipeline, each of which is a mesh; 1 without one. For the arguments see :class:`RankFolder`."""
    return max(placement) + 1 if placement else max(len(layers), 1)


def layout_in_words(mesh: MeshShape, layers: tuple[float, ...], placement: tuple[int, ...]) -> str:
    """A mesh and a pipeline's stages as text."""
    stages = f" in {len(layers)} stages of {', '.join(map(str, layers))} layers" if layers else ""
    ranks = f" on the pipeline's ranks {', '.join(map(str, placement))}" if placement else ""
    return f"mesh {mesh} (batch × sequence × hidden){stages}{ranks}"


def shard_spec(tensor: RankTensor, mesh: MeshShape, at: Coordinate) -> TensorSpec:
    """Dtype and shape of a rank's shard of a tensor, without padding."""
    sharding = tensor.sharding
    if sharding is None:
        return tensor.spec
    intervals = sharding.shard_intervals(mesh, at)
    return TensorSpec(tensor.spec.dtype, tuple(sum(high - low for low, high in dim) for dim in intervals))
