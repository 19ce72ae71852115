"""The public entry points: load a sharded model, shard one in memory, and the scope that shards ``from_pretrained``."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import ConfigSource
from cuboid.config.schema import CuboidConfig, require_config
from cuboid.distributed.determinism import use_deterministic
from cuboid.distributed.mesh import current_world_size
from cuboid.errors import CuboidError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.models.architectures.refusals import check_plain_weights, check_unquantized
from cuboid.models.attention.interface import check_model_options
from cuboid.models.certification.certificates import CodeCheck
from cuboid.models.cross_entropy.loss_function import check_loss_in_pipeline
from cuboid.models.kinds.registry import auto_class_of, check_model, kind_of_class
from cuboid.models.kinds.sharding import FormerParameters
from cuboid.models.sharded.customizations import check_as_made, check_hooks, made_anew
from cuboid.models.sharded.sharded_model import ShardedModel, sharding_of, unwrap
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.model_folder import CONFIG, folder_of, read_config, without_own_code
from cuboid.weights.resolve import resolve
from cuboid.weights.save import save_sharded

#: Arguments of ``from_pretrained`` that locate a config.
_OF_THE_HUB = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code", "code_revision")
#: Elements that ranks compare of each tensor of a model in memory, at most.
_SAMPLE = 256
#: The config of the innermost :func:`scope`, if any.
active_config: ContextVar[CuboidConfig | None] = ContextVar("cuboid_active_config", default=None)


@contextmanager
def scope(config: ConfigSource | CuboidConfig) -> Iterator[CuboidConfig]:
    """Context in which ``from_pretrained`` reads, and ``from_config`` makes, only this rank's slices.

    For the weights that are made, see :func:`from_config`.

    Args:
        config: a DeepSpeed config (path or dict) with Cuboid's keys.

    Raises:
        ConfigError: the config is invalid or doesn't enable Cuboid.
    """
    parsed = _checked(config)
    token = active_config.set(parsed)
    try:
        yield parsed
    finally:
        active_config.reset(token)


def _checked(source: ConfigSource | CuboidConfig) -> CuboidConfig:
    """Cuboid's part of a config, after checking that the framework's part is compatible with it."""

    def check() -> CuboidConfig:
        if isinstance(source, CuboidConfig):
            config = source
        else:
            config, rest = require_config(source)
            check_framework_config(config, rest, current_world_size())
        if config.deterministic:
            use_deterministic()
        return config

    # Ranks may be given different configs; without agreement here, a rank with an invalid one would leave the others
    # waiting for it in the first collective of loading.
    return run_on_all_ranks(check, what="the check of the config")


def from_pretrained(
    path: str | Path, config: ConfigSource | CuboidConfig, /, *, auto_class: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """``from_pretrained`` of ``AutoModelForCausalLM`` or another task's auto class, sharded as ``config`` says.

    Works before ``torch.distributed`` is initialised: the launcher's RANK and WORLD_SIZE are enough. If the checkpoint
    has no head for classification or question answering, a new one is made, the same in every run.

    Args:
        path: a Hugging Face checkpoint.
        config: a DeepSpeed config (path or dict) with Cuboid's keys.
        auto_class: such as ``AutoModelForSequenceClassification``; by default that of the checkpoint's
            ``architectures``.
        kwargs: passed to ``from_pretrained``. A model's own code is run with ``trust_remote_code=True`` alone: where
            transformers would ask on the terminal, each rank by itself, this raises.

    Raises:
        ConfigError, MeshError, UnsupportedModelError, CheckpointError: see :func:`cuboid.weights.load.load_sharded`.
    """
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
    with scope(config), without_own_code(path):
        # In the scope, the patched ``from_pretrained`` checks the folder's files before transformers reads them.
        auto_class = auto_class or auto_class_of(_architectures_of(path, kwargs))
        loaded: PreTrainedModel = auto_class.from_pretrained(path, **kwargs)
        return loaded


def _architectures_of(path: str | Path, kwargs: dict[str, Any]) -> list[str] | None:
    config, folder = kwargs.get("config"), folder_of((path,), kwargs)
    if config is None and folder is not None and os.path.lexists(folder / CONFIG):
        named = read_config(folder / CONFIG).get("architectures")
        # Of anything else, transformers says what is wrong with it.
        return named if isinstance(named, list) and all(isinstance(name, str) for name in named) else None
    if not isinstance(config, PretrainedConfig):
        asked = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
        config = AutoConfig.from_pretrained(path if config is None else config, **asked)
    return config.architectures


def from_config(
    model_config: PretrainedConfig, config: ConfigSource | CuboidConfig, /, *, auto_class: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """``from_config`` of ``AutoModelForCausalLM`` or another task's auto class, sharded as ``config`` says.

    Each rank makes its own slices only.

    With the same seed of torch's generator on all ranks, the weights are the same on every mesh, with every number of
    stages, and on one rank. They differ from those of plain transformers; see :mod:`cuboid.weights.from_scratch`.
    With different seeds, the first collective (in ``deepspeed.initialize``, ``boost`` or a forward) raises.

    Args:
        model_config: of the model to be made.
        config: a DeepSpeed config (path or dict) with Cuboid's keys.
        auto_class: as in :func:`from_pretrained`; by default that of the model config's ``architectures``.
        kwargs: passed to ``from_config``, such as ``dtype``; ``trust_remote_code`` as in :func:`from_pretrained`.

    Raises:
        ConfigError, MeshError, UnsupportedModelError: before any weight is made.
    """
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
    with scope(config), without_own_code(model_config._name_or_path or type(model_config).__name__):
        made: PreTrainedModel = (auto_class or auto_class_of(model_config.architectures)).from_config(
            model_config, **kwargs
        )
        return made


def shard(model: PreTrainedModel, config: ConfigSource | CuboidConfig) -> PreTrainedModel:
    """Shard a model in memory, in place, and reduce it to this rank's pipeline stage, as the config says.

    Every rank must have the same weights. Where samples of them differ, the first collective (in
    ``deepspeed.initialize``, ``boost`` or a forward) raises.

    Raises:
        ConfigError, MeshError, UnsupportedModelError: before the model is changed.
    """
    parsed = _checked(config)
    if isinstance(model, ShardedModel):
        raise CuboidError("the model is sharded already")
    check_model(model, stages=parsed.pipeline is not None)
    # Lets an optimizer that was made before sharding be recognized later.
    former = FormerParameters(model)
    sharded = _shard(model, parsed)
    state = sharding_of(sharded).state
    state.made.code = CodeCheck(sharded.cuboid.base, sharded.config)
    state.former, state.save = former, save_sharded
    return sharded


def _shard(model: PreTrainedModel, parsed: CuboidConfig) -> PreTrainedModel:
    check_model_options(model.config)
    check_unquantized(model.config, f"the config of {type(model).__name__}")
    check_plain_weights(model)
    if parsed.pipeline is not None:
        # Before the comparison, which would only say that it is another function.
        check_loss_in_pipeline(model, kind_of_class(type(model)).ordinary_loss)
    reference = made_anew(type(model), model.config)
    check_as_made(model, reference, stages=parsed.pipeline is not None)
    plan = resolve(model, parsed)
    if plan.mesh.shape.size > 1 or plan.stages is not None:
        check_hooks(model, reference, runs_whole=plan.stages is None)
    if plan.mesh.topology.world_size > 1:
        # Compared once there is a process group; there may be none yet.
        plan.mesh.weight_checksums = _sample_checksums(model)
    return plan.apply(model, functools.partial(take_shard, mesh=plan.mesh))


def _sample_checksums(model: nn.Module) -> dict[str, int]:
    """A checksum of up to ``_SAMPLE`` elements of each parameter and buffer, evenly spread, by name.

    Tensors on the meta device have no values, and none here.
    """
    checksums = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or not tensor.numel():
            continue
        elements = tensor.detach().flatten()
        sample = elements[:: -(-len(elements) // _SAMPLE)].contiguous()
        checksums[name] = zlib.crc32(sample.view(torch.uint8).cpu().numpy().tobytes())
    return checksums


def save_pretrained(model: nn.Module, directory: str | Path, **kwargs: Any) -> None:
    """Write a sharded model, or an engine's, as a Hugging Face checkpoint. All ranks call it; each writes its share.

    If the model has adapters, they are written, as PEFT's folder.

    Args:
        model: the model or the engine.
        directory: of the checkpoint.
        kwargs: passed to ``PreTrainedModel.save_pretrained``.
    """
    inner: Any = unwrap(model)
    (sharding_of(model).state.save or save_sharded)(inner, directory, **kwargs)
