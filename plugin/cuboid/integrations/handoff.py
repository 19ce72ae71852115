"""Take over the model that a user passes to a framework, full or sharded, and the optimizer of its parameters."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from cuboid.checkpoint.optimizer_state import OptimizerAdapter, WholeStates
from cuboid.config.schema import CuboidConfig
from cuboid.distributed.determinism import use_deterministic
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import ConfigError, OptimizerError, UnsupportedModelError
from cuboid.failures.rank_agreement import gather_objects
from cuboid.models.sharded.activation_checkpointing import check_checkpointing, enable_checkpointing
from cuboid.models.sharded.sharded_model import ShardedModel, mesh_of, sharding_of, unwrap
from cuboid.models.stages.stage_cut import half_frozen
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.data_parallel_optimizer import fill_state, is_fresh
from cuboid.optim.elementwise import OwnedShards, check_optimizer
from cuboid.optim.param_groups import AlignedGroups, align_groups
from cuboid.optim.whole_tensors import FlatShards, WholeRule, WholeTensors
from cuboid.weights.api import shard
from cuboid.weights.state_dict_map import sharding_specs, stored_names, stored_parameters

#: Keys that a model keeps as they were when it was sharded.
_KEPT_OF_MESH = ("gather_logits", "weight_gather", "gradient_reduce", "gradient_sync")
_KEPT_OF_STAGES = ("segments", "partition", "memory_limit", "head", "kv_gradients", "trace", "trace_step")

#: Maps a parameter of the full model to the sharded one; None if another stage has it.
_Successor = Callable[[nn.Parameter], nn.Parameter | None]


def adopt_model(model: Any, config: CuboidConfig, *, takes_wrappers: bool = False) -> Any:
    """Shard a transformers model, unless it is sharded already, perhaps from a :func:`cuboid.scope`.

    Args:
        model: the model, or PEFT's around it; or a script's own module that has it and nothing else to train.
        config: how to shard it.
        takes_wrappers: whether such a module may be trained, whose own forward then runs.

    Raises:
        ConfigError, MeshError, UnsupportedModelError: the model can't be sharded so, or is sharded otherwise; or it
            lacks the adapter of which the config says that it alone is trained.
    """
    if config.deterministic:
        use_deterministic()
    sharded = unwrap(model) if isinstance(model, nn.Module) else model
    if _is_wrapper(model, takes_wrappers=takes_wrappers):
        return _adopt_wrapped(model, config, takes_wrappers=takes_wrappers)
    if config.lora is not None and not (isinstance(sharded, ShardedModel) and sharded.cuboid.state.adapters):
        raise ConfigError(
            f"lora (r = {config.lora.r}) says that only an adapter is trained, but {type(sharded).__name__} has none: "
            "load it by cuboid.from_pretrained and give PEFT's get_peft_model(model, LoraConfig(…)), or leave lora out"
        )
    if not isinstance(sharded, ShardedModel):
        return shard(model, config)
    _check_same(sharded, config)
    if config.activation_checkpointing is not None and sharded.cuboid.state.checkpointing is None:
        check_checkpointing(sharded, sharded.cuboid.base, config.activation_checkpointing)
        enable_checkpointing(sharded, config.activation_checkpointing)
    if config.tensor_parallel.compile:
        # A model that a script sharded before, by a config without the key.
        sharded.compile()
    return model


def _is_wrapper(model: Any, *, takes_wrappers: bool) -> bool:
    """Whether a script's own module has a model of transformers in it, and calls it in its forward."""
    is_plain = isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel)
    # PEFT's models and compiled ones are told from others elsewhere; a Booster takes what wrappers of libraries have.
    of_libraries = ("get_base_model", "_orig_mod", *([] if takes_wrappers else ["module"]))
    is_known = any(hasattr(model, name) for name in of_libraries)
    return is_plain and not is_known and any(isinstance(module, PreTrainedModel) for module in model.modules())


def _adopt_wrapped(wrapper: nn.Module, config: CuboidConfig, *, takes_wrappers: bool) -> nn.Module:
    """Adopt the model in a script's own module, whose forward goes on as it was written."""
    models = [module for module in wrapper.modules() if isinstance(module, PreTrainedModel)]
    inside = {part for model in models for part in model.modules() if part is not model}
    models = [model for model in models if model not in inside]
    name = type(wrapper).__name__
    remedy = (
        "Give the model itself, and compute the rest in the loop; or train it in a loop of torch's alone, for which "
        "DistributedDataParallel takes the whole module"
    )
    if not takes_wrappers:
        raise UnsupportedModelError(f"{name} isn't a model of transformers, but has one in it. {remedy}")
    if len(models) > 1:
        raise UnsupportedModelError(
            f"{name} has {len(models)} models in it ({', '.join(type(model).__name__ for model in models)}), of which "
            f"an engine can shard and save one. {remedy}"
        )
    (model,) = models
    if config.pipeline is not None:
        raise UnsupportedModelError(
            f"{name} calls the forward of the {type(model).__name__} in it, which a stage of a pipeline doesn't have; "
            "give the model itself"
        )
    other = next(_tensors_beside(wrapper, set(model.modules())), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{name} has {other} beside the {type(model).__name__} in it, which checkpoints wouldn't have. {remedy}"
        )
    adopt_model(model, config)
    return wrapper


def _tensors_beside(wrapper: nn.Module, inside: set[nn.Module]) -> Iterator[str]:
    """Names of what a state dict of a module would have but for the tensors of the modules ``inside``."""
    for prefix, module in wrapper.named_modules():
        if module not in inside:
            tensors = {**module._parameters, **module._buffers}
            names = [key for key, tensor in tensors.items() if tensor is not None]
            yield from (f"{prefix}.{key}".lstrip(".") for key in names if key not in module._non_persistent_buffers_set)


def adopt_parameters(model: nn.Module, parameters: Any) -> Any:
    """Replace the parameters or groups that are given for a future optimizer by those of the sharded model.

    Args:
        model: sharded.
        parameters: of the model as it is, or as it was before it was sharded; perhaps a generator, perhaps pairs of
            names and parameters.

    Returns:
        The parameters or groups as lists, without parameters of other stages; a group may be empty.

    Raises:
        OptimizerError: a parameter isn't the model's, or is given twice.
    """
    remapped = _remap(parameters, _successors(model))
    entries = remapped if isinstance(remapped, list) else [remapped]
    _check_once(model, [p for entry in entries for p in (entry["params"] if isinstance(entry, dict) else [entry])])
    return remapped


def adopt_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters by those of the sharded model, in place.

    Parameters of other stages are removed from its groups; groups that become empty are kept.

    Args:
        model: sharded.
        optimizer: made for the model's parameters as they are, or as they were before it was sharded.

    Raises:
        OptimizerError: a parameter isn't the model's, or is there twice; or there is state for full parameters.
    """
    successor = _successors(model)
    before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["params"] = _remap(group["params"], successor)
        # They name the full model's parameters, of which some may be gone.
        group.pop("param_names", None)
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check_once(model, after)
    same = {id(parameter) for parameter in after}
    if optimizer.state and not all(id(parameter) in same for parameter in before):
        if not is_fresh(optimizer):
            raise OptimizerError("the optimizer has state for whole parameters; make it after the model is sharded")
        fill_state(optimizer)


def prepare_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer step a sharded model in a loop of torch's alone, without a framework. Collective.

    DeepSpeed, the Trainer and ColossalAI do this by themselves. The loop reduces gradients over replicas, and may clip
    by ``torch.nn.utils.clip_grad_norm_``, which takes the norm over all ranks of a replica.

    Args:
        model: sharded, with its process groups' backend initialised.
        optimizer: of its parameters, as they are or as they were before it was sharded; fresh, changed in place. A
            script may have several, such as ``torch.optim.Muon`` of the matrices and AdamW of the rest.

    Returns:
        The same optimizer.

    Raises:
        OptimizerError: it can't step so, or isn't of this model.
    """
    inner: Any = unwrap(model)
    mesh = mesh_of(inner)
    mesh.connect()
    adopt_optimizer(inner, optimizer)
    rule = check_optimizer(optimizer, OwnedShards.of(mesh))
    if rule is not None:
        WholeTensors(OptimizerAdapter.direct(optimizer, stored_names(inner)), rule, sharding_specs(inner), mesh)
    return optimizer


def step_whole(model: nn.Module, adapter: OptimizerAdapter, rule: WholeRule) -> WholeStates:
    """Let a framework's optimizer step whole tensors from now on; see :class:`cuboid.optim.whole_tensors.WholeTensors`.

    Collective over the world.

    Returns:
        For the adapter of each checkpoint.
    """
    mesh = mesh_of(model)
    tensors = WholeTensors(adapter, rule, sharding_specs(model), mesh, _flat_shards(model, adapter))
    return WholeStates(tensors.keys, functools.partial(gather_objects, mesh=mesh, what="states of whole tensors"))


def _flat_shards(model: nn.Module, adapter: OptimizerAdapter) -> FlatShards | None:
    """Where all ranks have their shards in flat tensors; None if optimizers step parameters. Collective."""
    mesh, parameters = mesh_of(model), stored_parameters(model)
    ranges: dict[str, range] = {}
    is_flat = False
    for entry in chain.from_iterable(adapter.groups):
        is_flat = is_flat or any(entry.tensor is not parameters[name] for name in entry.names)
        ranges.update(dict.fromkeys(entry.names, range(0)))
        ranges.update({slot.name: range(slot.start, slot.start + slot.numel) for slot in entry.slots})
    is_divided = any(len(elements) != parameters[name].numel() for name, elements in ranges.items())
    gathered = gather_objects((ranges, is_flat, is_divided), mesh, what="comparison of the optimizers' tensors")
    if not any(is_flat for _, is_flat, _ in gathered):
        return None
    ranks, group = mesh.mesh_ranks, mesh.along(*AXES).process_group
    if any(is_divided for *_, is_divided in gathered):
        ranks = sorted(rank for place in mesh.stage_ranks for rank in place)
        group = mesh.connect_replicas()
    return FlatShards(parameters, [gathered[rank][0] for rank in ranks], ranks, group)


def check_schedule(schedule: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that a learning-rate schedule was made for this optimizer.

    Args:
        schedule: None, or any object; one without an ``optimizer`` attribute is accepted.
        optimizer: the one to train with; None if the framework is going to make it.

    Raises:
        OptimizerError: the schedule would have no effect.
    """
    of = getattr(schedule, "optimizer", None)
    if of is None or of is optimizer:
        return
    instead = "make it of the optimizer that it is given with"
    if optimizer is None:
        instead = "give a function that makes it of an optimizer, lr_scheduler=lambda optimizer: …"
    raise OptimizerError(
        f"the {type(schedule).__name__} is of another optimizer than is trained with, and would have no effect; "
        f"{instead}"
    )


def align_with_stages(
    model: nn.Module, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer | None = None, schedule: Any = None
) -> AlignedGroups:
    """Add the parameter groups that only other stages have; see :func:`cuboid.optim.param_groups.align_groups`."""
    names = stored_names(model)
    shared = model.staging.shared.values() if isinstance(model, StageModel) else ()
    trained = [names[id(parameter)] for parameter in shared if parameter.requires_grad]
    return align_groups(groups, names, mesh_of(model), shared=trained, optimizer=optimizer, schedule=schedule)


def check_trains(model: nn.Module) -> None:
    """Check that there is something to train, and that both stages of a tied parameter train or freeze it; collective.

    Raises:
        ConfigError: on every rank, if all stages are frozen, a tied parameter is on only one of its two stages, or any
            other one on only some of the ranks that have it, of which the others would wait for its gradient.
    """
    mesh = mesh_of(model)
    _check_frozen_alike(model, mesh)
    shared = model.staging.shared if isinstance(model, StageModel) else {}
    tied = {name: parameter.requires_grad for name, parameter in shared.items()}
    trains_and_tied = (any(parameter.requires_grad for parameter in model.parameters()), tied)
    stages = [trains_and_tied] * mesh.topology.pipe
    if len(stages) > 1:
        dist.all_gather_object(stages, trains_and_tied, group=mesh.pipe_group)
    first, last = mesh.placement[0], mesh.placement[-1]
    for name, trained in stages[first][1].items():
        if stages[last][1][name] != trained:
            raise half_frozen(name, trains_first=trained)
    if not any(trains for trains, _ in stages):
        raise ConfigError(
            "every parameter is frozen (requires_grad is False), so that there is nothing to train; leave out the "
            "optimizer to evaluate only, or let some parameters have gradients"
        )


def _check_frozen_alike(model: nn.Module, mesh: Mesh) -> None:
    frozen = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    digest = hashlib.sha256(repr(frozen).encode()).hexdigest()
    # The names themselves are many, and gathered only for the error.
    stages = gather_objects((mesh.coordinate.pipe, digest), mesh, what="comparison of the frozen parameters")
    first: dict[int, int] = {}
    pairs = [(first.setdefault(stage, rank), rank) for rank, (stage, _) in enumerate(stages)]
    pair = next(((one, other) for one, other in pairs if stages[one] != stages[other]), None)
    if pair is None:
        return
    one, other = (set(names) for rank, names in enumerate(gather_objects(frozen, mesh)) if rank in pair)
    name = min(one ^ other)
    is_first = name in one
    raise ConfigError(
        f"{name} is frozen on rank {pair[not is_first]}, but not on rank {pair[is_first]}; set requires_grad alike on "
        "all ranks"
    )


def _check_same(model: Any, config: CuboidConfig) -> None:
    mesh, mesh_config = mesh_of(model), config.tensor_parallel.mesh
    if mesh_config != "auto" and mesh.shape != mesh_config.shape:
        raise ConfigError(f"the model is sharded over {mesh.shape}, but tensor_parallel.mesh is {mesh_config.shape}")
    fp8, fp8_before = config.tensor_parallel.model_dump()["fp8"], sharding_of(model).config.model_dump()["fp8"]
    if fp8 != fp8_before:
        raise ConfigError(
            f"the model was sharded with tensor_parallel.fp8 {json.dumps(fp8_before)}, but the config has "
            f"{json.dumps(fp8)}; load it with the same config"
        )
    staging = model.staging if isinstance(model, StageModel) else None
    is_same = staging is None if config.pipeline is None else staging and config.pipeline.allows(mesh.placement)
    if not is_same:
        stages = "1 pipeline stage" if staging is None else staging.plan.config.stages_in_words
        raise ConfigError(
            f"the model is cut into {stages}, but the config has {config.stages_in_words}; load it with the same config"
        )
    section, before = config.activation_checkpointing, model.cuboid.state.checkpointing
    sections: list[tuple[str, Any, Any, Iterable[str]]] = [
        ("tensor_parallel", sharding_of(model).config, config.tensor_parallel, _KEPT_OF_MESH)
    ]
    if section is not None and before is not None:
        sections.append(("activation_checkpointing", before, section, ("mode", "cpu_checkpointing")))
    if staging is not None and config.pipeline is not None:
        # What is left open was decided as the model was cut.
        schedule = ("schedule",) if config.pipeline.is_placed else ()
        sections.append(("pipeline", staging.plan.config.pipeline, config.pipeline, (*_KEPT_OF_STAGES, *schedule)))
    for name, old, new, keys in sections:
        for key in keys:
            was, now = getattr(old, key), getattr(new, key)
            if was != now:
                raise ConfigError(
                    f"the model was sharded with {name}.{key} {json.dumps(was)}, but the config has {json.dumps(now)}, "
                    "which would have no effect; load it with the same config"
                )


def _successors(model: nn.Module) -> _Successor:
    named = dict(model.named_parameters(remove_duplicate=False))
    ids, former = {id(parameter) for parameter in named.values()}, sharding_of(model).state.former

    def successor(parameter: nn.Parameter) -> nn.Parameter | None:
        if id(parameter) in ids:
            return parameter
        # A parameter from before the model was sharded: by its names then.
        names = () if former is None else former.names_of(parameter)
        if not names:
            raise OptimizerError(
                f"the optimizer is given a parameter of shape {list(parameter.shape)} that isn't the model's, and "
                "would train without effect; make it of the parameters of the very model that it is given with, "
                "model.parameters(), best after the model is sharded"
            )
        return next((named[name] for name in names if name in named), None)

    return successor


def _remap(parameters: Any, successor: _Successor) -> Any:
    """The same parameters, or groups of them, after the model was sharded; those of other stages are left out."""
    if isinstance(parameters, dict):
        options = {key: value for key, value in parameters.items() if key not in ("params", "param_names")}
        params = parameters["params"]
        return {"params": _remap([params] if isinstance(params, torch.Tensor) else params, successor), **options}
    if isinstance(parameters, nn.Parameter):
        return successor(parameters)
    if isinstance(parameters, tuple) and len(parameters) == 2 and isinstance(parameters[0], str):
        return _remap(parameters[1], successor)
    if isinstance(parameters, Iterable) and not isinstance(parameters, str | torch.Tensor):
        # A generator that hasn't run yet may yield the new modules' parameters or the old ones.
        remapped = [_remap(parameter, successor) for parameter in parameters]
        return [entry for entry in remapped if entry is not None]
    raise OptimizerError(f"the optimizer is given a {type(parameters).__name__}; give parameters or groups of them")


def _check_once(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    seen: set[int] = set()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in parameters:
        if id(parameter) in seen:
            raise OptimizerError(
                f"the optimizer is given {names[id(parameter)]} twice, which would be stepped on twice; give each "
                "parameter once"
            )
        seen.add(id(parameter))
