"""Patches of accelerate, and so of the Hugging Face Trainer.

To accelerate, each process trains a model of its own. Here, a replica of the model does, which several ranks hold
together. So wherever it is asked about data or metrics, it answers in replicas: ``Accelerator.num_processes`` and
``process_index``, all gathers and sums, and what splits rows between processes. What starts, places, saves or prints
(``is_main_process``, ``local_process_index``, ``PartialState``, barriers) stays by ranks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import parse_flag_from_env, patch_environment, recursively_apply
from accelerate.utils import reduce as reduce_over_ranks
from deepspeed.accelerator import get_accelerator
from torch.optim.lr_scheduler import LRScheduler

from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import load_config
from cuboid.config.schema import CuboidConfig, own_config
from cuboid.distributed.mesh import current_rank, current_world_size
from cuboid.distributed.topology import AXES
from cuboid.errors import ConfigError, CuboidError, OptimizerError
from cuboid.failures.rank_agreement import naming_lost_ranks
from cuboid.integrations.handoff import check_schedule
from cuboid_patches.base import Patch
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD


def _hf_deepspeed_config(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        parts = own_config(config_file_or_dict)
        if parts is None:
            original(self, config_file_or_dict)
            return
        config, framework_config = parts
        check_framework_config(config, framework_config, current_world_size())
        # Loaded here, since accelerate reads fewer kinds of files than DeepSpeed.
        original(self, load_config(config_file_or_dict))
        SHARED_MEMORY_BUILD.skip()
        # accelerate's data loader and the HF Trainer's batch arithmetic read the number of ranks that share their
        # data from here.
        self.config.setdefault("tensor_parallel", {})["autotp_size"] = config.ranks

    return init


def _accelerator_state(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        plugin, asks_for_cpu = bound.arguments.get("deepspeed_plugin"), bool(bound.arguments.get("cpu"))
        plugins = plugin.values() if isinstance(plugin, dict) else [plugin]
        asks_for_cpu = asks_for_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        if AcceleratorState._shared_state or all(_config_in(one) is None for one in plugins):
            return original(*args, **kwargs)
        device = get_accelerator().device_name()
        if asks_for_cpu and device != "cpu":
            raise ConfigError(
                f"accelerate was asked for the CPU, by Accelerator(cpu=True) or ACCELERATE_USE_CPU, but DeepSpeed runs "
                f"on {device}; set DS_ACCELERATOR=cpu as well, or don't ask for the CPU"
            )
        if device == "cpu" and not (
            PartialState._shared_state and PartialState().num_processes == current_world_size()
        ):
            # Otherwise accelerate would ignore the other ranks if there is no GPU, as it already does if a Trainer's
            # arguments have made this state without use_cpu. All instances share what is set here.
            PartialState._reset_state()
            PartialState(cpu=True, **bound.arguments.get("kwargs", {}))
        # Asked for the CPU, accelerate would ignore DeepSpeed too, and silently leave the model as it is.
        bound.arguments["cpu"] = False
        with patch_environment(ACCELERATE_USE_CPU="false"):
            return original(*bound.args, **bound.kwargs)

    return init


def _fill_match(original: Any) -> Any:
    @functools.wraps(original)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
        section, _, key = ds_key_long.partition(".")
        # Of "auto" in Cuboid's sections, such as a mesh, accelerate knows no value.
        is_ours = bool(key) and section in ("tensor_parallel", "pipeline", "activation_checkpointing", "checkpoint")
        if not is_ours or _config_in(self) is None:
            original(self, ds_key_long, *args, **kwargs)

    return fill_match


def _prepare_deepspeed(original: Any) -> Any:
    @functools.wraps(original)
    def prepare_deepspeed(self: Any, *args: Any) -> Any:
        plugin = self.deepspeed_plugin
        config = _config_in(plugin)
        if config is None:
            return original(self, *args)
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        for schedule in (one for one in args if isinstance(one, LRScheduler) and optimizers):
            check_schedule(schedule, optimizers[0])
        for optimizer in optimizers:
            _reject_replaced(optimizer, plugin.deepspeed_config)
        return original(self, *args)

    return prepare_deepspeed


def _reject_replaced(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
    """Raise an error if accelerate would silently train with another optimizer: with offloading, it takes CPUAdam."""
    offloaded = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if offloaded.get("device", "none") == "none" or not config.get("zero_force_ds_cpu_optimizer", True):
        return
    kind = type(optimizer)
    is_same_rule = kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    if not is_same_rule and not kind.__name__.startswith("DeepSpeedCPU") and kind.__module__[:12] != "bitsandbytes":
        raise OptimizerError(
            f"accelerate would silently train with DeepSpeed's CPUAdam in place of {kind.__name__}, because of "
            'zero_optimization.offload_optimizer. Write "zero_force_ds_cpu_optimizer": false, if the optimizer treats '
            "each element by itself; or take AdamW, or leave out zero_optimization.offload_optimizer"
        )


def _scheduler_step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config_of(AcceleratorState())
        if config is None or config.ranks == 1 or self.split_batches or not self.step_with_optimizer:
            original(self, *args, **kwargs)
            return
        # accelerate would step once per rank, to make up for shorter data loaders; but they are shorter only by the
        # number of replicas. With split_batches, each call of the original makes one step.
        once = copy.copy(self)
        once.split_batches = True
        for _ in range(_copies(config) if self.gradient_state.sync_gradients else 1):
            end = getattr(self.scheduler, "total_steps", None)
            if end is None or self.scheduler._step_count <= end:
                original(once, *args, **kwargs)

    return step


def _num_processes(original: Any) -> Any:
    def num_processes(self: Any) -> int:
        config = _config_of(self.state)
        return int(original.fget(self)) if config is None else _copies(config)

    return property(num_processes)


def _process_index(original: Any) -> Any:
    def process_index(self: Any) -> int:
        config = _config_of(self.state)
        return int(original.fget(self)) if config is None else own_copy(config)

    return property(process_index)


def _is_last_process(_: Any) -> Any:
    # The original compares the two numbers above, and all ranks of the last replica would be the last one.
    return property(lambda self: self.state.is_last_process)


def _gather(original: Any) -> Any:
    @functools.wraps(original)
    def gather(tensor: Any) -> Any:
        config, gathered = shared_config(), original(tensor)
        if config is None:
            return gathered
        return recursively_apply(functools.partial(_one_of_each_copy, config=config), gathered)

    return gather


def _gather_object(original: Any) -> Any:
    @functools.wraps(original)
    def gather_object(object: Any) -> Any:
        config = shared_config()
        # The lists of all ranks are concatenated, so only the first rank of each copy contributes.
        is_given = config is None or any(ranks[0] == current_rank() for ranks in _ranks_of_copies(config))
        return original(object if is_given else [])

    return gather_object


def _broadcast(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def broadcast(*args: Any, **kwargs: Any) -> Any:
        bound, config = signature.bind(*args, **kwargs), shared_config()
        (name,) = {"src", "from_process"} & signature.parameters.keys()
        if config is not None and bound.arguments.get(name, 0):
            bound.arguments[name] = _ranks_of_copies(config)[bound.arguments[name]][0]
        return original(*bound.args, **bound.kwargs)

    return broadcast


def _split_between_processes(original: Any) -> Any:
    @functools.wraps(original)
    def split_between_processes(self: Any, inputs: Any, apply_padding: bool = False) -> Any:
        config, by = shared_config(), self
        if config is not None:
            by = SimpleNamespace(num_processes=_copies(config), process_index=own_copy(config), device=self.device)
        return original(by, inputs, apply_padding)

    return split_between_processes


def _set_seed(original: Any) -> Any:
    @functools.wraps(original)
    def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
        config = shared_config() if device_specific else None
        if config is not None:
            # The ranks of a copy draw the same numbers.
            seed, device_specific = seed + own_copy(config), False
        original(seed, device_specific, deterministic)

    return set_seed


def _reduce(original: Any) -> Any:
    @functools.wraps(original)
    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        config = _config_of(self.state)
        if config is None or config.ranks == 1 or reduction != "sum":
            return original(self, tensor, reduction, scale)

        def total(x: torch.Tensor) -> torch.Tensor:
            if x.is_floating_point() or x.is_complex():
                # The ranks of a copy have the same value, or their mean is meant. In half precision the sum over all of
                # them could overflow.
                wide = torch.promote_types(x.dtype, torch.float32)
                return (original(self, x.to(wide), "sum") / config.ranks).to(x.dtype)
            return _counted_once(x, config)

        return recursively_apply(total, tensor, error_on_other_type=True)

    return reduce


def _counted_once(x: torch.Tensor, config: CuboidConfig) -> torch.Tensor:
    """Sum integers over the copies of the model; the ranks of a copy must have the same ones."""
    tensors = [torch.empty_like(x) for _ in range(current_world_size())]
    torch.distributed.all_gather(tensors, x.contiguous())
    by_copy = torch.stack([torch.stack([tensors[rank] for rank in ranks]) for ranks in _ranks_of_copies(config)])
    if bool((by_copy != by_copy[:, :1]).any()):
        raise CuboidError(
            "accelerator.reduce adds up what the replicas have, but the ranks of one have different whole numbers; use "
            'reduction="mean" of a floating-point tensor, or torch.distributed, for what each rank has by itself'
        )
    return by_copy[:, 0].sum(0, dtype=x.dtype)


def _check_trigger(original: Any) -> Any:
    @functools.wraps(original)
    def check_trigger(self: Any) -> bool:
        # Any rank may have set it, but the patched ``reduce`` rejects integers that differ within a copy.
        self.reduce = lambda flag: reduce_over_ranks(flag, "sum")
        try:
            return bool(original(self))
        finally:
            del self.reduce

    return check_trigger


def _prepare_data_loader(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        config, world_size = _config_of(AcceleratorState()), current_world_size()
        if config is None:
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if world_size == config.ranks:
            # accelerate divides both by the ranks of the only copy, which may also dispatch its batches.
            return original(**{**arguments, "num_processes": world_size, "process_index": current_rank()})
        if arguments.get("dispatch_batches"):
            raise ConfigError(
                "dispatch_batches would give every replica the same batches; leave it out, so that each reads its own"
            )
        topology = config.topology(world_size)
        replica_arguments = {
            "num_processes": topology.data,
            "process_index": own_copy(config),
            "dispatch_batches": False,
            # Otherwise accelerate derives the two numbers from it.
            "torch_device_mesh": None,
        }
        return original(**{**arguments, **replica_arguments})

    return prepare_data_loader


def shared_config() -> CuboidConfig | None:
    """The active config, if several ranks share a copy of the model."""
    state = AcceleratorState() if AcceleratorState._shared_state else None
    config = _config_of(state)
    if state is None:
        # Before there is an Accelerator, TrainingArguments keep a config alive.
        module = sys.modules.get("transformers.integrations.deepspeed")
        source = None if module is None else module.deepspeed_config()
        parts = None if source is None else own_config(source)
        config = None if parts is None else parts[0]
    return None if config is None or config.ranks == 1 else config


def own_copy(config: CuboidConfig) -> int:
    """Which copy of the model this rank belongs to."""
    return config.topology(current_world_size()).coordinate(current_rank()).data


def _config_of(state: Any) -> CuboidConfig | None:
    return _config_in(getattr(state, "deepspeed_plugin", None))


def _config_in(plugin: Any) -> CuboidConfig | None:
    parts = None if plugin is None else own_config(plugin.deepspeed_config)
    return None if parts is None else parts[0]


def _copies(config: CuboidConfig) -> int:
    """Replicas of the model."""
    return config.topology(current_world_size()).data


def _ranks_of_copies(config: CuboidConfig) -> list[list[int]]:
    return config.topology(current_world_size()).groups(("pipe", *AXES))


def _one_of_each_copy(gathered: torch.Tensor, *, config: CuboidConfig) -> torch.Tensor:
    """Select the rows of each copy's first rank, ``[ranks · n, …] -> [copies · n, …]``, both in rank order."""
    firsts = [ranks[0] for ranks in _ranks_of_copies(config)]
    return gathered.unflatten(0, (current_world_size(), -1))[firsts].flatten(0, 1)


def _guarded(name: str, replace: Callable[[Any], Any] = lambda original: original) -> Callable[[Any], Any]:
    """The replacement of a collective, which says why a rank was lost in it."""
    return lambda original: naming_lost_ranks(replace(original), f"accelerate's {name}")


PATCHES = [
    Patch(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        package="accelerate",
        reason="check the config as soon as it is read, and tell accelerate how many ranks share their data",
        parameters=("config_file_or_dict",),
        replace=_hf_deepspeed_config,
    ),
    Patch(
        target="accelerate.state:AcceleratorState.__init__",
        package="accelerate",
        reason="keep DeepSpeed, and the other ranks, where there is no GPU or none is wanted",
        parameters=("cpu", "deepspeed_plugin", "kwargs"),
        replace=_accelerator_state,
    ),
    Patch(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.fill_match",
        package="accelerate",
        reason='leave "auto" in sections of Cuboid\'s to Cuboid',
        parameters=("ds_key_long",),
        replace=_fill_match,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator._prepare_deepspeed",
        package="accelerate",
        reason="refuse a schedule of another optimizer than the one that is trained with",
        parameters=("args",),
        replace=_prepare_deepspeed,
    ),
    Patch(
        target="accelerate.scheduler:AcceleratedScheduler.step",
        package="accelerate",
        reason="step a schedule once for each replica, not for each rank",
        parameters=("args", "kwargs"),
        replace=_scheduler_step,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.reduce",
        package="accelerate",
        reason="add up what the replicas have, not what each of their ranks has again",
        parameters=("tensor", "reduction", "scale"),
        replace=_guarded("reduce", _reduce),
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.check_trigger",
        package="accelerate",
        reason="let any rank of a replica set it, though sums count replicas",
        parameters=(),
        replace=_guarded("check_trigger", _check_trigger),
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.num_processes",
        package="accelerate",
        reason="count replicas, since several ranks read the same data",
        parameters=("self",),
        replace=_num_processes,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.process_index",
        package="accelerate",
        reason="name the replica whose data this rank reads",
        parameters=("self",),
        replace=_process_index,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.is_last_process",
        package="accelerate",
        reason="keep it true on one rank only",
        parameters=("self",),
        replace=_is_last_process,
    ),
    Patch(
        target="accelerate.utils.operations:_gpu_gather",
        package="accelerate",
        reason="count the rows that the ranks of a copy of the model share once",
        parameters=("tensor",),
        replace=_guarded("gather", _gather),
    ),
    Patch(
        target="accelerate.utils.operations:_gpu_gather_object",
        package="accelerate",
        reason="count the objects that the ranks of a copy of the model share once",
        parameters=("object",),
        replace=_guarded("gather_object", _gather_object),
    ),
    Patch(
        target="accelerate.utils.operations:_gpu_broadcast",
        package="accelerate",
        reason="send from the first rank of the replica that is named",
        parameters=("data", "src"),
        replace=_guarded("broadcast", _broadcast),
    ),
    *(
        Patch(
            target=f"{module}:broadcast_object_list",
            package="accelerate",
            reason="send from the first rank of the replica that is named",
            parameters=("object_list", "from_process"),
            replace=_guarded("broadcast_object_list", _broadcast),
        )
        for module in ("accelerate.utils.operations", "accelerate.utils")
    ),
    *(
        Patch(
            target=f"{module}:reduce",
            package="accelerate",
            reason="say why a rank was lost",
            parameters=("tensor", "reduction", "scale"),
            replace=_guarded("reduce"),
        )
        for module in ("accelerate.utils.operations", "accelerate.utils")
    ),
    Patch(
        target="accelerate.state:PartialState.wait_for_everyone",
        package="accelerate",
        reason="say why a rank was lost",
        parameters=("self",),
        replace=_guarded("wait_for_everyone"),
    ),
    *(
        Patch(
            target=f"{module}:set_seed",
            package="accelerate",
            reason="give the ranks of a replica the same seed, and replicas different ones",
            parameters=("seed", "device_specific", "deterministic"),
            replace=_set_seed,
        )
        for module in ("accelerate.utils.random", "accelerate.utils")
    ),
    Patch(
        target="accelerate.state:PartialState.split_between_processes",
        package="accelerate",
        reason="split rows between replicas, whose ranks get the same ones",
        parameters=("inputs", "apply_padding"),
        replace=_split_between_processes,
    ),
    Patch(
        target="accelerate.accelerator:prepare_data_loader",
        package="accelerate",
        reason="give each replica its own data, also where the ranks of one aren't neighbours, as in a pipeline",
        parameters=("dataloader", "num_processes", "process_index", "dispatch_batches", "torch_device_mesh"),
        replace=_prepare_data_loader,
    ),
]
