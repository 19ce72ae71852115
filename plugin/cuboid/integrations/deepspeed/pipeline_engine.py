"""The DeepSpeed engine of a pipeline: the interface of DeepSpeed's ``PipelineEngine``, on Cuboid's pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import log_dist
from torch import nn

from cuboid.checkpoint.metadata import CheckpointMetadata
from cuboid.errors import CuboidError
from cuboid.failures.rank_agreement import StepGuard
from cuboid.integrations.deepspeed.checkpoint import positioned
from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.models.pipeline.training_pipeline import Pipeline


class CuboidPipelineEngine(CuboidEngine):
    """A DeepSpeedEngine that trains with :meth:`train_batch` and evaluates with :meth:`eval_batch`.

    Losses are means over the label tokens of the whole batch: of all micro-batches and all replicas.
    """

    pipeline: Pipeline
    _iterator: Iterator[Any] | None
    _in_step: bool
    placeholders: list[nn.Parameter]

    @classmethod
    def take_over(cls, engine: CuboidEngine, placeholders: list[nn.Parameter]) -> CuboidPipelineEngine:
        """Turn a fresh engine, whose module is a stage, into this class.

        ``placeholders`` are the dummy parameters in its optimizer, of groups in which this stage trains nothing.
        """
        engine.__class__ = cls
        assert isinstance(engine, cls)
        engine.pipeline = Pipeline(engine.module, sums=False)
        engine.placeholders = placeholders
        loader = engine.training_dataloader
        engine._iterator = None if loader is None else iter(RepeatingLoader(loader))
        engine._in_step = False
        return engine

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step on the next ``gradient_accumulation_steps`` micro-batches of each replica.

        Only the first rank of a replica reads ``data_iter``; the others may give None.

        Args:
            data_iter: yields dicts as Hugging Face models take them, or pairs (input_ids, labels); labels are not
                shifted. None continues the iterator of the last call, or the ``training_data`` of ``initialize``.

        Returns:
            The loss before the step, a scalar tensor, the same on every rank.

        Raises:
            StopIteration: on every rank, if the iterator ends before the step has its micro-batches.
            CuboidError: a micro-batch is malformed.
        """
        if not torch.is_grad_enabled():
            raise CuboidError("train_batch needs gradients; use eval_batch inside torch.no_grad()")
        if self.basic_optimizer is None or isinstance(self.basic_optimizer, DummyOptim):
            raise CuboidError(
                "train_batch steps an optimizer, and the engine has none: give deepspeed.initialize one, or the config "
                "a section optimizer; eval_batch needs none"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self.tput_timer.start()
        if isinstance(self.optimizer, ZeROOptimizer):
            # Its hooks run in each unit's backward. Off the boundary, they leave the gradients unreduced.
            self.optimizer.set_gradient_accumulation_boundary(False)
        try:
            loss = self._make_step()
        except BaseException:
            # Of a step that was refused before its update: the next one must not add to its gradients.
            self._drop_gradients()
            raise
        if self.pipeline.recut is not None:
            log_dist(
                f"by the times measured so far, sequences are cut into segments of {self.pipeline.recut}", ranks=[0]
            )
        if self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples)])
        return loss

    def _make_step(self) -> torch.Tensor:
        """All units of a step, and the optimizer's; returns the loss."""
        with StepGuard(self.pipeline.mesh, f"step {self.global_steps + 1}"):
            # Before the units, and not only when the optimizer steps.
            self.changed_weights.check_trained()
        loss = self.pipeline.train(
            self._iterator,
            self.gradient_accumulation_steps(),
            # This loss's gradients are to be summed over the replicas, of which DeepSpeed takes the mean unless its
            # ``gradient_allreduce_op`` is "sum"; and its optimizer divides by the loss scale, 1 except under fp16.
            gradient_scale=(self.dp_world_size if self.gradient_average else 1)
            * float(getattr(self.optimizer, "loss_scale", 1.0)),
        )
        if self.placeholders:
            # DeepSpeed's optimizers need a gradient in each group; these are zero.
            (torch.cat([*self.placeholders]) * 0).sum().backward()
        if self.before_update is not None:
            # The mean over the replicas, of which a pipeline's loss is the sum.
            parts = [part * self.dp_world_size for part in self.pipeline.loss_parts]
            self.loss_parts = parts if parts or not self.is_last_stage() else [loss]
        with StepGuard(self.pipeline.mesh, f"optimizer step {self.global_steps + 1}"):
            self._reduce_gradients()
            self._finish_step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> torch.Tensor:
        """The loss of the next micro-batches, without gradients.

        Args:
            data_iter: as for :meth:`train_batch`.
            return_logits, compute_loss, reduce_output, bcast_loss: as in ``PipelineEngine``; only their defaults are
                supported.
            num_micro_batches: micro-batches of each replica; by default ``gradient_accumulation_steps``.

        Returns:
            The loss, a scalar tensor, the same on every rank.

        Raises:
            StopIteration, CuboidError: as :meth:`train_batch`.
        """
        if return_logits or not compute_loss:
            raise CuboidError("eval_batch gives the loss only: a pipeline never has the logits of a batch in one place")
        if reduce_output != "avg" or not bcast_loss:
            raise CuboidError('eval_batch gives every rank the mean: leave reduce_output "avg" and bcast_loss True')
        self.module.eval()
        count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        return self.pipeline.evaluate(data_iter, count)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that :meth:`train_batch` reads from now on."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set a loader that :meth:`train_batch` reads from now on, repeated endlessly."""
        self._iterator = iter(RepeatingLoader(loader))

    def _restore(self, metadata: CheckpointMetadata, *, with_scheduler: bool) -> None:
        super()._restore(metadata, with_scheduler=with_scheduler)
        if self.training_dataloader is not None:
            # No script can skip the batches that were already used, since train_batch reads this loader itself.
            micro_batch = self.train_micro_batch_size_per_gpu() * self.dp_world_size
            self._iterator = positioned(self.training_dataloader, self.global_samples, micro_batch)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the optimizer step of a :meth:`train_batch` is running."""
        return self._in_step

    def is_first_stage(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.pipeline.mesh.has_first_stage

    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and computes the loss; with `zero_bubble-v` that may be the first rank."""
        return self.pipeline.mesh.has_last_stage

    @property
    def stage_id(self) -> int:
        """This rank's stage, from 0; if ranks have several stages, this rank's index in the pipeline."""
        return self.pipeline.mesh.coordinate.pipe

    @property
    def num_stages(self) -> int:
        """Number of stages; if ranks have several stages, number of the pipeline's ranks."""
        return self.pipeline.mesh.topology.pipe

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, for each replica."""
        return self.gradient_accumulation_steps()

    def is_pipe_parallel(self) -> bool:
        """Whether the pipeline has more than one rank."""
        return self.num_stages > 1

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported; see :meth:`eval_batch`.

        Raises:
            CuboidError: always.
        """
        raise CuboidError(
            "a pipeline engine has no forward of its own; use train_batch or eval_batch, or cuboid.CuboidTrainer in "
            "place of the Hugging Face Trainer"
        )

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported; see :meth:`train_batch`.

        Raises:
            CuboidError: always.
        """
        raise CuboidError("a pipeline engine has no backward of its own; use train_batch")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported; see :meth:`train_batch`.

        Raises:
            CuboidError: always.
        """
        raise CuboidError("train_batch makes the optimizer step itself")

    def _reduce_gradients(self) -> None:
        """Average the gradients over the replicas, once for all units of the step."""
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            # Nothing runs inside: the context reduces all accumulated gradients when it exits. It isn't wrapped around
            # the units, because after a failure in one of them, its exit would wait for the other replicas before the
            # error is raised.
            with self.coalesce_grad_reduction():
                pass
        # Without replicas there is nothing to sum, but DeepSpeed would round the float32 gradients to bfloat16.
        elif self.pipeline.mesh.topology.data > 1 or not isinstance(self.optimizer, BF16_Optimizer):
            with self._at_boundary():
                self.allreduce_gradients()

    def _finish_step(self) -> None:
        with self._at_boundary():
            # Count as if each micro-batch had had its own backward; ``step`` counts the last one.
            self.micro_steps += self.gradient_accumulation_steps() - 1
            super().step()

    @contextmanager
    def _at_boundary(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
