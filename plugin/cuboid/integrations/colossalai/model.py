"""ColossalAI's ``ModelWrapper`` around a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.interface import ModelWrapper
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerAdapter, WholeStates
from cuboid.errors import CuboidError
from cuboid.integrations.colossalai.optimizer import CuboidOptimizer
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import mesh_of
from cuboid.models.stages.stage_model import StageModel
from cuboid.weights.checkpointing import Checkpointing, Origin, Progress
from cuboid.weights.state_dict_map import stored_names


class CuboidModel(ModelWrapper):
    """A boosted model, and everything that belongs to its run.

    Attributes:
        pipeline: the pipeline that runs it, if it is a stage of one.
        optimizer: the optimizer that was boosted with it, if any.
        whole_states: of an optimizer that steps whole tensors.
        progress: of the run.
        client_state: the caller's own data, which is saved in checkpoints and restored from them.
        restored: whether the optimizer's state was loaded from a checkpoint and it hasn't stepped since.
    """

    def __init__(self, module: nn.Module, origin: Origin) -> None:
        super().__init__(module)
        self.pipeline = Pipeline(module, sums=False) if isinstance(module, StageModel) else None
        self.optimizer: CuboidOptimizer | None = None
        self.whole_states: WholeStates | None = None
        self.checkpointing = Checkpointing(module, origin)
        self.progress = Progress()
        self.client_state: dict[str, Any] = {}
        self.restored = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with a full micro-batch that is the same on all ranks of a mesh.

        Raises:
            CuboidError: in a pipeline, which ``booster.execute_pipeline`` runs.
        """
        if self.pipeline is not None:
            raise CuboidError("a pipeline stage has no forward of its own; use booster.execute_pipeline")
        output = self.module(*args, **kwargs)
        first = args[0] if args else kwargs.get(self.module.main_input_name)
        if torch.is_grad_enabled() and self.training and first is not None:
            self.count_rows(first.shape[0])
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the optimizer's ``zero_grad`` does."""
        # Not of each parameter, as torch does: in bf16 the optimizer has the gradients.
        self.module.zero_grad(set_to_none)

    def count_rows(self, rows: int) -> None:
        """Add to the progress that each replica trains on this number of rows."""
        self.progress.samples += rows * mesh_of(self.module).topology.data

    def stepped(self) -> None:
        """Add an optimizer step to the progress."""
        self.progress.optimizer += 1
        self.restored = False
        self.checkpointing.changed()

    @property
    def adapter(self) -> OptimizerAdapter | None:
        """Access to the optimizer's state for checkpoints; None without an optimizer."""
        if self.optimizer is None:
            return None
        adapter = self.optimizer.replicated.adapter(stored_names(self.module))
        adapter.whole = self.whole_states
        return adapter
