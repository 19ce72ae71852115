"""What Cuboid changes in accelerate, and so in the Hugging Face Trainer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import recursively_apply

from cuboid.compatibility import check_framework_config
from cuboid.config import CuboidConfig, own_config, split_config
from cuboid.config_file import load_config
from cuboid.errors import ConfigError
from cuboid.mesh import current_rank, current_world_size
from cuboid.patches.base import Patch
from cuboid.patches.deepspeed import SHARED_MEMORY_BUILD
from cuboid.topology import AXES


def _hf_deepspeed_config(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        ours = own_config(config_file_or_dict)
        if ours is None:
            original(self, config_file_or_dict)
            return
        config, rest = ours
        check_framework_config(config, rest, current_world_size())
        # Read already, since accelerate takes fewer kinds of files than DeepSpeed.
        original(self, load_config(config_file_or_dict))
        SHARED_MEMORY_BUILD.skip()
        # accelerate's data loader and the HF Trainer's batch arithmetic read the number of ranks that share their
        # data from here.
        self.config.setdefault("tensor_parallel", {})["autotp_size"] = config.ranks

    return init


def _gather_for_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        config = _config_of(self.state)
        if config is None or config.ranks == 1:
            return original(self, input_data, use_gather_object)
        if use_gather_object:
            raise ConfigError("eval_use_gather_object would count every row once for each rank of a mesh; leave it out")
        gather = self.gather
        self.gather = lambda data: recursively_apply(functools.partial(_one_of_each_copy, config=config), gather(data))
        try:
            return original(self, input_data)
        finally:
            del self.gather

    return gather_for_metrics


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
            # What accelerate would work the two numbers out from.
            "torch_device_mesh": None,
        }
        return original(**{**given, **own})

    return prepare_data_loader


def _config_of(state: Any) -> CuboidConfig | None:
    plugin = getattr(state, "deepspeed_plugin", None)
    return None if plugin is None else split_config(plugin.deepspeed_config)[0]


def _one_of_each_copy(gathered: torch.Tensor, *, config: CuboidConfig) -> torch.Tensor:
    """Rows of the first rank of each copy of the model, out of those of all ranks in rank order."""
    world_size = current_world_size()
    copies = config.topology(world_size).groups(("pipe", *AXES))
    return gathered.unflatten(0, (world_size, -1))[[ranks[0] for ranks in copies]].flatten(0, 1)


PATCHES = [
    Patch(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        package="accelerate",
        reason="check the config as soon as it is read, and tell accelerate how many ranks share their data",
        parameters=("config_file_or_dict",),
        replace=_hf_deepspeed_config,
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
