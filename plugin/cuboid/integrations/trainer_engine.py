"""What the Trainer does around DeepSpeed's engine, and what it must not do with a sharded model's."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType

from cuboid.checkpoint.format.folder import INCOMPLETE
from cuboid.config.schema import CuboidConfig, split_config
from cuboid.errors import CheckpointError, ConfigError
from cuboid.integrations.handoff import adopt_model, check_schedule
from cuboid.models.kinds.registry import check_unadapted
from cuboid.models.sharded.sharded_model import ShardedModel, mesh_of, unwrap

logger = logging.getLogger(__name__)

#: The file that the Trainer writes last into a checkpoint.
_STATE = "trainer_state.json"
#: Of a trainer: its :class:`GivenOptimizer`.
_GIVEN = "cuboid_given_optimizer"


@dataclass(frozen=True)
class GivenOptimizer:
    """What a Trainer's argument ``optimizers`` gave it. With DeepSpeed, ``train`` forgets it and makes AdamW."""

    optimizer: torch.optim.Optimizer | None
    schedule: Any

    @classmethod
    def keep(cls, trainer: Any) -> None:
        """Keep those of a Trainer that has just been made.

        Raises:
            ConfigError: the config has a section for one of them, too.
            OptimizerError: the schedule is of another optimizer.
        """
        plugin = trainer.accelerator.state.deepspeed_plugin
        by_section = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        for section, one in by_section.items():
            if one is not None and section in plugin.deepspeed_config:
                raise ConfigError(
                    f"Trainer(optimizers=…) gives a {type(one).__name__}, but the config has a section {section} too; "
                    "give one of the two"
                )
        check_schedule(trainer.lr_scheduler, trainer.optimizer)
        setattr(trainer, _GIVEN, cls(trainer.optimizer, trainer.lr_scheduler))

    @staticmethod
    def put_back(trainer: Any) -> None:
        """Give a Trainer what it has forgotten."""
        kept: GivenOptimizer | None = getattr(trainer, _GIVEN, None)
        if kept is not None:
            trainer.optimizer = kept.optimizer if trainer.optimizer is None else trainer.optimizer
            trainer.lr_scheduler = kept.schedule if trainer.lr_scheduler is None else trainer.lr_scheduler


@contextmanager
def evaluating_without_engine(trainer: Any, config: CuboidConfig) -> Iterator[None]:
    """In the ``with`` block, a Trainer that hasn't trained yet evaluates the sharded model itself.

    It would demand ZeRO 3 and make an engine for it, which a forward on a mesh doesn't need.
    """
    if config.pipeline is not None or trainer.deepspeed is not None:
        yield
        return
    model = adopt_model(trainer.model, config).to(trainer.args.device)
    trainer.deepspeed = model
    # The Trainer lets accelerate prepare a model, unless there is one.
    prepared: list[Any] = trainer.accelerator._models
    prepared.append(model)
    try:
        yield
    finally:
        trainer.deepspeed = None
        prepared.remove(model)


def check_trainer(trainer: Any, config: CuboidConfig) -> None:
    """Check what a Trainer with a config of Cuboid's was made with, before it trains.

    Raises:
        ConfigError: an argument has no rule.
        UnsupportedModelError: the model has adapters, and isn't sharded.
    """
    model: Any = unwrap(trainer.model)
    if not isinstance(model, ShardedModel):
        check_unadapted(trainer.model)
    # CuboidTrainer says why a pipeline doesn't take it.
    if config.pipeline is None and getattr(trainer.args, "neftune_noise_alpha", None) is not None:
        raise ConfigError(
            "TrainingArguments.neftune_noise_alpha can't be combined with tensor_parallel.mode 3d_tensor: its noise "
            "depends on the sizes of the whole embeddings, of which a rank has a part; leave it out"
        )


def check_has_engine(trainer: Any) -> None:
    """Check that a Trainer that was given a sharded model, without a config, can train it.

    Raises:
        ConfigError: it trains shards without DeepSpeed, whose states it would save of rank 0 alone.
    """
    mesh = mesh_of(trainer.model)
    uses_deepspeed = trainer.accelerator.distributed_type is DistributedType.DEEPSPEED
    if len(mesh.copy_ranks) > 1 and trainer.train_dataset is not None and not uses_deepspeed:
        raise ConfigError(
            f"the Trainer is given a model that is sharded over {len(mesh.copy_ranks)} ranks, and no DeepSpeed config: "
            "its checkpoints would have the optimizer's states of one rank. Give TrainingArguments(deepspeed=…) a "
            "config, best the one that shards the model; ZeRO 0 will do"
        )


def checkpoint_to_resume(trainer: Any, checkpoint: str | bool | None) -> str | bool | None:
    """What a Trainer is to resume from, given the argument of its ``train``.

    The Trainer takes the newest folder, also one that a killed run has left half written; here it is the newest that is
    whole, and none if there are only such.

    Raises:
        CheckpointError: the folder that is given isn't whole.
    """
    if not isinstance(checkpoint, bool | None):
        if Path(checkpoint).is_dir() and not _is_whole(Path(checkpoint)):
            raise CheckpointError(
                f"{checkpoint}: isn't whole: the run that wrote it ended meanwhile, or it was saved with "
                "save_only_model. resume_from_checkpoint=True takes the newest that is"
            )
        return checkpoint
    numbered = {path: path.name.rpartition("-")[2] for path in Path(trainer.args.output_dir).glob("checkpoint-*")}
    folders = sorted((path for path, number in numbered.items() if number.isdigit()), key=lambda p: int(numbered[p]))
    if not checkpoint or not folders:
        return checkpoint
    newest = next((path for path in reversed(folders) if _is_whole(path)), None)
    if newest != folders[-1] and trainer.is_world_process_zero():
        instead = "beginning a new run" if newest is None else f"resuming from {newest}"
        logger.warning("%s isn't whole: its run ended while it was written; %s", folders[-1], instead)
    return None if newest is None else str(newest)


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint of a Trainer with an engine was finished, which may write its part in the background."""
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(path.is_dir() and path.suffix != INCOMPLETE for path in checkpoint.glob("global_step*"))


def config_of_trainer(trainer: Any) -> CuboidConfig | None:
    """Cuboid's sections of the config that a Trainer was given; None without one."""
    return config_in_plugin(getattr(trainer.accelerator.state, "deepspeed_plugin", None))


def config_in_plugin(plugin: Any) -> CuboidConfig | None:
    """Cuboid's sections of the config that accelerate's DeepSpeed plugin has; None without a plugin."""
    return None if plugin is None else split_config(plugin.deepspeed_config)[0]
