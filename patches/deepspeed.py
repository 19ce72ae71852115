"""What Cuboid changes in DeepSpeed: ``deepspeed.initialize`` understands the 3d_tensor mode and the pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from cuboid.compatibility import check_framework_config
from cuboid.config import CuboidConfig, own_config
from cuboid.config_file import ConfigSource, load_config
from cuboid.errors import ConfigError
from cuboid.hf.adopt import adopt_model, check_trains, trained_groups
from cuboid.hf.checkpointing import Checkpointing, Origin
from cuboid.hf.model import ShardedModel, mesh_of
from cuboid.hf.stage_model import StageModel
from cuboid.mesh import current_world_size
from cuboid.patches.base import Patch
from cuboid.patches.deepspeed_engine import CuboidEngine, ModelParallelUnit
from cuboid.patches.deepspeed_pipeline import CuboidPipelineEngine
from cuboid.rank_agreement import run_on_all_ranks
from cuboid.start_up import await_all_ranks

_PLACEHOLDER = "cuboid_placeholder"


def _initialize(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        source = _config_source(given)
        ours = own_config(source)
        if ours is None:
            if isinstance(given.get("model"), ShardedModel):
                raise ConfigError("the model is sharded, but the config has no tensor_parallel.mode 3d_tensor")
            return original(*args, **kwargs)
        return run_on_all_ranks(
            lambda: _initialize_sharded(original, given, source, *ours), what="deepspeed.initialize"
        )

    return initialize


class SharedMemoryBuild:
    """A CPU collective that DeepSpeed compiles at the first ``init_distributed``, and that we don't use.

    Building it takes half a minute and a C++ compiler on every new machine. It is skipped only once a config of ours
    is seen, and offered again by :meth:`revert`.
    """

    _NAME = "deepspeed_shm_comm"

    def __init__(self) -> None:
        self._original: bool | None = None

    def apply(self) -> None:
        """Nothing yet: configs of others keep it."""

    def skip(self) -> None:
        """Keep DeepSpeed from building it, where it would."""
        if get_accelerator().device_name() == "cpu" and self._original is None:
            self._original = deepspeed.ops.__compatible_ops__.get(self._NAME, False)
            deepspeed.ops.__compatible_ops__[self._NAME] = False

    def revert(self) -> None:
        """Let DeepSpeed build it again, if it would have."""
        if self._original is not None:
            deepspeed.ops.__compatible_ops__[self._NAME] = self._original
            self._original = None


SHARED_MEMORY_BUILD = SharedMemoryBuild()


#: On DeepSpeed's own command line, the second from before it had its present name.
_CONFIG_ARGUMENTS = ("deepspeed_config", "deepscale_config")


def _config_source(given: dict[str, Any]) -> Any:
    """The config, from whichever of its doors it came."""
    named = [given.get("config"), given.get("config_params"), *_config_arguments(given).values()]
    return next((source for source in named if source is not None), None)


def _config_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The configs among the arguments of the command line, by their names there."""
    found = {name: getattr(given.get("args"), name, None) for name in _CONFIG_ARGUMENTS}
    return {name: source for name, source in found.items() if source is not None}


def _initialize_sharded(
    original: Any, given: dict[str, Any], source: ConfigSource, config: CuboidConfig, rest: dict[str, Any]
) -> Any:
    _check_one_config(given)
    check_framework_config(config, rest, current_world_size(), is_complete=True)
    if given.get("mpu") is not None:
        raise ConfigError(
            "initialize(mpu=…) can't be combined with tensor_parallel.mode 3d_tensor or pipeline.engine seq1f1b, which "
            "make their own"
        )
    SHARED_MEMORY_BUILD.skip()
    model = _sharded_model(given, config)
    mesh = mesh_of(model)
    _start_distributed(given)
    mesh.connect()
    for parameter in model.parameters():
        # Every shard counts once in the gradient norm.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    if isinstance(model, StageModel):
        for parameter in model.staging.repeated_parameters():
            # The one says so to DeepSpeed's ZeRO, the other to its clipping without ZeRO.
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        _accumulate_in_float32(rest)
    if "train_micro_batch_size_per_gpu" in rest:
        # Follows from the two other batch sizes, with which it was checked; accelerate counts every rank of a mesh.
        rest.pop("train_batch_size", None)
    _forget_config(given)
    unit = ModelParallelUnit(mesh) if mesh.topology.world_size > 1 else None
    with _trained_parameters(given, model, rest) as placeholder:
        engine, *others = original(**{**given, "model": model, "config": rest, "mpu": unit})
    engine.__class__ = CuboidEngine
    engine.checkpointing = Checkpointing(model, Origin.of("deepspeed", config, load_config(source), model))
    if isinstance(model, StageModel):
        engine = CuboidPipelineEngine.take_over(engine, placeholder)
    return (engine, *others)


def _check_one_config(given: dict[str, Any]) -> None:
    arguments = list(_config_arguments(given))
    has_parameter = given.get("config") is not None or given.get("config_params") is not None
    if len(arguments) + has_parameter > 1:
        names = ", ".join([*["initialize(config=…)"] * has_parameter, *(f"args.{name}" for name in arguments)])
        raise ConfigError(f"there is more than one config: {names}; give one")


@contextmanager
def _trained_parameters(given: dict[str, Any], model: Any, rest: dict[str, Any]) -> Iterator[nn.Parameter | None]:
    """Inside, DeepSpeed finds parameters to train in each group that it is given, on each stage.

    It takes no groups without any, though all of a stage may be frozen. Such a stage gets a number for its optimizer
    that nobody reads, so that it takes part in whatever the others' optimizers exchange. The number has to be the
    model's while DeepSpeed looks for its name, and no longer.

    Yields:
        That number, where it is needed.

    Raises:
        ConfigError: on every rank, where there is nothing to train on any of them.
    """
    optimizer = given.get("optimizer")
    if optimizer is None and not rest.get("optimizer"):
        yield None
        return
    check_trains(model)
    is_stage = isinstance(model, StageModel)
    if not is_stage:
        yield None
        return
    placeholder = nn.Parameter(torch.zeros(1, dtype=model.dtype, device=model.device))
    placeholder.tensor_model_parallel = True  # type: ignore[attr-defined]
    model.register_parameter(_PLACEHOLDER, placeholder)
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            groups = optimizer.param_groups[:] = trained_groups(optimizer.param_groups)
            if not groups:
                optimizer.add_param_group({"params": [placeholder]})
        else:
            asked = given.get("model_parameters")
            own = [p for p in model.parameters() if p is not placeholder]
            groups = trained_groups(own if asked is None else list(asked))
            given["model_parameters"] = groups or [placeholder]
        yield None if groups else placeholder
    finally:
        del model._parameters[_PLACEHOLDER]


def _accumulate_in_float32(rest: dict[str, Any]) -> None:
    # A pipeline adds up a gradient for each unit, which bfloat16 is too coarse for.
    section = rest.get("bf16") or {}
    if section.get("enabled") is True:
        rest.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        # Added by DeepSpeed's own hooks, as soon as a gradient is there.
        section["immediate_grad_update"] = True


def _forget_config(given: dict[str, Any]) -> None:
    given.pop("config_params", None)
    for name in _config_arguments(given):
        given["args"] = copy.copy(given["args"])
        setattr(given["args"], name, None)


def _start_distributed(given: dict[str, Any]) -> None:
    if current_world_size() > 1 and not dist.is_initialized():
        store = await_all_ranks()
        deepspeed.init_distributed(dist_init_required=given.get("dist_init_required"))
        del store  # rank 0's has to be there until DeepSpeed has its own


def _sharded_model(given: dict[str, Any], config: CuboidConfig) -> nn.Module:
    optimizer = given.get("optimizer")
    model, parameters = adopt_model(
        given.get("model"), config, optimizer=optimizer, parameters=given.get("model_parameters")
    )
    if parameters is not None:
        given["model_parameters"] = parameters
    if isinstance(optimizer, torch.optim.Optimizer):
        # DeepSpeed's own optimizers take no groups without parameters.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return model


def _tp_model_init(original: Any) -> Any:
    @functools.wraps(original)
    def tp_model_init(model: nn.Module, *args: Any, config: Any = None, **kwargs: Any) -> nn.Module:
        if isinstance(model, ShardedModel) or own_config(config) is not None:
            return model
        return original(model, *args, config=config, **kwargs)

    return tp_model_init


PATCHES: list[Patch | SharedMemoryBuild] = [
    SHARED_MEMORY_BUILD,
    Patch(
        target="deepspeed:tp_model_init",
        package="deepspeed",
        versions=">=0.19.8,<0.20",
        reason="keep the HF Trainer, which sees autotp_size in the config, from asking for AutoTP as well",
        parameters=("model", "config"),
        replace=_tp_model_init,
    ),
    Patch(
        target="deepspeed:initialize",
        package="deepspeed",
        versions=">=0.19.8,<0.20",
        reason="take tensor_parallel.mode 3d_tensor out of the config, shard the model, and hand DeepSpeed the mesh",
        parameters=("args", "model", "optimizer", "model_parameters", "mpu", "config", "config_params"),
        replace=_initialize,
    ),
]
