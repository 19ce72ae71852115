"""``CuboidTrainer`` on the blocks of a run of ``cuboid train``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from cuboid import CuboidError
from cuboid.data.batches import Share, heldout_batches, micro_batch
from cuboid.data.training_data import TrainingData
from cuboid.integrations.callbacks.interrupt import InterruptCallback
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.trainer import CuboidTrainer
from cuboid.models.sharded.sharded_model import sharding_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.train.checkpoints import RunCheckpoints
from cuboid.train.job import TrainJob
from cuboid.train.resume import RunState

#: Of the names of the held-out loss and of other texts' in what the Trainer logs.
EVALUATED = "eval_"


class RunTrainer(CuboidTrainer):
    """Trains on one replica's share of the blocks, which are a function of the step.

    The Trainer saves nothing itself and resumes from nothing: :class:`~cuboid.train.checkpoints.RunCheckpoints` does.

    Args:
        model, args: as of the ``Trainer``.
        data, share: of the run.
        run, interrupt, guard: callbacks of the run.
        others: callbacks that come after them.
    """

    control: Any

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        data: TrainingData,
        share: Share,
        *,
        run: RunCheckpoints,
        interrupt: InterruptCallback,
        guard: LossGuardCallback,
        others: list[TrainerCallback],
    ) -> None:
        self._data, self._share, self._run, self._interrupt, self._guard = data, share, run, interrupt, guard
        self._flops: float | None = None
        super().__init__(model=model, args=args, callbacks=[run, interrupt, guard, *others])
        if not isinstance(unwrap(model), StageModel):
            self.model_accepts_loss_kwargs = sharding_of(model).verdict.counts_items

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As of the ``Trainer``, which calls it with the engine made and before it asks how far the run is."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        # Called with an optimizer while the engine is made.
        if optimizer is None:
            self._run.begin(self)
        return schedule

    def get_train_dataloader(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        """The micro-batches of the steps that are left; none if the run is to stop before the first."""
        first, steps, accumulation = self.state.global_step, self.state.max_steps, self.args.gradient_accumulation_steps
        if self._interrupt.agree(self.args) or first == steps:
            # Else the Trainer would look for a batch in each of the steps.
            self.control.should_training_stop = True
            return
        for number in range(first * accumulation, steps * accumulation):
            yield micro_batch(self._data.mixture.rows(number, self._share))

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """As of ``CuboidTrainer``; the loss is what the guard has seen, and here it is finite.

        The ``Trainer`` sums it up: after one that is no number, it would have no other.
        """
        return torch.nan_to_num(super().training_step(model, inputs, num_items_in_batch), 0.0, 0.0, 0.0)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As of ``CuboidTrainer``, with the loss to the last bit, and the learning rate that the optimizer has."""
        if "loss" in logs:
            logs["loss"] = self._guard.loss
            logs["learning_rate"] = float(self.model_wrapped.get_lr()[0])
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:  # type: ignore[override]
        """As of the ``Trainer``, counted once: all micro-batches are of one size."""
        if self._flops is None:
            self._flops = super().floating_point_ops(inputs)
        return self._flops

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The losses of the held-out blocks and of the other texts' in one log."""
        metrics: dict[str, float] = {}
        for name, blocks in {"heldout": self._data.heldout, **self._data.evaluated}.items():
            prefix = f"{EVALUATED}{name}"
            batches: Any = (
                {"input_ids": batch.input_ids, "labels": batch.labels} for batch in heldout_batches(blocks, self._share)
            )
            output = self.evaluation_loop(batches, "Evaluation", prediction_loss_only=True, metric_key_prefix=prefix)
            metrics[f"{prefix}_loss"] = output.metrics[f"{prefix}_loss"]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @property
    def _evaluates_own_loss(self) -> bool:
        # The mean over all labels, whichever function the loss is: all are tokens.
        return True

    def schedule_state(self) -> dict[str, Any]:
        """The state of a schedule that the engine doesn't have, for a checkpoint's client state."""
        return self._schedule_state()

    def restore_schedule(self, engine: Any) -> None:
        """Restore such a schedule from the checkpoint that the engine has loaded."""
        state = RunState.model_validate(engine.loaded.document["client"]).trainer_schedule
        if state is not None and not self._has_engines_schedule:
            self._load_schedule(engine, engine.loaded, state)


def training_arguments(job: TrainJob, device: torch.device, *, use_cache: bool) -> TrainingArguments:
    """All arguments of a run, on every rank.

    Raises:
        CuboidError: the user's have a value that the Trainer doesn't take.
    """
    # Which accelerate asks for.
    config = {"zero_optimization": {"stage": 0}, **copy.deepcopy(job.config)}
    warmup = ((config.get("scheduler") or {}).get("params") or {}).get("warmup_num_steps")
    enabled = {name: bool((config.get(name) or {}).get("enabled")) for name in ("bf16", "fp16")}
    fields: dict[str, Any] = {
        "output_dir": str(job.options.out),
        "deepspeed": config,
        "max_steps": job.steps,
        "per_device_train_batch_size": job.micro_batch,
        "per_device_eval_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "max_grad_norm": config.get("gradient_clipping", 0.0),
        "seed": job.options.seed,
        "use_cpu": device.type == "cpu",
        "use_cache": use_cache,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **enabled,
        **({} if warmup is None else {"warmup_steps": warmup}),
        **job.trainer_args,
    }
    try:
        # What a launcher says of the precision is the config's to say.
        with patch_environment(ACCELERATE_MIXED_PRECISION="no"):
            arguments = TrainingArguments(**fields)
    except CuboidError:
        raise
    except (TypeError, ValueError) as error:
        raise CuboidError(f"{'--trainer-args' if job.trainer_args else 'the Trainer'}: {error}") from error
    # The config's own numbers aren't compared with the defaults of arguments that they replace.
    arguments.hf_deepspeed_config.mismatches.clear()
    return arguments
