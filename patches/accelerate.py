"""What Cuboid changes in accelerate, and so in the Hugging Face Trainer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply

from cuboid.compatibility import check_framework_config
from cuboid.config import load_config, split_config
from cuboid.errors import ConfigError
from cuboid.mesh import current_world_size
from cuboid.patches.base import Patch
from cuboid.patches.deepspeed import SHARED_MEMORY_BUILD


def _hf_deepspeed_config(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        if isinstance(config_file_or_dict, str | Path) and Path(config_file_or_dict).suffix in (
            ".yaml",
            ".yml",
        ):
            config_file_or_dict = load_config(config_file_or_dict)
        original(self, config_file_or_dict)
        config, rest = split_config(self.config)
        if config is None:
            return
        check_framework_config(config, rest, current_world_size())
        SHARED_MEMORY_BUILD.skip()
        # accelerate's data loader and the HF Trainer's batch arithmetic read the number of ranks that share their
        # data from here.
        self.config.setdefault("tensor_parallel", {})["autotp_size"] = config.ranks

    return init


def _gather_for_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        ranks = _ranks_of_a_copy(self)
        if ranks == 1:
            return original(self, input_data, use_gather_object)
        if use_gather_object:
            raise ConfigError("eval_use_gather_object would count every row once for each rank of a mesh; leave it out")
        gather = self.gather
        self.gather = lambda data: recursively_apply(functools.partial(_one_of_each_mesh, ranks=ranks), gather(data))
        try:
            return original(self, input_data)
        finally:
            del self.gather

    return gather_for_metrics


def _ranks_of_a_copy(accelerator: Any) -> int:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    config = None if plugin is None else split_config(plugin.deepspeed_config)[0]
    return 1 if config is None else config.ranks


def _one_of_each_mesh(gathered: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """Rows of the first rank of each mesh or pipeline, out of those of all ranks in rank order."""
    return gathered.unflatten(0, (current_world_size(), -1))[::ranks].flatten(0, 1)


PATCHES = [
    Patch(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        package="accelerate",
        versions=">=1.10,<2",
        reason="check the config as soon as it is read, and tell accelerate how many ranks share their data",
        parameters=("config_file_or_dict",),
        replace=_hf_deepspeed_config,
    ),
    Patch(
        target="accelerate.accelerator:Accelerator.gather_for_metrics",
        package="accelerate",
        versions=">=1.10,<2",
        reason="count the rows that the ranks of a mesh share once, as predictions and in the last batch",
        parameters=("input_data", "use_gather_object"),
        replace=_gather_for_metrics,
    ),
]
