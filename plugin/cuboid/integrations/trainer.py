"""The Hugging Face Trainer for a pipeline: all micro-batches of an optimizer step go through one engine call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from cuboid.checkpoint.metadata import CheckpointMetadata
from cuboid.config.schema import CuboidConfig
from cuboid.errors import ConfigError, CuboidError
from cuboid.integrations.callbacks.interrupt import InterruptCallback
from cuboid.integrations.callbacks.metrics import MetricsCallback
from cuboid.integrations.callbacks.progress import RunProgressCallback
from cuboid.integrations.callbacks.run_folder import RunLockCallback
from cuboid.integrations.deepspeed.checkpoint import CheckpointedEngine
from cuboid.integrations.evaluation_loss import EvaluationLoss
from cuboid.integrations.trainer_classes import name_in_trl, trainer_of_trl
from cuboid.integrations.trainer_engine import checkpoint_to_resume, config_in_plugin, config_of_trainer
from cuboid.integrations.trainer_loss import PipelineModel, TokenModel, check_own_loss, mean_of
from cuboid.models.architectures.liger import why_refused
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.label_heads import RowClassifier
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import sharding_of, unwrap
from cuboid.tensor3d.layers.vocab_cross_entropy import predicted

#: Training arguments that can't be set with a pipeline, and why.
_REFUSED = {
    "label_smoothing_factor": "the loss is computed in pieces on the last stage, and only there; leave it at 0",
    "torch_compile": 'stages are compiled when they are loaded; write "compile": true under tensor_parallel instead',
    "fp16_full_eval": "a stage is evaluated in the precision that it has",
    "bf16_full_eval": "a stage is evaluated in the precision that it has; use bf16",
    "neftune_noise_alpha": "its noise depends on the length of the sequence, but segments are embedded one by one",
    "auto_find_batch_size": "a rank that runs out of memory would leave the others waiting; set the batch size",
    "activation_offloading": "units of a pipeline free their activations in another order; leave it out",
}
#: Trainers of TRL that train the model's own loss, and those that train a function of its outputs.
_OWN_LOSS, _GIVEN_LOSS = ("SFTTrainer",), ("RewardTrainer", "DPOTrainer", "KTOTrainer")
#: Arguments of theirs that can't be set with a pipeline, and why.
_REFUSED_OF_TRL = {
    "precompute_ref_log_probs": "the reference's forwards run in each step; leave it out",
    "sync_ref_model": "it copies weights between models whose stages nobody has compared; leave it out",
}
#: Of a checkpoint's client state: the schedule of the learning rate, if it is the Trainer's own.
_SCHEDULE = "trainer_schedule"
#: Likewise: the names of the parameters in each of the groups that the schedule has lists by.
_GROUPS = "trainer_schedule_groups"


class CuboidTrainer(Trainer):
    """A ``transformers.Trainer`` that also runs pipelines.

    Takes the arguments of ``Trainer``. Where ``TrainingArguments(deepspeed=…)`` has ``pipeline.engine``, the
    ``gradient_accumulation_steps`` micro-batches of an optimizer step, fewer at the end of an epoch, go through one
    ``train_batch`` of the engine. Everything around it, such as logs, callbacks, schedules and checkpoints, is the
    Trainer's own. The loss is the mean over the label tokens of the whole batch, over all replicas.

    In front of another subclass of ``Trainer``, as in ``class Mine(CuboidTrainer, SFTTrainer)``, it runs that in a
    pipeline, if it trains the model's own loss. An own ``compute_loss`` may report what it likes: it is called after
    the units of a step, with a model that returns what the last stage computed
    (:class:`~cuboid.integrations.trainer_loss.TokenOutput`), and its derivatives are compared with the own loss's.

    With ``trains_compute_loss = True`` in its class, and for some trainers of TRL, the pipeline trains what
    ``compute_loss`` returns, a function of the log-probabilities of the label tokens, or of the outputs for each row
    (:class:`~cuboid.integrations.trainer_loss.PipelineModel`).

    Attributes:
        trains_compute_loss: whether to train what ``compute_loss`` returns. None: if it is of a known trainer of TRL.

    On meshes too, the loss of an evaluation is the mean over all labels of all replicas, each counted once, in batches
    of any size; with ``average_tokens_across_devices=False``, or a ``compute_loss`` of its own, it is the ``Trainer``'s
    mean of batches.

    Without a pipeline it is otherwise the ``Trainer``, except that checkpoints have no pickles: what the ``Trainer``
    pickles beside the engine's files is in these, and a run goes on to the same digits, dropout included.

    Raises:
        ConfigError: an argument or a base class asks for what a pipeline can't do, such as logits.
        CuboidError: in the first step, before the optimizer's, if ``compute_loss`` is another than the model's own.
        OptimizerError: the schedule is of another optimizer than the one given with it.
    """

    trains_compute_loss: bool | None = None
    model: Any
    ref_model: Any
    deepspeed: Any
    optimizer: Any
    lr_scheduler: Any
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before TRL's trainers begin: they would make an engine, and run it, to compute these.
        for arguments in (one for one in (*args, *kwargs.values()) if isinstance(one, TrainingArguments)):
            _reject_arguments_of_trl(arguments)
        super().__init__(*args, **kwargs)
        config = config_of_trainer(self)
        self._runs_pipeline = config is not None and config.pipeline is not None
        if any(isinstance(callback, RunProgressCallback) for callback in self.callback_handler.callbacks):
            for shown_twice in (ProgressCallback, PrinterCallback):
                self.remove_callback(shown_twice)
        self._micro_batches: list[Any] = []
        #: In an evaluation whose loss is the mean over labels.
        self._evaluation: EvaluationLoss | None = None
        if config is not None and self._runs_pipeline:
            self._reject_what_has_no_rule(config)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``, once: the first call's engine has the optimizer's state, and ends with the next call.

        ``resume_from_checkpoint=True`` passes over what a killed run has left half written. A checkpoint of the last
        step is trained no further.

        Raises:
            CuboidError: it was called before, without a ``model_init`` that makes a new model.
            CheckpointError: the checkpoint isn't whole.
        """
        if self.model_init is None and self._checkpoints_engine:
            raise CuboidError(
                "train() was called before on this trainer: a second call would go on with the first one's engine, "
                "which it destroys, and an optimizer that steps nothing. Make new TrainingArguments, and a new trainer "
                "of trainer.model; to go on with the optimizer's state too, give its train() a checkpoint, "
                "resume_from_checkpoint"
            )
        if config_of_trainer(self) is not None:
            resume_from_checkpoint = checkpoint_to_resume(self, resume_from_checkpoint)
        self._micro_batches.clear()
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            # The Trainer tells its callbacks of an end, not of a failure.
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, InterruptCallback | RunLockCallback | RunProgressCallback):
                    callback.release(type(error), error, error.__traceback__)
            raise

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            # The Trainer makes a step before it looks whether it was the last.
            self.control.should_training_stop = True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.log``, with the rates of a :class:`MetricsCallback` for all loggers, if there is one."""
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, MetricsCallback):
                    logs.update(callback.rates(self.state))
        super().log(logs, *args, **kwargs)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Collect a micro-batch; with the last one of its accumulation group, run the whole optimizer step.

        Args:
            model: the engine.
            inputs: a micro-batch, as :func:`cuboid.models.batch.broadcast.read_micro_batch` takes it.
            num_items_in_batch: label tokens of the step's micro-batches in all replicas; None: counted by the engine.

        Returns:
            This call's part of the step's loss, a scalar tensor: all of it with the last micro-batch, else 0.
        """
        if not self._runs_pipeline:
            return super().training_step(model, inputs, num_items_in_batch)
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        group, self._micro_batches = self._micro_batches, []
        if self._trains_given:
            loss = self._train_given(model, group, num_items_in_batch)
        else:
            loss = self._train_own(model, group, num_items_in_batch)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss

    def _train_own(self, model: Any, group: list[dict[str, Any]], num_items_in_batch: Any) -> torch.Tensor:
        """A step of the model's own loss."""
        pipeline, kind = model.pipeline, sharding_of(self.model).kind
        if num_items_in_batch is not None and kind.labels_each_token:
            # As counted before an own training_step changed labels.
            pipeline.given_items = int(num_items_in_batch)
        try:
            with _step_of(model, len(group)), self._reporting(pipeline, group, num_items_in_batch):
                loss: torch.Tensor = model.train_batch(iter(group))
        finally:
            pipeline.given_items = None
        return loss

    def _train_given(self, engine: Any, group: list[dict[str, Any]], num_items_in_batch: Any) -> torch.Tensor:
        """A step of the loss that ``compute_loss`` returns."""
        engine.train()
        micro_batches, losses = [], []
        for inputs in group:
            with self._called_in_pipeline(engine.pipeline) as model, self.compute_loss_context_manager():
                micro_batch, loss = model.given(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
            micro_batches.append(micro_batch)
            losses.append(loss)
        engine.pipeline.given_losses = losses
        try:
            with _step_of(engine, len(group)):
                engine.train_batch(iter(micro_batches))
        finally:
            engine.pipeline.given_losses = None
        # The replicas' mean is what the Trainer logs.
        return mean_of(losses)

    @contextmanager
    def _called_in_pipeline(self, pipeline: Pipeline) -> Iterator[PipelineModel]:
        """In the ``with`` block, the model and a reference model may be called; yields the model."""
        name, reference = type(self).__name__, getattr(self, "ref_model", None)
        model, before = PipelineModel(self.model, pipeline, name), self.model
        self.model = model
        if reference is not None:
            self.ref_model = PipelineModel(reference, reference.pipeline, name)
        try:
            yield model
        finally:
            self.model = before
            if reference is not None:
                self.ref_model = reference

    @property
    def _trains_given(self) -> bool:
        if self.trains_compute_loss is not None:
            return self.trains_compute_loss
        of_trl = trainer_of_trl(type(self))
        return of_trl is not None and name_in_trl(of_trl) in _GIVEN_LOSS

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As ``Trainer.evaluation_loop``, with a loss that is the mean over all labels; in a pipeline, the loss only.

        In a pipeline it also works before training, without an engine.
        """
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not self._evaluates_own_loss:
            return self._evaluation_loop(*arguments)
        evaluation = EvaluationLoss(self.model, self.accelerator, skips_non_finite=self.args.logging_nan_inf_filter)
        # Each batch's loss is the mean over its own labels; otherwise the Trainer scales it by those of all processes.
        accepts, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, False
        self._evaluation = evaluation
        try:
            output = self._evaluation_loop(*arguments)
        finally:
            self._evaluation, self.model_accepts_loss_kwargs = None, accepts
        name, mean = f"{metric_key_prefix}_loss", evaluation.over_ranks()
        if name in output.metrics and not math.isnan(mean):
            output.metrics[name] = mean
        return output

    def _evaluation_loop(self, *arguments: Any) -> Any:
        if not self._runs_pipeline or self.deepspeed is not None:
            return super().evaluation_loop(*arguments)
        # Without an engine, the Trainer would demand ZeRO-3 and make one; a loss needs neither.
        self.deepspeed = Pipeline(self.model.to(self.args.device))
        try:
            return super().evaluation_loop(*arguments)
        finally:
            self.deepspeed = None

    @property
    def _evaluates_own_loss(self) -> bool:
        """Whether the loss of an evaluation is the model's own, and all its labels are to count alike."""
        is_own = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        return is_own and self.args.average_tokens_across_devices and EvaluationLoss.is_known_of(self.model)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As ``Trainer.prediction_step``; in a pipeline, the loss of an evaluation batch, without logits and labels.

        Raises:
            CuboidError: in a pipeline, logits are asked for, or the batch has no labels.
        """
        if self._evaluation is not None:
            inputs = self._evaluation.counted_once(inputs)
        loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys)
        if self._evaluation is not None and loss is not None:
            self._evaluation.add(inputs, loss)
        return loss, logits, labels

    def _predict(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        if not self._runs_pipeline:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if not prediction_loss_only:
            raise CuboidError(
                "a pipeline has no predictions, since the logits of a batch are never in one place; for the loss call "
                "evaluate(), or set TrainingArguments.prediction_loss_only"
            )
        batch = self._prepare_inputs(inputs)
        pipeline = model if isinstance(model, Pipeline) else model.pipeline
        if self._trains_given:
            self.model.eval()
            with torch.no_grad(), self._called_in_pipeline(pipeline) as called, self.compute_loss_context_manager():
                return self.compute_loss(called, batch).detach(), None, None
        with self._reporting(pipeline, [batch], None) as reported:
            if isinstance(model, Pipeline):
                self.model.eval()
                loss = model.evaluate(iter([batch]), 1)
            else:
                loss = model.eval_batch(iter([batch]), num_micro_batches=1)
        # An own compute_loss gives this replica's loss, as in the Trainer, and not that of all replicas together.
        return (reported[0] if reported else loss), None, None

    @contextmanager
    def _reporting(self, pipeline: Pipeline, batches: list[dict[str, Any]], items: Any) -> Iterator[list[torch.Tensor]]:
        """In the ``with`` block, a step of the pipeline calls an overridden ``compute_loss`` for each micro-batch.

        Yields a list for the losses that it returns.
        """
        losses: list[torch.Tensor] = []
        if type(self).compute_loss is Trainer.compute_loss:
            yield losses
            return
        # The Trainer divides by the mean number of tokens of a process.
        replicas = (
            self.accelerator.num_processes if items is not None and self.args.average_tokens_across_devices else 1
        )

        def report(values: list[torch.Tensor]) -> None:
            for batch, tokens in zip(batches, values, strict=True):
                model = TokenModel(self.model, tokens)
                with torch.enable_grad():
                    loss = self.compute_loss(model, dict(batch), num_items_in_batch=items)
                mask = predicted(batch.get("labels"), batch.get("shift_labels"), IGNORE_INDEX) != IGNORE_INDEX
                count = mask.sum().clamp(min=1) if items is None else items
                check_own_loss(type(self).__name__, loss, model, mask, replicas / count)
                losses.append(loss.detach())

        pipeline.observe_outputs = report
        try:
            yield losses
        finally:
            pipeline.observe_outputs = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``; a checkpoint to resume from has the arguments as JSON, not pickled."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and self._checkpoints_engine and self.args.should_save and output_dir is not None:
            folder = Path(output_dir)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            (folder / "training_args.json").write_text(self.args.to_json_string(), encoding="utf-8")

    @property
    def _checkpoints_engine(self) -> bool:
        """Whether an engine of Cuboid's writes all that a run is resumed from."""
        return isinstance(self.model_wrapped, CheckpointedEngine)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._checkpoints_engine:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        client_state = self._schedule_state()
        has_adapters = sharding_of(self.model).state.adapters is not None
        self.model_wrapped.save_checkpoint(
            output_dir, client_state=client_state, exclude_frozen_parameters=has_adapters
        )

    def _schedule_state(self) -> dict[str, Any]:
        """Of a schedule that the engine hasn't, which the Trainer pickles: what goes into the client state."""
        if self._has_engines_schedule:
            return {}
        groups = [list(names) for names in self.model_wrapped.checkpointing.groups]
        return {_SCHEDULE: self.lr_scheduler.state_dict(), _GROUPS: groups}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        loaded = self.model_wrapped.loaded if self._checkpoints_engine else None
        if loaded is None or self._has_engines_schedule:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = loaded.document["client"].get(_SCHEDULE)
        if state is None:
            # Checkpoints of the plain Trainer, and of earlier versions, have the pickle.
            super()._load_optimizer_and_scheduler(checkpoint)
            state = self.lr_scheduler.state_dict()
        self._load_schedule(self.model_wrapped, loaded, state)

    def _load_schedule(self, engine: CheckpointedEngine, loaded: CheckpointMetadata, state: Mapping[str, Any]) -> None:
        """Restore the schedule that the engine hasn't."""
        groups = loaded.document["client"].get(_GROUPS) or _groups_of_optimizer(loaded)
        if groups:
            # Its lists have the order of the parameter groups, which may be another one on other stages.
            state = engine.checkpointing.schedule_in_order(loaded, state, groups, self.lr_scheduler)
        self.lr_scheduler.load_state_dict(state)

    @property
    def _has_engines_schedule(self) -> bool:
        return isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper)

    def _save_rng_state(self, output_dir: str) -> None:
        # The engine's checkpoint has them.
        if not self._checkpoints_engine:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Once more: the data loader has drawn numbers since the engine restored them.
        if checkpoint is not None and self._checkpoints_engine and self.model_wrapped.loaded is not None:
            self.model_wrapped.checkpointing.restore_random(self.model_wrapped.loaded)
        else:
            super()._load_rng_state(checkpoint)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        # The result is passed to prediction_step, which needs the engine or the Pipeline: a stage has no forward.
        if self._runs_pipeline and not training:
            return self.deepspeed
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    def _reject_what_has_no_rule(self, config: CuboidConfig) -> None:
        args: TrainingArguments = self.args
        for name, reason in _REFUSED.items():
            if getattr(args, name, None):
                raise ConfigError(f"TrainingArguments.{name} can't be combined with pipeline.engine seq1f1b: {reason}")
        if args.use_liger_kernel:
            why = why_refused(args.liger_kernel_config)
            raise ConfigError(f"TrainingArguments.use_liger_kernel can't be combined with a pipeline: {why}")
        if not args.average_tokens_across_devices and args.world_size > config.ranks:
            raise ConfigError(
                "TrainingArguments.average_tokens_across_devices=False can't be combined with pipeline.engine seq1f1b, "
                "whose loss is the mean over the label tokens of all replicas; leave it True"
            )
        if self.compute_loss_func is not None:
            raise ConfigError(
                "compute_loss_func: a pipeline computes the model's own loss, on the last stage and in pieces; leave "
                "it out"
            )
        if self._trains_given:
            self._reject_unknown_outputs(config)
        else:
            self._reject_other_losses()
        if self.compute_metrics is not None and not args.prediction_loss_only:
            raise ConfigError(
                "compute_metrics needs logits, which a pipeline never has in one place; leave it out, or set "
                "TrainingArguments.prediction_loss_only to have the loss only"
            )

    def _reject_unknown_outputs(self, config: CuboidConfig) -> None:
        """Refuse what ``compute_loss`` can't be given, or a pipeline can't train."""
        name, stage = type(self).__name__, cast(Any, unwrap(self.model))
        assert config.pipeline is not None
        if config.pipeline.spreads_head:
            raise ConfigError(
                f'pipeline.head is "spread", and {name}.compute_loss computes with values of the label tokens, which '
                'no rank has then; write "head": "last"'
            )
        outline = stage.staging.plan.outline
        if outline.router_loss is not None or self._adds_router_loss:
            raise ConfigError(
                f"{name}.compute_loss trains a loss of its own, to which a pipeline can't add that of the routers; set "
                "output_router_logits of the model's config to False and router_aux_loss_coef=0.0"
            )
        if not isinstance(outline.kind, Causal | RowClassifier):
            raise ConfigError(
                f"{name}.compute_loss: a pipeline trains a loss of log-probabilities of tokens or of the labels of "
                f"whole rows, and has no rule for {outline.kind.words}; use it on a mesh without stages"
            )

    @property
    def _adds_router_loss(self) -> bool:
        # A trainer of TRL may take the coefficient of the model's config.
        return bool(getattr(self, "aux_loss_enabled", False) or getattr(self.args, "router_aux_loss_coef", None))

    def _reject_other_losses(self) -> None:
        """Refuse what is known to train another loss than the model's own; the rest is compared in each step."""
        name, of_trl = type(self).__name__, trainer_of_trl(type(self))
        if of_trl is not None and name_in_trl(of_trl) not in _OWN_LOSS:
            raise ConfigError(
                f"{name}: TRL's {name_in_trl(of_trl)} trains a loss of its own, and a pipeline computes the model's, "
                "on the last stage and in pieces; use it on a mesh without stages"
            )
        if type(self).compute_loss is Trainer.compute_loss:
            return
        stage: Any = unwrap(self.model)
        if not stage.cuboid.kind.labels_each_token:
            raise ConfigError(
                f"{name}.compute_loss: a pipeline computes the model's own loss, on the last stage; leave it out"
            )
        if getattr(self.args, "loss_type", "nll") != "nll":
            raise ConfigError(
                f"loss_type={self.args.loss_type!r} can't be combined with pipeline.engine seq1f1b, which computes the "
                'model\'s own loss, "nll"'
            )
        if getattr(self, "aux_loss_enabled", False):
            raise ConfigError(
                f"router_aux_loss_coef={self.router_aux_loss_coef}: in a pipeline, {name} has no router loss of each "
                "micro-batch to report; set router_aux_loss_coef=0.0"
            )


def _groups_of_optimizer(loaded: CheckpointMetadata) -> list[list[str]]:
    """The names of the parameters in each group of a checkpoint's optimizer; none if a group has nothing to train."""
    optimizer = loaded.document.get("optimizer") or {"groups": []}
    groups = [group["parameters"] for group in optimizer["groups"]]
    return groups if all(groups) else []


def _reject_arguments_of_trl(args: TrainingArguments) -> None:
    config = config_in_plugin(getattr(args, "deepspeed_plugin", None))
    if config is None or config.pipeline is None:
        return
    for name, reason in _REFUSED_OF_TRL.items():
        if getattr(args, name, False):
            raise ConfigError(f"{name} can't be combined with pipeline.engine seq1f1b: {reason}")


@contextmanager
def _step_of(engine: Any, micro_batches: int) -> Iterator[None]:
    """Context in which an engine step has this number of micro-batches: an epoch's last step may have fewer."""
    usual = engine.train_batch_size()
    engine.set_train_batch_size(micro_batches * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    try:
        yield
    finally:
        engine.set_train_batch_size(usual)
