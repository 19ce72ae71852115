"""Patches of DeepSpeed: ``deepspeed.initialize`` accepts the 3d_tensor mode and the pipeline."""

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
from deepspeed.runtime.utils import DummyOptim
from torch import nn

from cuboid.config.compatibility import check_framework_config, check_layout
from cuboid.config.config_file import ConfigSource, load_config
from cuboid.config.schema import CuboidConfig, own_config
from cuboid.distributed.mesh import Mesh, current_world_size
from cuboid.errors import ConfigError, OptimizerError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.failures.startup import await_all_ranks
from cuboid.integrations.deepspeed.changed_weights import ChangedWeights
from cuboid.integrations.deepspeed.engine import CuboidEngine, ModelParallelUnit
from cuboid.integrations.deepspeed.pipeline_engine import CuboidPipelineEngine
from cuboid.integrations.handoff import (
    adopt_model,
    adopt_optimizer,
    adopt_parameters,
    align_with_stages,
    check_schedule,
    check_trains,
)
from cuboid.models.sharded.sharded_model import ShardedModel, mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.data_parallel_optimizer import fill_state, is_fresh
from cuboid.optim.elementwise import OwnedShards, check_named, check_optimizer
from cuboid.optim.param_groups import GroupNames
from cuboid.weights.checkpointing import Checkpointing, Origin
from cuboid_patches.base import Patch

_PLACEHOLDER = "cuboid_placeholder_{}"


def _initialize(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        source = _config_source(given)
        ours = own_config(source)
        if ours is None:
            model = given.get("model")
            if isinstance(model, nn.Module) and isinstance(unwrap(model), ShardedModel):
                raise ConfigError("the model is sharded, but the config has no tensor_parallel.mode 3d_tensor")
            return original(*args, **kwargs)
        return run_on_all_ranks(
            lambda: _initialize_sharded(original, given, source, *ours), what="deepspeed.initialize"
        )

    return initialize


class SharedMemoryBuild:
    """A CPU collective that DeepSpeed compiles at the first ``init_distributed``, and that we don't use.

    Building it takes half a minute and a C++ compiler on every new machine. It is skipped only after a config with
    Cuboid's keys is seen, and enabled again by :meth:`revert`.
    """

    _NAME = "deepspeed_shm_comm"

    def __init__(self) -> None:
        self._original: bool | None = None

    def apply(self) -> None:
        """No-op: jobs without Cuboid's keys keep it."""

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


#: DeepSpeed's command-line arguments for the config; the second is from before it got its present name.
_CONFIG_ARGUMENTS = ("deepspeed_config", "deepscale_config")


def _config_source(given: dict[str, Any]) -> Any:
    """The config, from any of the arguments that can hold it."""
    named = [given.get("config"), given.get("config_params"), *_config_arguments(given).values()]
    return next((source for source in named if source is not None), None)


def _config_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The configs among the command-line arguments, by name."""
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
    module = adopt_model(given.get("model"), config)
    # The sharded model inside of PEFT's, if it has adapters.
    model: Any = unwrap(module)
    mesh = mesh_of(model)
    config = config.on_mesh(mesh.shape)
    check_layout(config, rest, mesh.topology.world_size)
    _start_distributed(given)
    mesh.connect()
    mesh.connect_host()
    owned = _owned_shards(mesh, rest)
    is_made = callable(given.get("optimizer"))
    run_on_all_ranks(lambda: _take_optimizer(given, model, rest, owned), mesh)
    for parameter in model.parameters():
        # Every shard counts once in the gradient norm.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    if isinstance(model, StageModel):
        for parameter in model.staging.repeated_parameters():
            # Counted on another stage. ZeRO reads the first attribute, DeepSpeed's clipping without ZeRO the second.
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        _accumulate_in_float32(rest)
    if "train_micro_batch_size_per_gpu" in rest:
        # Already checked against the two other batch sizes, from which it follows. accelerate's is too large, since it
        # counts every rank of a mesh as a replica.
        rest.pop("train_batch_size", None)
    _forget_config(given)
    unit = ModelParallelUnit(mesh) if mesh.topology.world_size > 1 else None
    groups = _parameter_groups(given, model, rest)
    names = () if groups is None else run_on_all_ranks(lambda: _align(given, model, groups), mesh)
    with _placeholders(given, model, groups or []) as placeholders:
        engine, *others = original(**{**given, "model": module, "config": rest, "mpu": unit})
    if engine.basic_optimizer is not given.get("optimizer") or is_made:
        run_on_all_ranks(lambda: _check_made_optimizer(engine, owned), mesh)
    # `deepspeed.initialize` can't be told which engine class to make.
    engine.__class__ = CuboidEngine
    engine.changed_weights = ChangedWeights(engine.optimizer)
    model.cuboid.made.taken_by = "deepspeed.initialize"
    engine.checkpointing = Checkpointing(model, Origin.of("deepspeed", config, load_config(source), model), names)
    if isinstance(model, StageModel):
        engine = CuboidPipelineEngine.take_over(engine, placeholders)
    return (engine, *others)


def _check_one_config(given: dict[str, Any]) -> None:
    arguments = list(_config_arguments(given))
    has_parameter = given.get("config") is not None or given.get("config_params") is not None
    if len(arguments) + has_parameter > 1:
        names = ", ".join([*["initialize(config=…)"] * has_parameter, *(f"args.{name}" for name in arguments)])
        raise ConfigError(f"there is more than one config: {names}; give one")


def _owned_shards(mesh: Mesh, rest: dict[str, Any]) -> OwnedShards:
    stage = (rest.get("zero_optimization") or {}).get("stage", 0)
    flat = f"zero_optimization.stage {stage} lays tensors end to end and cuts them between replicas" if stage else ""
    return OwnedShards.of(mesh, flat)


def _take_optimizer(given: dict[str, Any], model: nn.Module, rest: dict[str, Any], owned: OwnedShards) -> None:
    """Adapt the given optimizer, or the parameters given for one, to the sharded model.

    Raises:
        OptimizerError: it isn't possible.
    """
    optimizer, schedule = given.get("optimizer"), given.get("lr_scheduler")
    if given.get("model_parameters") is not None:
        given["model_parameters"] = adopt_parameters(model, given["model_parameters"])
    if isinstance(optimizer, torch.optim.Optimizer):
        adopt_optimizer(model, optimizer)
        check_optimizer(optimizer, owned)
        check_schedule(schedule, optimizer)
        if owned.flat and optimizer.state:
            raise OptimizerError(_REMADE.format(name=type(optimizer).__name__))
    elif callable(optimizer):
        # Called here and not by DeepSpeed, since its groups are aligned with those of other stages first.
        given["optimizer"] = _made_optimizer(optimizer, given.get("model_parameters"), model)
    elif optimizer is not None:
        raise OptimizerError(
            f"initialize(optimizer=…) is a {type(optimizer).__name__}, which isn't one of torch's kind"
        )
    else:
        check_named((rest.get("optimizer") or {}).get("type"), owned)
    if schedule is not None and not callable(schedule) and not isinstance(optimizer, torch.optim.Optimizer):
        check_schedule(schedule, None)


def _check_made_optimizer(engine: Any, owned: OwnedShards) -> None:
    """Check the optimizer that DeepSpeed has made from a config or a callable.

    Raises:
        OptimizerError: it can't train a sharded model.
    """
    made = engine.basic_optimizer
    if made is None or isinstance(made, DummyOptim):
        return
    check_optimizer(made, owned, [p for p in engine.module.parameters() if p.requires_grad])
    used = getattr(engine.optimizer, "optimizer", made)
    # DeepSpeed's ZeRO replaces torch's Adagrad by a new one with default settings.
    lost = [
        key
        for before, after in zip(made.param_groups, used.param_groups, strict=True)
        for key, value in before.items()
        if key != "params" and repr(after.get(key, value)) != repr(value)
    ]
    if used is not made and lost:
        raise OptimizerError(_REMADE.format(name=type(made).__name__))


#: Error for an optimizer that creates its state in its constructor, under ZeRO.
_REMADE = (
    "{name} has its state from the start, so that DeepSpeed puts a new one in its place, which no schedule and no "
    "parameter group's own settings reach; name it in the config's optimizer section, without such groups, or take "
    "zero_optimization.stage 0"
)


def _made_optimizer(make: Any, parameters: Any, model: Any) -> torch.optim.Optimizer:
    """The optimizer that a callable makes of parameters or groups.

    Raises:
        OptimizerError: it makes something else, or an optimizer of other parameters.
    """
    given = list(model.parameters()) if parameters is None else list(parameters)
    groups = [{**entry, "params": list(entry["params"])} for entry in given if isinstance(entry, dict)]
    listed = [parameter for entry in groups for parameter in entry["params"]] if groups else given
    is_frozen = not any(parameter.requires_grad for parameter in listed)
    # A stage may be frozen as a whole, but torch makes no optimizer of nothing.
    stand_in = nn.Parameter(torch.zeros(1, dtype=model.dtype, device=model.device))
    if groups and is_frozen:
        groups[0]["params"].append(stand_in)
    listed = [stand_in] if is_frozen else given
    made = make(groups or listed)
    if not isinstance(made, torch.optim.Optimizer):
        raise OptimizerError(f"initialize(optimizer=…) made a {type(made).__name__}, which isn't one of torch's kind")
    for group in made.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not stand_in]
    made.state.pop(stand_in, None)
    adopt_optimizer(model, made)
    return made


def _parameter_groups(given: dict[str, Any], model: nn.Module, rest: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The groups of the optimizer, or those that DeepSpeed is going to make it of; None if there won't be one.

    Raises:
        ConfigError: on every rank, if there is nothing to train on any of them.
    """
    optimizer = given.get("optimizer")
    if optimizer is None and not rest.get("optimizer"):
        return None
    check_trains(model)
    if optimizer is not None:
        return optimizer.param_groups  # type: ignore[no-any-return]
    asked = given.get("model_parameters")
    parameters = list(model.parameters()) if asked is None else list(asked)
    is_grouped = bool(parameters) and isinstance(parameters[0], dict)
    given["model_parameters"] = parameters if is_grouped else [{"params": parameters}]
    return given["model_parameters"]  # type: ignore[no-any-return]


def _align(given: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]) -> GroupNames:
    schedule = given.get("lr_scheduler")
    return align_with_stages(model, groups, given.get("optimizer"), None if callable(schedule) else schedule)


@contextmanager
def _placeholders(given: dict[str, Any], model: Any, groups: list[dict[str, Any]]) -> Iterator[list[nn.Parameter]]:
    """Context in which each parameter group has something to train, since DeepSpeed accepts no others.

    A group whose parameters are all on other stages, or frozen, gets a dummy parameter in their place. So all stages
    have the same groups, for each of which DeepSpeed's optimizers communicate. The model has these parameters only
    inside the context, where DeepSpeed looks up their names.

    Yields:
        The dummy parameters.
    """
    made: list[nn.Parameter] = []
    for group in groups:
        if any(parameter.requires_grad for parameter in group["params"]):
            continue
        placeholder = nn.Parameter(torch.zeros(1, dtype=model.dtype, device=model.device))
        placeholder.tensor_model_parallel = True  # type: ignore[attr-defined]
        model.register_parameter(_PLACEHOLDER.format(len(made)), placeholder)
        group["params"] = [placeholder]
        made.append(placeholder)
    optimizer = given.get("optimizer")
    if made and isinstance(optimizer, torch.optim.Optimizer) and is_fresh(optimizer):
        fill_state(optimizer)
    try:
        yield made
    finally:
        for number in range(len(made)):
            del model._parameters[_PLACEHOLDER.format(number)]


def _accumulate_in_float32(rest: dict[str, Any]) -> None:
    # A pipeline accumulates a gradient for each unit, for which bfloat16 is too coarse.
    section = rest.get("bf16") or {}
    if section.get("enabled") is True:
        rest.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        # DeepSpeed's hooks then add each gradient to the float32 sum as soon as it is computed.
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
        del store  # not earlier: rank 0's store serves the other ranks until DeepSpeed has its own


def _tp_model_init(original: Any) -> Any:
    @functools.wraps(original)
    def tp_model_init(model: nn.Module, *args: Any, config: Any = None, **kwargs: Any) -> nn.Module:
        if isinstance(unwrap(model), ShardedModel) or own_config(config) is not None:
            return model
        return original(model, *args, config=config, **kwargs)

    return tp_model_init


PATCHES: list[Patch | SharedMemoryBuild] = [
    SHARED_MEMORY_BUILD,
    Patch(
        target="deepspeed:tp_model_init",
        package="deepspeed",
        reason="keep the HF Trainer, which sees autotp_size in the config, from asking for AutoTP as well",
        parameters=("model", "config"),
        replace=_tp_model_init,
    ),
    Patch(
        target="deepspeed:initialize",
        package="deepspeed",
        reason="take tensor_parallel.mode 3d_tensor out of the config, shard the model, and hand DeepSpeed the mesh",
        parameters=("args", "model", "optimizer", "model_parameters", "mpu", "config", "config_params"),
        replace=_initialize,
    ),
]
