"""What Cuboid changes in transformers and accelerate."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cuboid.config import CuboidConfig, load_config, split_config
from cuboid.hf.api import active_config
from cuboid.hf.attention import IMPLEMENTATIONS, attention_twin, mask_twin
from cuboid.hf.load import load_sharded
from cuboid.mesh import current_world_size
from cuboid.patches.base import Patch, Registration
from cuboid.patches.deepspeed_config import check_framework_config, skip_shared_memory_build
from transformers.integrations.deepspeed import deepspeed_config
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface


def _from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        active = active_config() or _config_kept_alive()
        if active is None:
            return original.__func__(cls, *args, **kwargs)
        return load_sharded(cls, original.__func__, active, args, kwargs)

    return classmethod(from_pretrained)


def _config_kept_alive() -> CuboidConfig | None:
    """Cuboid's part of the ``HfDeepSpeedConfig`` that is alive, if any."""
    source = deepspeed_config()
    return None if source is None else split_config(source)[0]


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
        skip_shared_memory_build()
        # accelerate's data loader and the HF Trainer's batch arithmetic read the number of ranks that share their
        # data from here.
        self.config["tensor_parallel"]["autotp_size"] = config.tensor_parallel.mesh_size

    return init


PATCHES: list[Patch | Registration] = [
    Patch(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        package="transformers",
        versions=">=5.23,<5.24",
        reason="read only this rank's slices when a config of ours is active",
        parameters=("pretrained_model_name_or_path", "config", "kwargs"),
        replace=_from_pretrained,
    ),
    Patch(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        package="accelerate",
        versions=">=1.10,<2",
        reason="check the config as soon as it is read, and tell accelerate how many ranks share their data",
        parameters=("config_file_or_dict",),
        replace=_hf_deepspeed_config,
    ),
    Registration(AttentionInterface, {f"cuboid_{name}": attention_twin(name) for name in IMPLEMENTATIONS}),
    Registration(AttentionMaskInterface, {f"cuboid_{name}": mask_twin(name) for name in IMPLEMENTATIONS}),
]
