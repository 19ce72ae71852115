"""What becomes of a model on a rank: decided once, from the model on any device, and then applied to its modules.

Loading, sharding in memory, per-rank files and the probes all take these two steps: make a :class:`ModelPlan` (for
users' configs :func:`cuboid.weights.resolve.resolve` does), and apply it. Loading reads weights in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.models.kinds.sharding import Expected
from cuboid.models.sharded.activation_checkpointing import enable_checkpointing
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan
from cuboid.models.sharded.parallelize import ShardOf
from cuboid.models.sharded.quantization import QuantizedLayers
from cuboid.models.sharded.sharded_model import shard_modules
from cuboid.models.stages.stage_model import StagePlan, Staging, cut_model, finish_stage


@dataclass(frozen=True)
class ModelPlan:
    """How a model is cut and sharded on this rank.

    Args:
        cls: the architecture's class.
        config: Cuboid's config, with the mesh, the schedule and the placement settled.
        mesh: of this rank.
        parallel: how the whole model is sharded over the mesh; None for stages of one rank each, which shard nothing.
        stages: this rank's stages; None without a pipeline.
        quantized: the layers whose weights are stored in 4 bits.
        expected: the step for which the mesh was chosen; None if the config names it.
    """

    cls: type[PreTrainedModel]
    config: CuboidConfig
    mesh: Mesh
    parallel: ParallelPlan | None
    stages: StagePlan | None = None
    quantized: QuantizedLayers | None = None
    expected: Expected | None = None

    def cut(self, model: PreTrainedModel) -> RankPart:
        """Remove from a model, in place and on any device, what this rank's stages don't need.

        Raises:
            UnsupportedModelError: before the model is changed, if its loss isn't one that a pipeline computes.
        """
        if self.stages is None:
            return RankPart(self, self.parallel)
        staging = Staging(self.stages)
        cut_model(model, staging)
        # The plan of the whole model was made first, so that what has no rule raises on all ranks, whatever they hold.
        parallel = self.parallel and make_parallel_plan(model, self.mesh.shape, self.parallel.verdict)
        return RankPart(self, parallel, staging)

    def apply(self, model: PreTrainedModel, shard_of: ShardOf) -> PreTrainedModel:
        """Cut a model and shard what is left, in place; see :meth:`RankPart.finish`."""
        return self.cut(model).finish(model, shard_of)


@dataclass
class RankPart:
    """A rank's part of a model, between cutting and sharding.

    Args:
        plan: of the whole model.
        parallel: how the modules that are left are sharded; None if they aren't.
        staging: the rank's stages; None without a pipeline.
    """

    plan: ModelPlan
    parallel: ParallelPlan | None
    staging: Staging | None = None

    def finish(self, model: PreTrainedModel, shard_of: ShardOf) -> PreTrainedModel:
        """Turn what is left of the model into a sharded model or a pipeline stage, in place."""
        mesh, config, quantized = self.plan.mesh, self.plan.config, self.plan.quantized
        if self.staging is not None:
            finished = finish_stage(model, self.staging, mesh, self.parallel, shard_of, quantized)
        else:
            assert self.parallel is not None, "a mesh without stages has a plan"
            finished = shard_modules(model, self.parallel, mesh, config.tensor_parallel, shard_of, quantized)
        if config.activation_checkpointing is not None:
            enable_checkpointing(finished, config.activation_checkpointing)
        finished.cuboid.state.expected = self.plan.expected
        return finished
