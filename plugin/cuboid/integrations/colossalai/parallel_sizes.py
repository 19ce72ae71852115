"""The attributes of ColossalAI's plugins that scripts read for sizes, stages and process groups."""

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
        stage: this rank's stage, from 0; if ranks have several stages, this rank's index in the pipeline.
        num_stages: number of stages; if ranks have several stages, number of the pipeline's ranks.
        placement: the rank, as an index in the pipeline, of each stage in the order of the layers.
    """

    stage: int
    num_stages: int
    placement: tuple[int, ...]

    @property
    def num_model_chunks(self) -> int:
        """Number of stages on each rank."""
        return len(self.placement) // self.num_stages

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:  # noqa: ARG002
        """Whether this rank holds the embeddings."""
        return self.stage == self.placement[0]

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:  # noqa: ARG002
        """Whether this rank holds the head and computes the loss."""
        return self.stage == self.placement[-1]


class LayoutNames:
    """Mixin of the plugin.

    Attributes:
        config: Cuboid's part of the config.
        mesh: this rank's mesh; None until a model is boosted.
    """

    config: CuboidConfig
    mesh: Mesh | None = None

    @property
    def coordinate(self) -> Coordinate:
        """This rank's stage and replica. For its position in the mesh, see :attr:`mesh`."""
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
        """Group of the ranks that have the same shards in all replicas."""
        return self._connected().data_parallel_group

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Group of the ranks of this rank's mesh."""
        return self._connected().mesh_group

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Group of the ranks with this rank's position in the mesh of every stage."""
        return self._connected().pipe_group

    @property
    def _topology(self) -> Topology:
        return self.config.topology(current_world_size())

    def _connected(self) -> Mesh:
        if self.mesh is None:
            raise CuboidError("process groups exist once booster.boost has been called")
        return self.mesh
