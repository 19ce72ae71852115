"""The names by which scripts for ColossalAI's plugins ask for sizes, stages and process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh, current_rank, current_world_size
from cuboid.distributed.topology import Coordinate, Topology
from cuboid.errors import CuboidError


@dataclass(frozen=True)
class StageManager:
    """Where this rank is in the pipeline.

    Attributes:
        stage: of this rank, from 0; where it has several, its place in the pipeline.
        num_stages: of the pipeline; where ranks have several, its ranks.
        placement: the rank of each part of the layers.
    """

    stage: int
    num_stages: int
    placement: tuple[int, ...]

    @property
    def num_model_chunks(self) -> int:
        """Parts of the layers on each rank."""
        return len(self.placement) // self.num_stages

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:  # noqa: ARG002
        """Whether this rank holds the embeddings."""
        return self.stage == self.placement[0]

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:  # noqa: ARG002
        """Whether this rank holds the head and computes the loss."""
        return self.stage == self.placement[-1]


class LayoutNames:
    """Mixed into the plugin.

    Attributes:
        config: Cuboid's part of the config.
        mesh: of this rank, once a model is boosted.
    """

    config: CuboidConfig
    mesh: Mesh | None = None

    @property
    def coordinate(self) -> Coordinate:
        """Which stage and replica this rank belongs to; its place in the mesh is :attr:`mesh`'s to tell."""
        return self._topology.coordinate(current_rank())

    @property
    def stage_manager(self) -> StageManager:
        """Where this rank is in the pipeline."""
        placement = self.config.placement if self.mesh is None else self.mesh.placement
        return StageManager(self.coordinate.pipe, self.pp_size, placement)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.config.stages

    @property
    def tp_size(self) -> int:
        """Ranks of the mesh."""
        return self.config.tensor_parallel.mesh_size

    @property
    def dp_size(self) -> int:
        """Replicas of the model."""
        return self._topology.data

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards for other data."""
        return self._connected().data_parallel_group

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks of this one's mesh."""
        return self._connected().mesh_group

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks at this one's place in every stage."""
        return self._connected().pipe_group

    @property
    def _topology(self) -> Topology:
        return self.config.topology(current_world_size())

    def _connected(self) -> Mesh:
        if self.mesh is None:
            raise CuboidError("process groups exist once booster.boost has been called")
        return self.mesh
