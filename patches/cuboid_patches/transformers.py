"""Patches of transformers."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.integrations.deepspeed import deepspeed_config
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from cuboid.config.schema import CuboidConfig, split_config
from cuboid.distributed.mesh import current_world_size
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.failures.rank_agreement import naming_lost_ranks, run_on_all_ranks
from cuboid.integrations.trainer_classes import is_cuboid_trainer, name_in_trl, trainer_of_trl
from cuboid.integrations.trainer_engine import (
    GivenOptimizer,
    check_has_engine,
    check_trainer,
    config_of_trainer,
    evaluating_without_engine,
)
from cuboid.models.architectures.liger import why_refused
from cuboid.models.attention.interface import attention_of, mask_of
from cuboid.models.attention.packing import packed_indices
from cuboid.models.plain_construction import is_plain_construction
from cuboid.models.sharded.sharded_model import ShardedModel, plain_class, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.weights.api import active_config
from cuboid.weights.from_scratch import make_sharded
from cuboid.weights.load import LoadingModel, load_sharded
from cuboid.weights.model_folder import CONFIG, as_damage_of, folder_of, read_config
from cuboid_patches.accelerate import own_copy, shared_config
from cuboid_patches.base import Patch

#: Trainers of TRL whose losses and metrics on a mesh were compared with those in one process.
_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer")
#: Arguments of TRL's online trainers that generate otherwise than by ``generate``, or change weights, and why not.
_REFUSED_OF_TRL = {
    "use_vllm": "vLLM is given whole weights, of which each rank has a shard; leave it out, and generate does it",
    "use_transformers_continuous_batching": "its paged cache has no rule for heads that are cut; leave it out",
    "cast_lm_head_to_fp32": "it replaces the head, which is cut; load the model in float32",
    "sync_ref_model": "it copies shards that gathered copies may be kept of; leave it out",
}
#: Whether ``TrainingArguments.world_size`` is asked for the sake of data.
_counts_replicas: ContextVar[bool] = ContextVar("cuboid_counts_replicas", default=False)


def _from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        cls = plain_class(cls)
        active = active_config.get() or _config_kept_alive()
        if active is None or issubclass(cls, LoadingModel):
            return original.__func__(cls, *args, **kwargs)
        return load_sharded(cls, original.__func__, active, args, kwargs)

    return classmethod(from_pretrained)


def _from_config(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        cls, active = plain_class(cls), active_config.get()
        if active is None or is_plain_construction() or issubclass(cls, LoadingModel):
            return original.__func__(cls, *args, **kwargs)
        return make_sharded(cls, original.__func__, active, args, kwargs)

    return classmethod(from_config)


def _config_from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (active_config.get() or _config_kept_alive()) is None:
            return original.__func__(cls, *args, **kwargs)
        # Without an answer, transformers would ask on the terminal of each rank whether to run a model's own code.
        kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
        folder = folder_of(args, kwargs)
        if folder is None or not os.path.lexists(folder / CONFIG):
            return original.__func__(cls, *args, **kwargs)
        # Rejects implausible counts first: for a billion layers, transformers would build a list of their types.
        read_config(folder / CONFIG)
        with as_damage_of(folder / CONFIG):
            return original.__func__(cls, *args, **kwargs)

    return classmethod(from_pretrained)


def _trainer(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config, own_steps = _config_kept_alive(), sys.modules["transformers.trainer"].Trainer.training_step
        if config is not None and config.ranks > 1:
            _check_trl(type(self), *args, *kwargs.values())
        if config is not None and config.pipeline is not None:
            _check_runs_pipeline(type(self), own_steps)
        original(self, *args, **kwargs)
        # Also where it is the model alone that is sharded.
        is_sharded = config is not None or isinstance(unwrap(self.model), ShardedModel)
        if config is None and is_sharded:
            check_has_engine(self)
        if self.args.use_liger_kernel and is_sharded:
            why = why_refused(self.args.liger_kernel_config)
            raise UnsupportedModelError(f"TrainingArguments.use_liger_kernel has no rule for a sharded model: {why}")
        trainer_config = config_of_trainer(self)
        if trainer_config is not None:
            check_trainer(self, trainer_config)
            GivenOptimizer.keep(self)

    return init


def _uses_given_optimizer(original: Any) -> Any:
    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _config_kept_alive()
        if config is not None and config.ranks > 1:
            # PPOTrainer, for one, doesn't call ``Trainer.__init__``, which would have refused it.
            _check_trl(type(self))
        GivenOptimizer.put_back(self)
        return original(self, *args, **kwargs)

    return create


def _evaluation_loop(original: Any) -> Any:
    @functools.wraps(original)
    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = config_of_trainer(self)
        if config is None:
            return original(self, *args, **kwargs)
        with evaluating_without_engine(self, config):
            return original(self, *args, **kwargs)

    return evaluation_loop


def _finalize_training(original: Any) -> Any:
    @functools.wraps(original)
    def finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        if config_of_trainer(self) is not None:
            # A rank may stop earlier than the others, whose next collective would take its next one for theirs.
            run_on_all_ranks(lambda: None, what="the end of training")
        return original(self, *args, **kwargs)

    return finalize_training


def _naming_lost_ranks(original: Any) -> Any:
    return naming_lost_ranks(original, "the Trainer's gather")


def _check_runs_pipeline(trainer: type[Any], own_steps: Any) -> None:
    of_trl = trainer_of_trl(trainer)
    # A trainer whose steps are its own may call the engine's train_batch.
    if is_cuboid_trainer(trainer) or (of_trl is None and trainer.training_step is not own_steps):
        return
    instead = "use cuboid.CuboidTrainer in its place"
    if of_trl is not None or trainer.__module__.partition(".")[0] != "transformers":
        instead = f"put cuboid.CuboidTrainer in front: class Mine(CuboidTrainer, {trainer.__name__}): pass"
    raise ConfigError(
        "pipeline.engine seq1f1b makes an optimizer step at once, for which transformers.Trainer has no call; "
        + instead
    )


def _check_trl(trainer: type[Any], *arguments: Any) -> None:
    """Refuse a trainer of TRL, or one derived from it, that wasn't compared with its results in one process.

    Args:
        trainer: its class.
        arguments: what it is made with, its ``TrainingArguments`` among that.
    """
    of_trl = trainer_of_trl(trainer)
    if of_trl is None:
        return
    name_of_trainer = name_in_trl(of_trl)
    if name_of_trainer in _TRL:
        options = [one for one in arguments if isinstance(one, sys.modules["transformers.trainer"].TrainingArguments)]
        for name, reason in _REFUSED_OF_TRL.items():
            if any(getattr(one, name, False) for one in options):
                raise ConfigError(f"{name} can't be combined with tensor_parallel.mode 3d_tensor: {reason}")
        return
    if of_trl.__name__ in _TRL:
        raise UnsupportedModelError(
            f"TRL's {name_of_trainer} has no rule where several ranks hold one model, as it wasn't compared yet; the "
            f"{of_trl.__name__} of trl itself was: from trl import {of_trl.__name__}"
        )
    raise UnsupportedModelError(
        f"TRL's {name_of_trainer} has no rule where several ranks hold one model: it deals prompts, completions or "
        f"rewards out to ranks by itself, or wasn't compared yet; {', '.join(_TRL[:-1])} and {_TRL[-1]} were"
    )


def _get_tp_size(original: Any) -> Any:
    @functools.wraps(original)
    def get_tp_size(self: Any) -> int:
        # The Trainer divides by it what accelerate counted by ranks; here, accelerate counts replicas.
        return original(self) if shared_config() is None else 1

    return get_tp_size


@contextmanager
def counted_in_replicas() -> Iterator[None]:
    """In the ``with`` block, ``TrainingArguments.world_size`` counts replicas, as ``Accelerator.num_processes`` does.

    Elsewhere it stays the number of ranks: the Trainer asks it whether files are one for each rank.
    """
    token = _counts_replicas.set(True)
    try:
        yield
    finally:
        _counts_replicas.reset(token)


def _world_size(original: Any) -> Any:
    def world_size(self: Any) -> int:
        ranks, config = int(original.fget(self)), shared_config() if _counts_replicas.get() else None
        return ranks if config is None else ranks // config.ranks

    return property(world_size)


def _total_train_batch_size(original: Any) -> Any:
    @functools.wraps(original)
    def get_total_train_batch_size(self: Any, args: Any) -> int:
        if shared_config() is None:
            return int(original(self, args))
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    return get_total_train_batch_size


def _seed_worker(original: Any) -> Any:
    @functools.wraps(original)
    def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
        config = shared_config()
        original(worker_id, num_workers, rank if config is None else own_copy(config))

    return seed_worker


def _rebalance(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound, config = signature.bind(self, *args, **kwargs), shared_config()
        if config is not None and bound.arguments["dp_size"] == current_world_size():
            replicas = current_world_size() // config.ranks
            rows = bound.arguments["effective_batch_size"] // config.ranks
            bound.arguments.update(dp_size=replicas, rank=own_copy(config), effective_batch_size=rows)
        original(*bound.args, **bound.kwargs)

    return init


def _save_model(original: Any) -> Any:
    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Perhaps PEFT's, around a sharded one; then it writes its adapters.
        model = self.model
        if not isinstance(unwrap(model), ShardedModel):
            original(self, output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        model.save_pretrained(folder)
        if self.args.should_save:
            # Saves everything but the weights: the tokenizer and the training arguments.
            self._save(folder, state_dict={})
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    return save_model


def _floating_point_ops(original: Any) -> Any:
    @functools.wraps(original)
    def floating_point_ops(self: Any, inputs: dict[str, Any]) -> int:
        operations: int = original(self, inputs)
        model = unwrap(self.model)
        # The Trainer sums over all ranks, but the ranks of one copy of the model share the operations of a batch.
        if not isinstance(model, ShardedModel):
            return operations
        if isinstance(model, StageModel):
            # Each rank counts the operations of its own parameters.
            parameters: int = PreTrainedModel.num_parameters(model, exclude_embeddings=True)  # type: ignore[arg-type]
            return 6 * inputs["input_ids"].numel() * parameters
        return operations // len(model.cuboid.mesh.copy_ranks)

    return floating_point_ops


def _config_kept_alive() -> CuboidConfig | None:
    """Cuboid's part of the active ``HfDeepSpeedConfig``, if there is one."""
    source = deepspeed_config()
    return None if source is None else split_config(source)[0]


def _function_of_interface(original: Any) -> Any:
    @functools.wraps(original)
    def getitem(self: Any, key: str) -> Any:
        function = original(self, key)
        if isinstance(self, AttentionInterface):
            return attention_of(key, function)
        return mask_of(key, function) if isinstance(self, AttentionMaskInterface) else function

    return getitem


def _get_interface(original: Any) -> Any:
    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        eager = attention_of("eager", default) if attn_implementation == "eager" else default
        return original(self, attn_implementation, eager)

    return get_interface


def _find_packed(original: Any) -> Any:
    @functools.wraps(original)
    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        return packed_indices(position_ids, original)

    return find_packed_sequence_indices


PATCHES = [
    Patch(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        package="transformers",
        reason="read only this rank's slices when a config of ours is active",
        parameters=("pretrained_model_name_or_path", "config", "kwargs"),
        replace=_from_pretrained,
    ),
    Patch(
        target="transformers.modeling_utils:PreTrainedModel._from_config",
        package="transformers",
        reason="make only this rank's slices in a scope of ours",
        parameters=("config", "kwargs"),
        replace=_from_config,
    ),
    Patch(
        target="transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
        package="transformers",
        reason="when a config of ours is active: report a damaged config.json by path and stop parsing it early, and "
        "don't ask on each rank's terminal whether to run a model's own code",
        parameters=("pretrained_model_name_or_path", "kwargs"),
        replace=_config_from_pretrained,
    ),
    Patch(
        target="transformers.trainer:Trainer.__init__",
        package="transformers",
        reason="refuse a pipeline, and kernels that replace sharded modules, at once and not at the first forward",
        parameters=("model", "args"),
        replace=_trainer,
    ),
    *(
        Patch(
            target=f"transformers.trainer:Trainer.{name}",
            package="transformers",
            reason="train with what optimizers=(…) gave: with DeepSpeed, the Trainer forgets it and makes its own",
            parameters=("self",),
            replace=_uses_given_optimizer,
        )
        for name in ("create_optimizer", "create_scheduler")
    ),
    Patch(
        target="transformers.trainer:Trainer.evaluation_loop",
        package="transformers",
        reason="evaluate a sharded model before training, where the Trainer would make an engine and demand ZeRO 3",
        parameters=("self",),
        replace=_evaluation_loop,
    ),
    Patch(
        target="transformers.trainer:Trainer._finalize_training",
        package="transformers",
        reason="say on all ranks that one has stopped training before the others",
        parameters=("self",),
        replace=_finalize_training,
    ),
    Patch(
        target="transformers.trainer_pt_utils:distributed_concat",
        package="transformers",
        reason="say why a rank was lost in a gather of losses",
        parameters=("tensor",),
        replace=_naming_lost_ranks,
    ),
    Patch(
        target="transformers.trainer:Trainer.get_tp_size",
        package="transformers",
        reason="don't divide what accelerate has counted by replicas",
        parameters=("self",),
        replace=_get_tp_size,
    ),
    Patch(
        target="transformers.training_args:TrainingArguments.world_size",
        package="transformers",
        reason="count replicas where arguments of TRL count prompts",
        parameters=("self",),
        replace=_world_size,
    ),
    Patch(
        target="transformers.trainer:Trainer.get_total_train_batch_size",
        package="transformers",
        reason="count the rows of replicas",
        parameters=("args",),
        replace=_total_train_batch_size,
    ),
    Patch(
        target="transformers.trainer:seed_worker",
        package="transformers",
        reason="let the loaders' workers of a replica's ranks draw the same numbers",
        parameters=("worker_id", "num_workers", "rank"),
        replace=_seed_worker,
    ),
    Patch(
        target="transformers.trainer_pt_utils:BatchRebalanceSampler.__init__",
        package="transformers",
        reason="share rows out among replicas",
        parameters=("effective_batch_size", "dp_size", "rank"),
        replace=_rebalance,
        since="5.17",
    ),
    Patch(
        target="transformers.trainer:Trainer.save_model",
        package="transformers",
        reason="let all ranks write a sharded model together, instead of gathering it on one",
        parameters=("output_dir", "_internal_call"),
        replace=_save_model,
    ),
    Patch(
        target="transformers.trainer:Trainer.floating_point_ops",
        package="transformers",
        reason="count the operations of a batch once, though several ranks compute it together",
        parameters=("inputs",),
        replace=_floating_point_ops,
    ),
    Patch(
        target="transformers.masking_utils:find_packed_sequence_indices",
        package="transformers",
        reason="don't wait for the device at every mask to know whether a micro-batch is packed",
        parameters=("position_ids",),
        replace=_find_packed,
    ),
    Patch(
        target="transformers.utils.generic:GeneralInterface.__getitem__",
        package="transformers",
        reason="let attention modules of a sharded model, and the masks that they need, take the whole sequence",
        parameters=("key",),
        replace=_function_of_interface,
    ),
    Patch(
        target="transformers.modeling_utils:AttentionInterface.get_interface",
        package="transformers",
        reason="the same for eager attention, which each model's file has for itself",
        parameters=("attn_implementation", "default"),
        replace=_get_interface,
    ),
]
