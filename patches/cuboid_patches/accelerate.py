"""Patches of accelerate, and so of the Hugging Face Trainer."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DummyScheduler, parse_flag_from_env, patch_environment, recursively_apply
from accelerate.utils import reduce as reduce_over_ranks
from deepspeed.accelerator import get_accelerator
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import load_config
from cuboid.config.schema import CuboidConfig, own_config
from cuboid.distributed.mesh import current_rank, current_world_size
from cuboid.distributed.topology import AXES
from cuboid.errors import ConfigError, CuboidError
from cuboid.integrations.handoff import check_schedule
from cuboid_patches.base import Patch
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD


def _hf_deepspeed_config(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        ours = own_config(config_file_or_dict)
        if ours is None:
            original(self, config_file_or_dict)
            return
        config, rest = ours
        check_framework_config(config, rest, current_world_size())
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
        plugin, asked = bound.arguments.get("deepspeed_plugin"), bool(bound.arguments.get("cpu"))
        plugins = plugin.values() if isinstance(plugin, dict) else [plugin]
        asked = asked or parse_flag_from_env("ACCELERATE_USE_CPU")
        if AcceleratorState._shared_state or all(_config_in(one) is None for one in plugins):
            return original(*args, **kwargs)
        device = get_accelerator().device_name()
        if asked and device != "cpu":
            raise ConfigError(
                f"accelerate was asked for the CPU, by Accelerator(cpu=True) or ACCELERATE_USE_CPU, but DeepSpeed runs "
                f"on {device}; set DS_ACCELERATOR=cpu as well, or don't ask for the CPU"
            )
        if device == "cpu" and not PartialState._shared_state:
            # Otherwise accelerate would ignore the other ranks if there is no GPU.
            PartialState(cpu=True, **bound.arguments.get("kwargs", {}))
        # Asked for the CPU, accelerate would ignore DeepSpeed too, and silently leave the model as it is.
        bound.arguments["cpu"] = False
        with patch_environment(ACCELERATE_USE_CPU="false"):
            return original(*bound.args, **bound.kwargs)

    return init


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
        _fill_rows(self, plugin, config, args)
        # With split_batches, accelerate leaves a schedule's length as it is.
        return original(self, *(args if self.split_batches else (_for_ranks(one, config) for one in args)))

    return prepare_deepspeed


def _fill_rows(accelerator: Any, plugin: Any, config: CuboidConfig, args: Sequence[Any]) -> None:
    """With ``split_batches``, set the rows per replica; accelerate would count every rank as a replica."""
    key = "train_micro_batch_size_per_gpu"
    if not (accelerator.split_batches and plugin.is_auto(key)):
        return
    sizes = [loader.batch_size for loader in args if isinstance(loader, DataLoader) and loader.batch_size is not None]
    if sizes:
        rows = (min(sizes) if plugin.is_train_batch_min else max(sizes)) // _copies(config)
        plugin.fill_match(key, must_match=False, **{key: rows})


def _for_ranks(given: Any, config: CuboidConfig) -> Any:
    """Multiply the length of a config's schedule by the ranks of a copy, since accelerate divides it by all ranks."""
    if not isinstance(given, DummyScheduler) or given.total_num_steps is None or AcceleratorState().num_processes == 1:
        return given
    scaled = copy.copy(given)
    scaled.total_num_steps = given.total_num_steps * config.ranks
    return scaled


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


def _gather_for_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        config = _config_of(self.state)
        if config is None or config.ranks == 1:
            return original(self, input_data, use_gather_object)
        if use_gather_object or not _has_tensors_only(input_data):
            # The lists of all ranks are concatenated, so only the first rank of each copy contributes.
            first = any(ranks[0] == current_rank() for ranks in _ranks_of_copies(config))
            return original(self, input_data if first else [], use_gather_object=True)
        gather = self.gather
        self.gather = lambda data: recursively_apply(functools.partial(_one_of_each_copy, config=config), gather(data))
        try:
            return original(self, input_data)
        finally:
            del self.gather

    return gather_for_metrics


def _has_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _reduce(original: Any) -> Any:
    @functools.wraps(original)
    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        config = _config_of(self.state)
        if config is None or config.ranks == 1 or reduction != "sum":
            return original(self, tensor, reduction, scale)

        def total(own: torch.Tensor) -> torch.Tensor:
            if own.is_floating_point() or own.is_complex():
                # The ranks of a copy have the same value, or their mean is meant. In half precision the sum over all of
                # them could overflow.
                wide = torch.promote_types(own.dtype, torch.float32)
                return (original(self, own.to(wide), "sum") / config.ranks).to(own.dtype)
            return _counted_once(self.gather(own.unsqueeze(0)), config)

        return recursively_apply(total, tensor, error_on_other_type=True)

    return reduce


def _counted_once(gathered: torch.Tensor, config: CuboidConfig) -> torch.Tensor:
    """Sum integers ``[ranks, …]`` over the copies of the model; the ranks of a copy must have the same ones."""
    # Indexed by a tensor, since a list of lists would be taken for indices of two dims.
    by_copy = gathered[torch.tensor(_ranks_of_copies(config))]
    if bool((by_copy != by_copy[:, :1]).any()):
        raise CuboidError(
            "accelerator.reduce adds up what the replicas have, but the ranks of one have different whole numbers; use "
            'reduction="mean" of a floating-point tensor, or accelerator.gather, for what each rank has by itself'
        )
    return by_copy[:, 0].sum(0, dtype=gathered.dtype)


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
        if config is None or world_size == config.ranks:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if given.get("dispatch_batches"):
            raise ConfigError(
                "dispatch_batches would give every replica the same batches; leave it out, so that each reads its own"
            )
        topology = config.topology(world_size)
        own = {
            "num_processes": topology.data,
            "process_index": topology.coordinate(current_rank()).data,
            "dispatch_batches": False,
            # Otherwise accelerate derives the two numbers from it.
            "torch_device_mesh": None,
        }
        return original(**{**given, **own})

    return prepare_data_loader


def _config_of(state: Any) -> CuboidConfig | None:
    return _config_in(getattr(state, "deepspeed_plugin", None))


def _config_in(plugin: Any) -> CuboidConfig | None:
    ours = None if plugin is None else own_config(plugin.deepspeed_config)
    return None if ours is None else ours[0]


def _copies(config: CuboidConfig) -> int:
    """Replicas of the model."""
    return config.topology(current_world_size()).data


def _ranks_of_copies(config: CuboidConfig) -> list[list[int]]:
    return config.topology(current_world_size()).groups(("pipe", *AXES))


def _one_of_each_copy(gathered: torch.Tensor, *, config: CuboidConfig) -> torch.Tensor:
    """Select the rows of each copy's first rank, ``[ranks · n, …] -> [copies · n, …]``, both in rank order."""
    firsts = [ranks[0] for ranks in _ranks_of_copies(config)]
    return gathered.unflatten(0, (current_world_size(), -1))[firsts].flatten(0, 1)


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
        target="accelerate.accelerator:Accelerator._prepare_deepspeed",
        package="accelerate",
        reason="count replicas where accelerate counts ranks, in rows of a batch and steps of a schedule",
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
        replace=_reduce,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.check_trigger",
        package="accelerate",
        reason="let any rank of a replica set it, though sums count replicas",
        parameters=(),
        replace=_check_trigger,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.gather_for_metrics",
        package="accelerate",
        reason="count the rows that the ranks of a copy of the model share once, as predictions and in the last batch",
        parameters=("input_data", "use_gather_object"),
        replace=_gather_for_metrics,
    ),
    Patch(
        target="accelerate.accelerator:prepare_data_loader",
        package="accelerate",
        reason="give each replica its own data, also where the ranks of one aren't neighbours, as in a pipeline",
        parameters=("dataloader", "num_processes", "process_index", "dispatch_batches", "torch_device_mesh"),
        replace=_prepare_data_loader,
    ),
]
