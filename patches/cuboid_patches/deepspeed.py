"""Patches of DeepSpeed: ``deepspeed.initialize`` accepts the 3d_tensor mode and the pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import DummyOptim
from deepspeed.utils import groups as ds_groups
from torch import nn

from cuboid.config.compatibility import check_framework_config, check_layout
from cuboid.config.config_file import ConfigSource, load_config
from cuboid.config.schema import CuboidConfig, own_config
from cuboid.distributed.mesh import Mesh, current_world_size
from cuboid.errors import ConfigError, OptimizerError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.failures.startup import await_all_ranks
from cuboid.integrations.deepspeed.changed_weights import ChangedWeights
from cuboid.integrations.deepspeed.checkpoint import check_not_ours
from cuboid.integrations.deepspeed.engine import CuboidEngine, ModelParallelUnit
from cuboid.integrations.deepspeed.full_tensors import changing_whole, check_not_local, of_shard, of_whole_parameter
from cuboid.integrations.deepspeed.gradient_partition import leave_matrices
from cuboid.integrations.deepspeed.optimizer_state import adapt_optimizer
from cuboid.integrations.deepspeed.pipeline_engine import CuboidPipelineEngine
from cuboid.integrations.handoff import (
    adopt_model,
    adopt_optimizer,
    adopt_parameters,
    align_with_stages,
    check_schedule,
    check_trains,
    step_whole,
)
from cuboid.models.sharded.sharded_model import ShardedModel, mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.data_parallel_optimizer import fill_state, is_fresh
from cuboid.optim.elementwise import OwnedShards, check_named, check_optimizer, is_muon
from cuboid.optim.param_groups import AlignedGroups
from cuboid.optim.piecewise_step import PiecewiseStep
from cuboid.optim.taken_gradients import give_back, readable
from cuboid.optim.whole_tensors import WholeRule
from cuboid.weights.checkpointing import Checkpointing, Origin
from cuboid.weights.state_dict_map import stored_names
from cuboid_patches.base import Patch

_PLACEHOLDER = "cuboid_placeholder_{}"


def _initialize(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        source = _config_source(arguments)
        parts = own_config(source)
        if parts is None:
            model = arguments.get("model")
            if isinstance(model, nn.Module) and isinstance(unwrap(model), ShardedModel):
                raise ConfigError("the model is sharded, but the config has no tensor_parallel.mode 3d_tensor")
            return original(*args, **kwargs)
        return run_on_all_ranks(
            lambda: _initialize_sharded(original, arguments, source, *parts), what="deepspeed.initialize"
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


def _config_source(arguments: dict[str, Any]) -> Any:
    """The config, from any of the arguments that can hold it."""
    sources = [arguments.get("config"), arguments.get("config_params"), *_config_arguments(arguments).values()]
    return next((source for source in sources if source is not None), None)


def _config_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The configs among the command-line arguments, by name."""
    sources = {name: getattr(arguments.get("args"), name, None) for name in _CONFIG_ARGUMENTS}
    return {name: source for name, source in sources.items() if source is not None}


def _initialize_sharded(
    original: Any,
    arguments: dict[str, Any],
    source: ConfigSource,
    config: CuboidConfig,
    framework_config: dict[str, Any],
) -> Any:
    _check_one_config(arguments)
    check_framework_config(config, framework_config, current_world_size(), is_complete=True)
    if arguments.get("mpu") is not None:
        raise ConfigError(
            "initialize(mpu=…) can't be combined with tensor_parallel.mode 3d_tensor or pipeline.engine seq1f1b, which "
            "make their own"
        )
    SHARED_MEMORY_BUILD.skip()
    module = adopt_model(arguments.get("model"), config, takes_wrappers=True)
    # The sharded model inside of PEFT's, if it has adapters, or of a script's own module.
    model: Any = unwrap(module)
    # Of an engine that had the model before.
    give_back(model.parameters())
    mesh = mesh_of(model)
    config = config.on_mesh(mesh.shape)
    check_layout(config, framework_config, mesh.topology.world_size)
    _start_distributed(arguments)
    mesh.connect()
    mesh.connect_host()
    owned = _owned_shards(mesh, framework_config)
    is_made = callable(arguments.get("optimizer"))
    what = "deepspeed.initialize of the optimizer"
    rule = run_on_all_ranks(lambda: _take_optimizer(arguments, model, framework_config, owned), mesh, what=what)
    for parameter in model.parameters():
        # Every shard counts once in the gradient norm.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    if isinstance(model, StageModel):
        for parameter in model.staging.repeated_parameters():
            # Counted on another stage. ZeRO reads the first attribute, DeepSpeed's clipping without ZeRO the second.
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        _accumulate_in_float32(framework_config)
    if "train_micro_batch_size_per_gpu" in framework_config:
        # Already checked against the two other batch sizes, from which it follows. accelerate's is too large, since it
        # counts every rank of a mesh as a replica.
        framework_config.pop("train_batch_size", None)
    _forget_config(arguments)
    unit = ModelParallelUnit(mesh) if mesh.topology.world_size > 1 else None
    groups = _parameter_groups(arguments, model, framework_config)
    aligned = AlignedGroups()
    if groups is not None:
        aligned = run_on_all_ranks(lambda: _align(arguments, model, groups), mesh, what=what)
    with _placeholders(arguments, model, groups or []) as placeholders, _own_groups():
        engine, *others = original(**{**arguments, "model": module, "config": framework_config, "mpu": unit})
    if engine.basic_optimizer is not arguments.get("optimizer") or is_made:
        rule = run_on_all_ranks(lambda: _check_made_optimizer(engine, owned), mesh, what=what)
    if arguments.get("optimizer") is None and is_muon(framework_config.get("optimizer")):
        # DeepSpeed has made two groups of each: one for Muon, one for Adam.
        made = engine.basic_optimizer
        aligned = run_on_all_ranks(
            lambda: align_with_stages(model, made.param_groups, made, engine.lr_scheduler), mesh, what=what
        )
    # `deepspeed.initialize` can't be told which engine class to make.
    engine.__class__ = CuboidEngine
    engine.changed_weights = ChangedWeights(engine.optimizer, model, aligned)
    # What DeepSpeed's optimizers that have master weights step; others are torch's own.
    engine.piecewise = PiecewiseStep.of(getattr(engine.optimizer, "optimizer", None))
    engine.whole_states = None
    if isinstance(engine.optimizer, ZeROOptimizer) and isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        engine.clear_with(engine.basic_optimizer)
    if rule is not None:
        leave_matrices(engine.optimizer)
        engine.whole_states = step_whole(model, adapt_optimizer(engine.optimizer, stored_names(model)), rule)
    model.cuboid.state.made.take(model, "deepspeed.initialize")
    engine.checkpointing = Checkpointing(
        model, Origin.of("deepspeed", config, load_config(source), model), aligned.names
    )
    if isinstance(model, StageModel):
        engine = CuboidPipelineEngine.take_over(engine, placeholders)
    model.cuboid.state.engine = weakref.ref(engine)
    return (engine, *others)


def _check_one_config(arguments: dict[str, Any]) -> None:
    names_in_args = list(_config_arguments(arguments))
    has_parameter = arguments.get("config") is not None or arguments.get("config_params") is not None
    if len(names_in_args) + has_parameter > 1:
        texts = ", ".join([*["initialize(config=…)"] * has_parameter, *(f"args.{name}" for name in names_in_args)])
        raise ConfigError(f"there is more than one config: {texts}; give one")


def _owned_shards(mesh: Mesh, framework_config: dict[str, Any]) -> OwnedShards:
    section = framework_config.get("zero_optimization") or {}
    stage = section.get("stage", 0)
    flat = f"zero_optimization.stage {stage} lays tensors end to end and cuts them between replicas" if stage else ""
    # There the masters are in host memory, and whole matrices would be computed by the CPU.
    is_offloaded = (section.get("offload_optimizer") or {}).get("device", "none") != "none"
    return OwnedShards.of(mesh, flat, "zero_optimization.offload_optimizer" if is_offloaded else "")


def _take_optimizer(
    arguments: dict[str, Any], model: nn.Module, framework_config: dict[str, Any], owned: OwnedShards
) -> WholeRule | None:
    """Adapt the optimizer of ``initialize``, or the parameters for one, to the sharded model, or raise an error.

    Returns which tensors an optimizer must be given whole, if it is there already.
    """
    rule = None
    optimizer, schedule = arguments.get("optimizer"), arguments.get("lr_scheduler")
    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = adopt_parameters(model, arguments["model_parameters"])
    if isinstance(optimizer, torch.optim.Optimizer):
        adopt_optimizer(model, optimizer)
        rule = check_optimizer(optimizer, owned)
        check_schedule(schedule, optimizer)
        if owned.flat and optimizer.state:
            raise OptimizerError(_REMADE.format(name=type(optimizer).__name__))
    elif callable(optimizer):
        # Called here and not by DeepSpeed, since its groups are aligned with those of other stages first.
        arguments["optimizer"] = _made_optimizer(optimizer, arguments.get("model_parameters"), model)
    elif optimizer is not None:
        raise OptimizerError(
            f"initialize(optimizer=…) is a {type(optimizer).__name__}, which isn't one of torch's kind"
        )
    else:
        check_named(framework_config.get("optimizer") or {}, owned)
    if schedule is not None and not callable(schedule) and not isinstance(optimizer, torch.optim.Optimizer):
        check_schedule(schedule, None)
    return rule


def _check_made_optimizer(engine: Any, owned: OwnedShards) -> WholeRule | None:
    """Raise an error if the optimizer that DeepSpeed has made from the config can't train a sharded model.

    Returns which tensors it must be given whole.
    """
    optimizer = engine.basic_optimizer
    if optimizer is None or isinstance(optimizer, DummyOptim):
        return None
    rule = check_optimizer(optimizer, owned, [p for p in engine.module.parameters() if p.requires_grad])
    base_optimizer = getattr(engine.optimizer, "optimizer", optimizer)
    # DeepSpeed's ZeRO replaces torch's Adagrad by a new one with default settings.
    lost = [
        key
        for before, after in zip(optimizer.param_groups, base_optimizer.param_groups, strict=True)
        for key, value in before.items()
        if key != "params" and repr(after.get(key, value)) != repr(value)
    ]
    if base_optimizer is not optimizer and lost:
        raise OptimizerError(_REMADE.format(name=type(optimizer).__name__))
    return rule


#: Error for an optimizer that creates its state in its constructor, under ZeRO.
_REMADE = (
    "{name} has its state from the start, so that DeepSpeed puts a new one in its place, which no schedule and no "
    "parameter group's own settings reach; name it in the config's optimizer section, without such groups, or take "
    "zero_optimization.stage 0"
)


def _made_optimizer(make: Any, parameters: Any, model: Any) -> torch.optim.Optimizer:
    """The optimizer that a callable makes of parameters or groups; anything else is an error."""
    entries = list(model.parameters()) if parameters is None else list(parameters)
    groups = [{**entry, "params": list(entry["params"])} for entry in entries if isinstance(entry, dict)]
    listed = [parameter for entry in groups for parameter in entry["params"]] if groups else entries
    is_frozen = not any(parameter.requires_grad for parameter in listed)
    # A stage may be frozen as a whole, but torch makes no optimizer of nothing.
    stand_in = nn.Parameter(torch.zeros(1, dtype=model.dtype, device=model.device))
    if groups and is_frozen:
        groups[0]["params"].append(stand_in)
    listed = [stand_in] if is_frozen else entries
    optimizer = make(groups or listed)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"initialize(optimizer=…) made a {type(optimizer).__name__}, which isn't one of torch's kind"
        )
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not stand_in]
    optimizer.state.pop(stand_in, None)
    adopt_optimizer(model, optimizer)
    return optimizer


def _parameter_groups(
    arguments: dict[str, Any], model: nn.Module, framework_config: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """The groups of the optimizer, or those that DeepSpeed is going to make it of; None if there won't be one.

    Nothing to train on any rank is an error on every rank.
    """
    optimizer = arguments.get("optimizer")
    if optimizer is None and not framework_config.get("optimizer"):
        return None
    check_trains(model)
    if optimizer is not None:
        return optimizer.param_groups  # type: ignore[no-any-return]
    entries = arguments.get("model_parameters")
    parameters = list(model.parameters()) if entries is None else list(entries)
    is_grouped = bool(parameters) and isinstance(parameters[0], dict)
    arguments["model_parameters"] = parameters if is_grouped else [{"params": parameters}]
    return arguments["model_parameters"]  # type: ignore[no-any-return]


def _align(arguments: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]) -> AlignedGroups:
    schedule = arguments.get("lr_scheduler")
    return align_with_stages(model, groups, arguments.get("optimizer"), None if callable(schedule) else schedule)


@contextmanager
def _placeholders(arguments: dict[str, Any], model: Any, groups: list[dict[str, Any]]) -> Iterator[list[nn.Parameter]]:
    """Context in which each parameter group has something to train, since DeepSpeed accepts no others.

    A group whose parameters are all on other stages, or frozen, gets a dummy parameter in their place. So all stages
    have the same groups, for each of which DeepSpeed's optimizers communicate. The model has these parameters, which
    are yielded, only inside the context, where DeepSpeed looks up their names.
    """
    placeholders: list[nn.Parameter] = []
    for group in groups:
        if any(parameter.requires_grad for parameter in group["params"]):
            continue
        placeholder = nn.Parameter(torch.zeros(1, dtype=model.dtype, device=model.device))
        placeholder.tensor_model_parallel = True  # type: ignore[attr-defined]
        model.register_parameter(_PLACEHOLDER.format(len(placeholders)), placeholder)
        group["params"] = [placeholder]
        placeholders.append(placeholder)
    optimizer = arguments.get("optimizer")
    if placeholders and isinstance(optimizer, torch.optim.Optimizer) and is_fresh(optimizer):
        fill_state(optimizer)
    try:
        yield placeholders
    finally:
        for number in range(len(placeholders)):
            del model._parameters[_PLACEHOLDER.format(number)]


@contextmanager
def _own_groups() -> Iterator[None]:
    """In the ``with`` block, an engine may set DeepSpeed's ``mpu``, which others would take the groups of later."""
    before = ds_groups.mpu
    try:
        yield
    finally:
        ds_groups.mpu = before


def _accumulate_in_float32(framework_config: dict[str, Any]) -> None:
    # A pipeline accumulates a gradient for each unit, for which bfloat16 is too coarse.
    section = framework_config.get("bf16") or {}
    if section.get("enabled") is True:
        framework_config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        # DeepSpeed's hooks then add each gradient to the float32 sum as soon as it is computed.
        section["immediate_grad_update"] = True


def _forget_config(arguments: dict[str, Any]) -> None:
    arguments.pop("config_params", None)
    for name in _config_arguments(arguments):
        arguments["args"] = copy.copy(arguments["args"])
        setattr(arguments["args"], name, None)


def _start_distributed(arguments: dict[str, Any]) -> None:
    if current_world_size() > 1 and not dist.is_initialized():
        store = await_all_ranks()
        deepspeed.init_distributed(dist_init_required=arguments.get("dist_init_required"))
        del store  # not earlier: rank 0's store serves the other ranks until DeepSpeed has its own


def _tp_model_init(original: Any) -> Any:
    @functools.wraps(original)
    def tp_model_init(model: nn.Module, *args: Any, config: Any = None, **kwargs: Any) -> nn.Module:
        if isinstance(unwrap(model), ShardedModel) or own_config(config) is not None:
            return model
        return original(model, *args, config=config, **kwargs)

    return tp_model_init


def _bf16_optimizer(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Imported here as DeepSpeed does, because that compiles kernels.
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        mpu = signature.bind(self, init_optimizer, *args, **kwargs).arguments.get("mpu")
        if not isinstance(mpu, ModelParallelUnit) or not isinstance(init_optimizer, MuonWithAuxAdam):
            original(self, init_optimizer, *args, **kwargs)
            return
        # Its own Muon, which knows no model parallelism and raises an error there, goes by the class.
        kind, init_optimizer.__class__ = type(init_optimizer), torch.optim.Optimizer
        try:
            original(self, init_optimizer, *args, **kwargs)
        finally:
            init_optimizer.__class__ = kind

    return __init__


def _reading_whole(original: Any) -> Any:
    @functools.wraps(original)
    def safe_get_full(param: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        with readable([param]):
            return of_whole_parameter(param, original(param, *args, **kwargs))

    return safe_get_full


def _writing_shard(original: Any) -> Any:
    @functools.wraps(original)
    def safe_set_full(param: nn.Parameter, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with readable([param]):
            original(param, of_shard(original.__name__, param, value), *args, **kwargs)

    return safe_set_full


def _changing_whole(original: Any) -> Any:
    @functools.wraps(original)
    def safe_update_full(param_list: list[nn.Parameter], update_func: Any, *args: Any, **kwargs: Any) -> None:
        with readable(param_list):
            original(param_list, changing_whole(original.__name__, update_func), *args, **kwargs)

    return safe_update_full


def _refusing_local(original: Any) -> Any:
    @functools.wraps(original)
    def safe_local(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        check_not_local(original.__name__, param)
        return original(param, *args, **kwargs)

    return safe_local


def _whole_tensors() -> Iterator[Patch]:
    """Of functions that scripts import from the package, and have in the module that defines them."""
    replacements: dict[str, tuple[tuple[str, ...], Any]] = {
        "safe_update_full_grad_vectorized": (("param_list", "update_func"), _changing_whole)
    }
    for kind in ("fp32_param", "grad", "optimizer_state"):
        replacements[f"safe_get_full_{kind}"] = (("param",), _reading_whole)
        replacements[f"safe_set_full_{kind}"] = (("param", "value"), _writing_shard)
        for call in ("get", "set"):
            replacements[f"safe_{call}_local_{kind}"] = (("param",), _refusing_local)
    for name, (parameters, replace) in replacements.items():
        for module in ("deepspeed.utils", "deepspeed.utils.tensor_fragment"):
            yield Patch(
                target=f"{module}:{name}",
                package="deepspeed",
                reason="read and write whole tensors, where on a mesh it would be a rank's shard",
                parameters=parameters,
                replace=replace,
            )


def _reading_fp32(original: Any) -> Any:
    @functools.wraps(original)
    def get_fp32_state_dict(checkpoint_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        check_not_ours(Path(checkpoint_dir), tag)
        return original(checkpoint_dir, tag, *args, **kwargs)

    return get_fp32_state_dict


PATCHES: list[Patch | SharedMemoryBuild] = [
    *_whole_tensors(),
    SHARED_MEMORY_BUILD,
    Patch(
        target="deepspeed.utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint",
        package="deepspeed",
        reason="say of a checkpoint of Cuboid how to open it, where DeepSpeed's own files would be looked for",
        parameters=("checkpoint_dir", "tag"),
        replace=_reading_fp32,
    ),
    Patch(
        target="deepspeed.runtime.bf16_optimizer:BF16_Optimizer.__init__",
        package="deepspeed",
        reason="let Muon have float32 accumulation in bf16 on a mesh: Cuboid gives it whole matrices",
        parameters=("init_optimizer", "mpu"),
        replace=_bf16_optimizer,
    ),
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
