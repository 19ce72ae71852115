"""DeepSpeed's view of a sharded model: the mesh as an ``mpu``, and an engine that exports full tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from cuboid.config.schema import MAX_FILE_BYTES
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, CuboidError
from cuboid.failures.rank_agreement import StepGuard, begin_update
from cuboid.integrations.deepspeed.changed_weights import ChangedWeights
from cuboid.integrations.deepspeed.checkpoint import CheckpointedEngine
from cuboid.integrations.deepspeed.gradient_partition import (
    drop_gradients,
    has_gradients,
    keeps_gradients,
    take_over_gradients,
)
from cuboid.models.sharded.sharded_model import mesh_of, sharding_of, unwrap
from cuboid.optim.grad_norm import scale_to, total_norm
from cuboid.optim.piecewise_step import PiecewiseStep
from cuboid.optim.taken_gradients import TakenByZero, give_back, take_gradients
from cuboid.weights.save import export_model, full_state_dict


class ModelParallelUnit:
    """A mesh as DeepSpeed's (Megatron's) ``mpu``: the ranks of one copy of the model are a model-parallel group."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share one copy of the model, over all stages."""
        return self._mesh.model_parallel_group

    def get_model_parallel_world_size(self) -> int:
        """Size of :meth:`get_model_parallel_group`: ranks of the meshes of all stages."""
        return len(self._mesh.copy_ranks)

    def get_model_parallel_rank(self) -> int:
        """This rank's index in :meth:`get_model_parallel_group`."""
        return dist.get_rank(self.get_model_parallel_group())

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks of the mesh."""
        return self._mesh.shape.size

    # Over all stages, unlike the size: where DeepSpeed counts a parameter on tensor-parallel rank 0 only, it must be
    # counted once in all stages together.
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Group of the ranks that have the same shards in all replicas."""
        return self._mesh.data_parallel_group

    def get_data_parallel_world_size(self) -> int:
        """Replicas of the mesh."""
        return self._mesh.topology.data

    def get_data_parallel_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self._mesh.coordinate.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """World ranks of :meth:`get_data_parallel_group`."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Pipeline stages."""
        return self._mesh.topology.pipe


class CuboidEngine(CheckpointedEngine):
    """A DeepSpeedEngine that exports full tensors, and that keeps the gradient norm when it clips without ZeRO too."""

    changed_weights: ChangedWeights
    #: Of DeepSpeed's optimizers that step on flat master weights; None if the rule needs whole gradients.
    piecewise: PiecewiseStep | None = None
    #: Asked on every rank before each update, if set, with this replica's losses of the step (see ``loss_parts``) if
    #: this rank has them: returns whether to update the weights.
    before_update: Callable[[list[torch.Tensor]], bool] | None = None
    #: Of the step so far, if ``before_update`` is set: each micro-batch's part of the replica's loss, which is their
    #: sum. The step's loss is the mean over the replicas. A pipeline that spreads its head has the sum alone.
    loss_parts: list[torch.Tensor] = []
    _skips_update = False
    #: Whether ZeRO has the gradients of this step, and would replace them by those of another backward.
    _has_reduced = False
    #: Whether gradients of this step are where ZeRO adds them up, so that ``.grad`` raises an error until they change.
    _has_taken = False

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As ``DeepSpeedEngine.backward``; if a rank fails or disappears, the other ranks raise an error about it.

        Raises:
            CuboidError: under ZeRO, it is the second one that ends a step.
        """
        mesh, is_last = mesh_of(self.module), self.is_gradient_accumulation_boundary()
        if is_last:
            begin_update(mesh, self.global_steps + 1)
        with StepGuard(mesh, f"backward of step {self.global_steps + 1}"):
            self._begin_backward()
            loss = super().backward(*args, **kwargs)
        if self.before_update is not None:
            self.loss_parts = [*self.loss_parts, loss.detach().mean()]
        if self._monitors and isinstance(loss, torch.Tensor):
            # DeepSpeed resets this attribute of its own in each optimizer step. The loss is divided by the number of
            # micro-batches already.
            mean, sum_so_far = loss.detach().mean(), self.losses
            self.losses: Any = mean if sum_so_far is None else sum_so_far + mean
        return loss

    def _begin_backward(self) -> None:
        if self._has_reduced and self.is_gradient_accumulation_boundary():
            raise CuboidError(
                "another backward before step(): ZeRO has reduced this step's gradients, and would replace them by "
                "those of this loss alone. Add up the losses before one backward, call the first ones inside "
                "engine.no_sync(), raise gradient_accumulation_steps, or drop the first gradients by "
                "engine.zero_grad()"
            )
        if self._has_taken:
            self._leave_gradients()

    def _backward_prologue(self) -> None:
        # Of a script's loss.backward() too, which DeepSpeed allows under ZeRO.
        if not self._running_engine_backward:
            if not isinstance(self.optimizer, ZeROOptimizer):
                raise CuboidError(
                    "loss.backward() of an engine's output: without ZeRO, DeepSpeed would neither divide the gradients "
                    "by gradient_accumulation_steps nor average them over the replicas; call engine.backward(loss)"
                )
            self._begin_backward()
        super()._backward_prologue()

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        is_last = self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt
        self._has_reduced = is_last and isinstance(self.optimizer, ZeROOptimizer)
        if self._has_reduced or keeps_gradients(self.optimizer):
            self._has_taken = True
            take_gradients(self.changed_weights.parameters, TakenByZero)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As ``DeepSpeedEngine.step``; see :meth:`backward`. DeepSpeed's monitors get the step's loss too."""
        # Without DeepSpeed's count of micro-batches, each call is the end of a step.
        loss, steps = self.losses, self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        # Set anew in each step: what was asked before may be gone by now.
        self._skips_update = False
        if steps:
            self._has_reduced = False
            if self._has_taken:
                self._leave_gradients()
        if steps and self.before_update is not None:
            parts, self.loss_parts = self.loss_parts, []
            try:
                self._skips_update = not self.before_update(parts)
            except BaseException:
                # For a script that goes on, the step is over: it counts, and leaves no gradients.
                self.micro_steps += 1
                self.losses = None
                self._drop_gradients()
                raise
        with StepGuard(mesh_of(self.module), f"optimizer step {self.global_steps + 1}"):
            if steps:
                # Without DeepSpeed's count, ZeRO 1 reduces them in the step itself, so that there are none before.
                if self.managed_gradient_accumulation() and not has_gradients(self.optimizer):
                    raise CuboidError(
                        "there are no gradients to step on: call engine.backward first, and engine.zero_grad() before "
                        "that or after the step"
                    )
                self.changed_weights.take()
                take_over_gradients(self.optimizer, self.piecewise)
            result = super().step(*args, **kwargs)
        if steps and self._monitors and loss is not None:
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples)])
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As ``DeepSpeedEngine.zero_grad``; also of gradients that ZeRO has taken, which DeepSpeed would step on."""
        if self._has_taken:
            self._has_reduced = False
            self._leave_gradients()
            drop_gradients(self.optimizer)
        super().zero_grad(*args, **kwargs)

    def _leave_gradients(self) -> None:
        """End a time in which ``.grad`` raises an error."""
        self._has_taken = False
        give_back(self.changed_weights.parameters)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if not self._skips_update:
            super()._take_model_step(lr_kwargs)
            return
        # The step counts, and its learning rate is used up: a schedule depends on the number of steps alone.
        self._drop_gradients()
        self._global_grad_norm: Any = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.losses = None
        self.global_steps += 1
        self.skipped_steps += 1
        self.global_samples += self.train_batch_size()

    def _reduce_non_expert_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.mpu is None:
            super()._reduce_non_expert_gradients(*args, **kwargs)
            return
        # By this switch of DeepSpeed's, it takes the replicas' group of this engine, and not of the one made last.
        self.pipeline_parallelism: Any = True
        try:
            super()._reduce_non_expert_gradients(*args, **kwargs)
        finally:
            self.pipeline_parallelism = False

    def clear_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``zero_grad`` of the script's optimizer drop this engine's gradients: ZeRO lets it step flat masters, and
        has the gradients elsewhere.
        """
        optimizer.zero_grad = functools.partial(_clear_here, weakref.ref(self))  # type: ignore[method-assign]

    def _drop_gradients(self) -> None:
        drop_gradients(self.optimizer)
        self.zero_grad()

    @property
    def _monitors(self) -> bool:
        """Whether this rank writes to DeepSpeed's monitors."""
        return bool(self.monitor.enabled) and self.global_rank == 0

    def clip_fp32_gradients(self) -> None:
        """Clip without ZeRO, as torch does and with its precision; DeepSpeed's norm is always in float32."""
        mesh, module = mesh_of(self.module), cast(Any, unwrap(self.module))
        gradients = [p.grad for p in module.counted_parameters() if p.grad is not None]
        groups = [mesh.model_parallel_group] if len(mesh.copy_ranks) > 1 else []
        norm = total_norm(gradients, groups, 2.0, next(module.parameters()))
        scale_to((p.grad for p in module.parameters() if p.grad is not None), norm, self.gradient_clipping())
        self._global_grad_norm = norm

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: exports are always gathered."""
        return True

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full weights as a Hugging Face checkpoint; DeepSpeed would pickle this rank's shards. Collective.

        Args:
            save_dir: folder of the checkpoint.
            save_filename: only the default is accepted; safetensors files are written instead.
            exclude_frozen_parameters: not supported, since the model would be incomplete.

        Returns:
            True.

        Raises:
            CheckpointError: an argument isn't supported, or a rank can't write.
        """
        if save_filename != "pytorch_model.bin" or exclude_frozen_parameters:
            raise CheckpointError(
                "save_16bit_model writes a whole model as safetensors files with Hugging Face's names; leave out "
                "save_filename and exclude_frozen_parameters"
            )
        export_model(self.module, Path(save_dir), MAX_FILE_BYTES)
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        # Called by accelerate and the HF Trainer to save. Collective; only the first rank gets the tensors.
        adapters = sharding_of(self.module).state.adapters
        if adapters is not None:
            return adapters.state(self.module)
        state = full_state_dict(self.module)
        if not exclude_frozen_parameters:
            return state
        frozen = {name for name, p in unwrap(self.module).named_parameters() if not p.requires_grad}
        return {name: tensor for name, tensor in state.items() if name not in frozen}


def _clear_here(reference: weakref.ref[CuboidEngine], *_: Any, **__: Any) -> None:
    """In the place of the ``zero_grad`` of an optimizer that ZeRO lets step masters."""
    engine = reference()
    if engine is not None:
        engine.zero_grad()
